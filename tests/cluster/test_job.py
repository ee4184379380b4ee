"""Whole verl jobs over two machines; weights, history and router between."""

import shutil
import statistics
import sys
import time

import pytest

from examples.quickstart import policy
from examples.quickstart.job import CPU_ENVIRONMENT
from examples.quickstart.progress import LARGEST_DIFFERENCE, SAME_PROBABILITY
from examples.quickstart.progress import MAX_AGE as AGE
from tests.cluster.test_machines import OBSTACLE, start
from tests.helpers.jobs import MAX_AGE, arguments_of, check_samples, metrics, samples
from tests.helpers.machines import SHARED, address, machines

pytestmark = [
    pytest.mark.engine,
    pytest.mark.machines,
    pytest.mark.skipif(OBSTACLE is not None, reason=f"no machines: {OBSTACLE}"),
]

STEPS = 4  # two epochs
JOB_SECONDS = 1200.0
# Ray takes 10 s to 25 s to notice that a machine has died (tests/helpers/machines.py).
SECONDS_TO_END = 180.0


def begin(made, mode, *overrides, steps=STEPS):
    """Start a job on the first machine: a trainer rank and a replica on each, or, in `separate_async`, on one each."""
    environment = {
        **CPU_ENVIRONMENT,  # of the nodes, because verl does not send it to them
        "OMP_NUM_THREADS": "1",
        "RHYME_BENCH_TIMES": str(SHARED / "times"),
        "VERL_FILE_LOGGER_PATH": str(SHARED / "metrics.jsonl"),
        "VERL_LOGGING_LEVEL": "WARNING",  # at INFO, verl 0.9.1 fails with hybrid_engine=false
    }
    num = len(list(made))
    start(made, f"--num-gpus={2 // num}", num_cpus=16, **environment)
    shutil.copytree(policy.SHIPPED_POLICY, made.shared / "policy")
    arguments = arguments_of(
        made.shared,
        f"actor_rollout_ref.model.path={SHARED / 'policy'}",
        "ray_kwargs.ray_init.num_gpus=null",  # of a running cluster
        "ray_kwargs.ray_init.num_cpus=null",
        *overrides,
        mode=mode,
        replicas=1 if mode == "separate_async" else 2 // num,
        steps=steps,
    )
    if mode != "separate_async":
        arguments.append(f"trainer.nnodes={num}")
    arguments = [one.replace(str(made.shared), str(SHARED)) for one in arguments]
    return made[0].start(sys.executable, "-m", "verl.trainer.main_ppo", *arguments, log="verl.log", **environment)


def finish(made, driver):
    """Wait for the job's end and return its log."""
    try:
        driver.wait(JOB_SECONDS)
    finally:
        driver.kill()
    log = made[0].log("verl.log")
    assert driver.returncode == 0, log[-6000:]
    assert sorted(metrics(made.shared)) == list(range(1, STEPS + 1))
    return log


def rollout_seconds(made):
    """The median over the steps of the second epoch."""
    return statistics.median(metrics(made.shared)[step]["timing_s/gen"] for step in (3, 4))


@pytest.mark.parametrize(("mode", "max_age"), [("sync", 0), ("colocate_async", MAX_AGE), ("separate_async", MAX_AGE)])
def test_a_job_trains_and_drafts_on_two_machines(tmp_path, record_property, mode, max_age):
    with machines(2, tmp_path, elsewhere=(1,)) as made:
        log = finish(made, begin(made, mode))
        check_samples(samples(made.shared), list(range(1, STEPS + 1)), max_age=max_age)
        logged = metrics(made.shared)
        current = [line[LARGEST_DIFFERENCE] for line in logged.values() if line[AGE] == 0]
        assert current and max(current) < SAME_PROBABILITY
        # The second epoch; a unit of two batches is generated for its first step.
        assert sum(logged[step].get("rhyme/spec/accepted_tokens", 0) for step in (3, 4)) > 0
        replicas = (0, 1) if mode != "separate_async" else (0,)
        shown = next(line for line in log.splitlines() if "LLMServerManager: " in line)
        if mode != "separate_async":  # there, the trainer is on one machine and the replica on the other
            assert all(f"{address(index)}:" in shown for index in replicas)
        for index in replicas:
            assert (made.shared / f"stats/replica-{index}.jsonl").stat().st_size > 0
        assert f"HistoPipe schedules {len(replicas)} replica" in log
        record_property("rollout seconds of a step", rollout_seconds(made))


def test_the_same_job_on_one_machine(tmp_path, record_property):
    with machines(1, tmp_path) as made:
        finish(made, begin(made, "sync"))
        record_property("rollout seconds of a step", rollout_seconds(made))


def test_a_job_ends_when_one_of_its_machines_dies(tmp_path, record_property):
    with machines(2, tmp_path) as made:
        driver = begin(made, "sync", steps=100)
        deadline = time.monotonic() + JOB_SECONDS
        while not (made.shared / "metrics.jsonl").exists():
            assert driver.poll() is None and time.monotonic() < deadline, made[0].log("verl.log")[-6000:]
            time.sleep(0.5)
        began = time.monotonic()
        made[1].close()
        try:
            assert driver.wait(SECONDS_TO_END) != 0
        finally:
            driver.kill()
        record_property("seconds until the job has ended", round(time.monotonic() - began, 1))
        groups = [group for line in samples(made.shared) for group in line["groups"]]
        assert len(set(groups)) == len(groups), "a group was trained on twice"
