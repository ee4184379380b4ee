"""Whole verl jobs over two machines; weights, history and router between."""

import shutil
import statistics
import subprocess
import sys
import time

import pytest

from examples.quickstart import policy
from examples.quickstart.job import CPU_ENVIRONMENT
from examples.quickstart.progress import LARGEST_DIFFERENCE, SAME_PROBABILITY
from examples.quickstart.progress import MAX_AGE as AGE
from tests.cluster.test_machines import OBSTACLE, start
from tests.helpers.jobs import MAX_AGE, ROLLOUT, arguments_of, check_samples, metrics, samples
from tests.helpers.machines import SHARED, address, machines

pytestmark = [
    pytest.mark.engine,
    pytest.mark.machines,
    pytest.mark.skipif(OBSTACLE is not None, reason=f"no machines: {OBSTACLE}"),
]

STEPS = 10  # five epochs
LATER = range(3, STEPS + 1)  # steps of prompts that have a history
JOB_SECONDS = 1200.0
# Ray takes 10 s to 25 s to notice that a machine has died (tests/helpers/machines.py).
SECONDS_TO_END = 180.0


def begin(made, mode, *overrides, steps=STEPS, ranks=1):
    """Start a job on the first machine: `ranks` trainer ranks on each, with as many engines as fit.

    In `separate_async`, a trainer rank is on one machine and a replica on the other.
    """
    environment = {
        **CPU_ENVIRONMENT,  # of the nodes, because verl does not send it to them
        "OMP_NUM_THREADS": "1",
        "RHYME_BENCH_TIMES": str(SHARED / "times"),
        "VERL_FILE_LOGGER_PATH": str(SHARED / "metrics.jsonl"),
        "VERL_LOGGING_LEVEL": "WARNING",  # at INFO, verl 0.9.1 fails with hybrid_engine=false
    }
    num = len(list(made))
    start(made, f"--num-gpus={ranks}", num_cpus=16, **environment)
    shutil.copytree(policy.SHIPPED_POLICY, made.shared / "policy")
    arguments = arguments_of(
        made.shared,
        f"actor_rollout_ref.model.path={SHARED / 'policy'}",
        "ray_kwargs.ray_init.num_gpus=null",  # of a running cluster
        "ray_kwargs.ray_init.num_cpus=null",
        f"+{ROLLOUT}.custom.rhyme.history.shards={num}",
        *overrides,
        mode=mode,
        replicas=ranks,
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
    """The median over the steps from the third epoch on, of the rollout before each (verl's own `gen` is polled).

    A unit of two batches is one rollout.
    """
    key, logged = "rhyme/pipe/makespan_s", metrics(made.shared)
    return statistics.median(logged[step][key] for step in LATER[2:] if key in logged[step])


@pytest.mark.parametrize(("mode", "max_age"), [("sync", 0), ("colocate_async", MAX_AGE), ("separate_async", MAX_AGE)])
def test_a_job_trains_and_drafts_on_two_machines(tmp_path, record_property, mode, max_age):
    with machines(2, tmp_path, elsewhere=(1,)) as made:
        driver = begin(made, mode)
        fetches = made[0].begin("time_fetches", 1)
        log = finish(made, driver)
        record_property("fetches from the other machine", made[0].result(fetches, "time_fetches"))
        check_samples(samples(made.shared), list(range(1, STEPS + 1)), max_age=max_age)
        logged = metrics(made.shared)
        current = [line[LARGEST_DIFFERENCE] for line in logged.values() if line[AGE] == 0]
        assert current and max(current) < SAME_PROBABILITY
        # A unit of two batches is generated for its first step.
        assert sum(logged[step].get("rhyme/spec/accepted_tokens", 0) for step in LATER) > 0
        replicas = (0, 1) if mode != "separate_async" else (0,)
        shown = next(line for line in log.splitlines() if "LLMServerManager: " in line)
        if mode != "separate_async":  # there, the trainer is on one machine and the replica on the other
            assert all(f"{address(index)}:" in shown for index in replicas)
        for index in replicas:
            assert (made.shared / f"stats/replica-{index}.jsonl").stat().st_size > 0
        assert f"HistoPipe schedules {len(replicas)} replica" in log
        record_property("rollout seconds of a step", rollout_seconds(made))


def test_each_of_two_machines_has_a_replica_of_two_ranks(tmp_path):
    settings = (
        f"{ROLLOUT}.tensor_model_parallel_size=2",
        f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=8",  # of the answers of each of four ranks
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8",
    )
    with machines(2, tmp_path) as made:
        log = finish(made, begin(made, "sync", *settings, ranks=2))
        # Every replica has drafted, rollout and trainer agree on each token, and HistoPipe has scheduled.
        logged = metrics(made.shared)
        assert max(line[LARGEST_DIFFERENCE] for line in logged.values()) < SAME_PROBABILITY
        assert sum(logged[step].get("rhyme/spec/accepted_tokens", 0) for step in LATER) > 0
        assert "HistoPipe schedules 2 replicas" in log
        check_samples(samples(made.shared), list(range(1, STEPS + 1)), max_age=0)


def test_the_same_job_on_one_machine(tmp_path, record_property):
    with machines(1, tmp_path) as made:
        finish(made, begin(made, "sync", ranks=2))
        record_property("rollout seconds of a step", rollout_seconds(made))


def begin_and_train(made):
    """Start a job that would go on for long, and wait for its first step."""
    driver = begin(made, "sync", steps=100)
    deadline = time.monotonic() + JOB_SECONDS
    path = made.shared / "metrics.jsonl"
    while not path.exists() or not path.read_text():  # until the first step
        assert driver.poll() is None and time.monotonic() < deadline, made[0].log("verl.log")[-6000:]
        time.sleep(0.5)
    return driver


def check_groups(made):
    groups = [group for line in samples(made.shared) for group in line["groups"]]
    assert len(set(groups)) == len(groups), "a group was trained on twice"


def test_when_a_machine_dies_the_job_ends_or_the_router_names_it(tmp_path, record_property):
    with machines(2, tmp_path) as made:
        driver = begin_and_train(made)
        began = time.monotonic()
        made[1].close()
        try:
            driver.wait(SECONDS_TO_END)
        except subprocess.TimeoutExpired:  # verl's queue of answers keeps some of them on each node
            record_property("exit status", f"none after {SECONDS_TO_END:.0f} s")
        else:  # verl was calling the machine, and failed
            record_property("exit status", driver.returncode)
            record_property("seconds until the job has ended", round(time.monotonic() - began, 1))
            assert driver.returncode != 0
        finally:
            driver.kill()
        log = made[0].log("verl.log")
        dead = [line for line in log.splitlines() if " is dead" in line and address(1) in line]  # the router's
        assert len(dead) <= 1, dead
        assert dead or "ray.exceptions." in log, log[-6000:]
        check_groups(made)


def test_nothing_of_a_job_remains_when_the_machine_of_its_trainer_and_router_dies(tmp_path, record_property):
    with machines(2, tmp_path) as made:
        begin_and_train(made)
        assert made[1].processes("EngineCore") and made[1].processes("ray::")
        began = time.monotonic()
        made[0].close()
        while found := made[1].processes("EngineCore") + made[1].processes("ray::"):
            assert time.monotonic() < began + SECONDS_TO_END, found
            time.sleep(1.0)
        record_property("seconds until the job has ended", round(time.monotonic() - began, 1))
        check_groups(made)
