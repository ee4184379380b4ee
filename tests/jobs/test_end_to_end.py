"""One real verl job: stock trainer, Ray, an engine of two tensor-parallel ranks, weight sync, drafts, clean end."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter

import numpy as np
import psutil
import pytest
from rhyme_verl._core import prompt_key

from examples.quickstart.progress import LARGEST_DIFFERENCE, SAME_PROBABILITY, json_lines
from examples.quickstart.quickstart import FP32_TRAINER
from rhyme_verl.history import snapshot
from rhyme_verl.telemetry.trace import read_trace

pytestmark = [pytest.mark.engine, pytest.mark.slow]

NUM_PROBLEMS = 16
NUM_ANSWERS = 8
EPOCHS = 2


ROLLOUT = "actor_rollout_ref.rollout"


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("demo") / "run"
    overrides = (
        f"{ROLLOUT}.tensor_model_parallel_size=2",
        "trainer.n_gpus_per_node=2",
        "ray_kwargs.ray_init.num_gpus=2",
        f"+{ROLLOUT}.custom.rhyme.spec.policy=fixed",  # not up to this machine's speed
        f"trainer.save_freq={EPOCHS}",  # the last step
        FP32_TRAINER,
    )
    result = subprocess.run(
        [sys.executable, "-m", "examples.quickstart.demo", f"--out={out}", f"--epochs={EPOCHS}",
         f"--num-problems={NUM_PROBLEMS}", "--no-compare", *(f"--override={override}" for override in overrides)],
        capture_output=True,
        text=True,
        timeout=3600,  # the two ranks wait busily: 10 minutes where other tests share two slow cores
    )  # fmt: skip
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    assert (out / "curves.png").stat().st_size > 10_000
    for step in range(1, EPOCHS + 1):
        assert f"step   {step}/{EPOCHS}" in result.stdout
    return out


@pytest.fixture(scope="module")
def summary(run_folder):
    return json.loads((run_folder / "summary.json").read_text())


@pytest.fixture(scope="module")
def trace(run_folder):
    return read_trace(run_folder / "trace")


def test_every_token_has_the_same_probability_in_rollout_and_trainer(run_folder):
    """Both compute in float32, so that a single wrong log-prob, an old weight or a stale KV-cache block shows."""
    differences = [line["data"][LARGEST_DIFFERENCE] for line in json_lines(run_folder / "metrics.jsonl")]
    assert len(differences) == EPOCHS
    assert max(differences) < SAME_PROBABILITY


def test_drafts_come_from_earlier_epochs(summary):
    for epoch in summary["epochs"][1:]:
        assert epoch["accepted"] > 100
        assert epoch["accepted_per_verify"] > 1


def test_verls_trackers_have_rhymes_metrics_at_the_same_step(run_folder, summary):
    logged = {line["step"]: line["data"] for line in json_lines(run_folder / "metrics.jsonl")}
    for step in summary["steps"]:
        metrics = logged[step["step"]]
        assert metrics["rhyme/rollout/tokens"] == step["tokens"]
        assert metrics["rhyme/spec/draft_tokens"] == step["drafted"]
        assert metrics["rhyme/spec/accepted_tokens"] == step["accepted"]
        assert metrics["rhyme/history/tokens"] > 0
        assert "rhyme/spec/time_saved_s" in metrics
    assert 0.0 < metrics["rhyme/spec/acceptance_rate"] < 1.0
    assert "rhyme/spec/acceptance_rate" in (run_folder / "verl.log").read_text(errors="replace"), "on the console"


def test_the_log_says_what_is_on(run_folder):
    log = (run_folder / "verl.log").read_text(errors="replace")
    assert "HistoSpec drafts up to" in log
    assert "HistoPipe schedules 1 replicas" in log


def test_the_store_remembers_every_answer_and_the_engine_gets_those_of_earlier_epochs(run_folder, summary):
    tokens = [epoch["tokens"] for epoch in summary["epochs"]]
    lines = json_lines(run_folder / "stats/replica-0.jsonl")
    assert [line["history_store_tokens"] for line in lines] == [sum(tokens[: i + 1]) for i in range(EPOCHS)]
    assert [line["history_tokens"] for line in lines] == [sum(tokens[:i]) for i in range(EPOCHS)]
    assert all(line["history_store_bytes"] > 4 * line["history_store_tokens"] for line in lines)
    assert all(line["history_store_evicted_tokens"] == 0 for line in lines)


def test_the_trace_agrees_with_verls_own_metrics(summary, trace):
    assert trace.num_rows == NUM_PROBLEMS * NUM_ANSWERS * EPOCHS
    rows = trace.to_pylist()
    for step in summary["steps"]:
        of_step = [row for row in rows if row["step"] == step["step"] - 1]  # the weights are one version older
        assert {row["epoch"] for row in of_step} == {step["epoch"]}
        assert sum(row["length"] for row in of_step) == step["tokens"]
        assert sum(row["reward"] for row in of_step) / len(of_step) == pytest.approx(step["reward"], abs=1e-6)
        samples = Counter((row["prompt_key"], row["sample"]) for row in of_step)
        assert set(samples.values()) == {1}
        assert {sample for _, sample in samples} == set(range(NUM_ANSWERS))
        assert len({key for key, _ in samples}) == NUM_PROBLEMS
    for row in rows:
        assert row["prompt_key"] == prompt_key(np.array(row["prompt"], np.int32))
        assert row["length"] == len(row["tokens"])
        assert not row["validate"]


def test_history_is_saved_with_the_checkpoint_and_every_answer_has_its_reward(run_folder, trace):
    folder = run_folder / f"checkpoints/global_step_{EPOCHS}" / snapshot.FOLDER
    (file,) = snapshot.shard_files(folder)
    saved = Counter((key, answer.step, answer.tokens, answer.reward) for key, answer in snapshot.load(file))
    recorded = Counter(
        (row["prompt_key"], row["step"], np.array(row["tokens"], np.int32).tobytes(), row["reward"])
        for row in trace.to_pylist()
    )
    assert saved == recorded


def test_an_interrupted_demo_leaves_no_process_behind(tmp_path):
    def mine():
        running = psutil.process_iter(["cmdline"])  # None of a process that has just ended
        return {process.pid for process in running if str(tmp_path) in " ".join(process.info["cmdline"] or ())}

    demo = subprocess.Popen(
        [sys.executable, "-m", "examples.quickstart.demo", f"--out={tmp_path / 'run'}"],
        env=os.environ | {"RAY_ADDRESS": "auto"},  # as on a machine of a cluster
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # ignored if the tests run in the background
    )
    deadline = time.monotonic() + 1200
    log = tmp_path / "run/verl.log"
    while not (log.exists() and "RhymeHttpServer" in log.read_text(errors="replace")):
        assert demo.poll() is None and time.monotonic() < deadline
        time.sleep(0.5)
    tree = psutil.Process(demo.pid).children(recursive=True)
    assert any("raylet" in process.name() for process in tree)
    demo.send_signal(signal.SIGINT)
    assert demo.wait(60) == 130
    gone, alive = psutil.wait_procs(tree, timeout=10)
    assert not alive
    assert not mine()
