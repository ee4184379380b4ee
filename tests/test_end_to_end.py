"""One real verl job: stock trainer, Ray, vLLM's CPU engine, weight sync, drafts from earlier epochs, clean end."""

import json
import signal
import subprocess
import sys
import time

import psutil
import pytest

pytestmark = [pytest.mark.engine, pytest.mark.slow]

NUM_PROBLEMS = 16
EPOCHS = 3


@pytest.fixture(scope="module")
def summary(tmp_path_factory):
    out = tmp_path_factory.mktemp("demo") / "run"
    result = subprocess.run(
        [sys.executable, "-m", "examples.quickstart.demo", f"--out={out}", f"--epochs={EPOCHS}",
         f"--num-problems={NUM_PROBLEMS}",
         "--override=+actor_rollout_ref.rollout.custom.rhyme.spec.policy=aimd"],  # not up to this machine's speed
        capture_output=True,
        text=True,
        timeout=600,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    assert (out / "curves.png").stat().st_size > 10_000
    for step in range(1, EPOCHS + 1):
        assert f"step   {step}/{EPOCHS}" in result.stdout
    return json.loads((out / "summary.json").read_text())


def test_the_rollout_policy_is_the_trained_policy_at_every_step(summary):
    correlations = [step["probs_correlation"] for step in summary["steps"]]
    assert len(correlations) == EPOCHS
    assert min(correlations) > 0.99


def test_drafts_come_from_earlier_epochs(summary):
    first, *later = summary["epochs"]
    assert first["drafted"] == 0
    for epoch in later:
        assert epoch["accepted"] > 100
        assert epoch["accepted_per_verify"] > 1
    # 8 answers a problem and epoch are remembered; the engine learns them from the server, not from its own rows.
    history = [epoch["history_tokens"] for epoch in summary["epochs"]]
    assert history == [sum(epoch["tokens"] for epoch in summary["epochs"][: i + 1]) for i in range(EPOCHS)]


def test_an_interrupted_demo_leaves_no_process_behind(tmp_path):
    def mine():
        return {process.pid for process in psutil.process_iter() if str(tmp_path) in " ".join(process.cmdline())}

    demo = subprocess.Popen(
        [sys.executable, "-m", "examples.quickstart.demo", f"--out={tmp_path / 'run'}"],
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # ignored if the tests run in the background
    )
    deadline = time.monotonic() + 240
    log = tmp_path / "run/verl.log"
    while time.monotonic() < deadline and not (log.exists() and "RhymeHttpServer" in log.read_text(errors="replace")):
        time.sleep(0.5)
    tree = psutil.Process(demo.pid).children(recursive=True)
    assert any("raylet" in process.name() for process in tree)
    demo.send_signal(signal.SIGINT)
    assert demo.wait(60) == 130
    gone, alive = psutil.wait_procs(tree, timeout=10)
    assert not alive
    assert not mine()
