"""Whole verl jobs in `colocate_async` whose rollouts HistoPipe schedules: ages, resumption, and what dies."""

import json
import os
import signal
import time
from contextlib import contextmanager

import psutil
import pytest

from examples.tool_agent.run import overrides as tool_agent
from tools.cpu_job import policy, problems, quickstart
from tools.cpu_job.job import VerlJob

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.faults]

BATCH_SIZE = 8
SAMPLES = 4
STEPS = 9
MAX_AGE = 2
ROLLOUT = "actor_rollout_ref.rollout"
END_SECONDS = 60.0


@contextmanager
def job(out, *overrides, replicas=1, steps=STEPS):
    """A job on 2 x BATCH_SIZE problems with units of two batches and a quarter of a batch carried."""
    arguments = [
        *quickstart.job_arguments(out, epochs=100, rollout="rhyme"),
        f"trainer.total_training_steps={steps}",
        "trainer.v1.trainer_mode=colocate_async",
        f"+{ROLLOUT}.custom.rhyme.pipe.max_age={MAX_AGE}",
        "trainer.v1.sampler.custom_sampler.path=pkg://benchmarks.jobs.recorded_sampler",
        "trainer.v1.sampler.custom_sampler.name=RecordedReplayBufferAsync",
        f"data.train_batch_size={BATCH_SIZE}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={BATCH_SIZE}",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16",
        f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=16",
        f"{ROLLOUT}.n={SAMPLES}",
        f"{ROLLOUT}.agent.num_workers=2",
        f"trainer.n_gpus_per_node={replicas}",
        f"ray_kwargs.ray_init.num_gpus={replicas}",
        "ray_kwargs.ray_init.num_cpus=32",
        *overrides,
    ]
    if not (out / "data").exists():
        problems.write_parquet(out / "data/train.parquet", "train", 0, 2 * BATCH_SIZE)
        problems.write_parquet(out / "data/test.parquet", "test", 0, BATCH_SIZE)
    environment = {
        "PYTHONPATH": str(policy.REPOSITORY),
        "RHYME_BENCH_TIMES": str(out / "times"),
        "VERL_FILE_LOGGER_PATH": str(out / "metrics.jsonl"),
    }
    with VerlJob(arguments, out / "verl.log", environment) as running:
        yield running


def samples(out):
    path = out / "times/samples.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def log(out):
    return (out / "verl.log").read_text(errors="replace")


def wait_for(condition, seconds, running):
    deadline = time.monotonic() + seconds
    while not condition():
        assert running.poll() is None, running.log_tail(60)
        assert time.monotonic() < deadline, running.log_tail(60)
        time.sleep(0.2)


def kill(title):
    """Kill one process of the job's tree."""
    for process in psutil.Process().children(recursive=True):
        try:
            if any(title in part for part in process.cmdline()):
                process.kill()
                return
        except psutil.NoSuchProcess:
            continue
    raise AssertionError(f"no process {title}")


def check_samples(found, steps):
    """Each step has a whole batch, no group is trained twice, and no answer is older than promised."""
    assert [line["step"] for line in found] == steps
    groups = [group for line in found for group in line["groups"]]
    assert len(set(groups)) == len(groups) == BATCH_SIZE * len(steps)
    for line in found:
        assert len(line["versions"]) >= BATCH_SIZE * SAMPLES
        assert max(line["step"] - 1 - first for first, _ in line["versions"]) <= MAX_AGE


def test_validation_filtered_groups_and_a_resume_within_a_unit(tmp_path):
    """Units begin in steps 1, 3, 5 ...; the checkpoint of step 4 and the validation after step 3 are within them."""
    overrides = (
        "trainer.save_freq=4",
        "trainer.test_freq=3",
        "algorithm.filter_groups.enable=true",
        "algorithm.filter_groups.metric=reward",
        "+trainer.v1.sampler.sampler_kwargs.filter_groups_metric=reward",
    )
    with job(tmp_path, *overrides) as running:
        wait_for(lambda: len(samples(tmp_path)) >= 6, 240, running)
        os.killpg(os.getpgid(running._process.pid), signal.SIGKILL)
    before = samples(tmp_path)
    assert "num_warmup_batches is set to 2" in log(tmp_path) and "units of 2 batches" in log(tmp_path)
    with job(tmp_path, *overrides) as running:
        assert running.wait() == 0, running.log_tail(60)
    resumed = samples(tmp_path)[len(before) :]
    check_samples([*before[:4], *resumed], list(range(1, STEPS + 1)))
    logged = [json.loads(line)["data"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert any("val-core" in name for metrics in logged for name in metrics)
    assert any(metrics.get("training/filter_groups/evicted_samples", 0) for metrics in logged)
    assert any("rhyme/pipe/bubble" in metrics for metrics in logged)


def test_a_tool_agents_turns_within_units(tmp_path):
    overrides = tool_agent(tmp_path / "trace")
    with job(tmp_path, *overrides, steps=5) as running:
        assert running.wait() == 0, running.log_tail(60)
    check_samples(samples(tmp_path), [1, 2, 3, 4, 5])


@pytest.mark.parametrize(
    ("title", "message", "replicas"),
    [
        ("ray::RhymeAgentLoopWorker", "agent-loop worker agent_loop_worker_", 1),
        ("ray::RhymeHttpServer", "is dead; its answers fail", 2),
    ],
)
def test_a_job_ends_when_a_worker_or_a_replica_dies(tmp_path, title, message, replicas):
    with job(tmp_path, replicas=replicas, steps=50) as running:
        wait_for(lambda: len(samples(tmp_path)) >= 2, 240, running)
        kill(title)
        killed = time.monotonic()
        while running.poll() is None and time.monotonic() < killed + END_SECONDS:
            time.sleep(0.2)
        assert running.poll() not in (None, 0), running.log_tail(60)
    assert message in log(tmp_path)
    assert "ActorDiedError" in log(tmp_path) or "RayActorError" in log(tmp_path)
    found = samples(tmp_path)
    check_samples(found, list(range(1, len(found) + 1)))


def test_a_job_goes_on_without_the_router(tmp_path):
    with job(tmp_path, steps=6) as running:
        wait_for(lambda: len(samples(tmp_path)) >= 2, 240, running)
        kill("ray::Router")
        assert running.wait() == 0, running.log_tail(60)
    assert "HistoPipe's router is dead" in log(tmp_path)
    assert len(samples(tmp_path)) == 6
