"""A whole verl job over two machines: a trainer rank and a replica on each; weights, history and router between."""

import shutil
import sys

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


@pytest.mark.parametrize(("mode", "max_age"), [("sync", 0), ("colocate_async", MAX_AGE)])
def test_a_job_trains_and_drafts_on_two_machines(tmp_path, mode, max_age):
    environment = {
        **CPU_ENVIRONMENT,  # of the nodes, because verl does not send it to them
        "OMP_NUM_THREADS": "1",
        "RHYME_BENCH_TIMES": str(SHARED / "times"),
        "VERL_FILE_LOGGER_PATH": str(SHARED / "metrics.jsonl"),
    }
    with machines(2, tmp_path, elsewhere=(1,)) as made:
        start(made, "--num-gpus=1", num_cpus=16, **environment)
        shutil.copytree(policy.SHIPPED_POLICY, made.shared / "policy")
        arguments = arguments_of(
            made.shared,
            f"actor_rollout_ref.model.path={SHARED / 'policy'}",
            "trainer.nnodes=2",
            "trainer.n_gpus_per_node=1",
            "ray_kwargs.ray_init.num_gpus=null",  # of a running cluster
            "ray_kwargs.ray_init.num_cpus=null",
            mode=mode,
            steps=STEPS,
        )
        arguments = [one.replace(str(made.shared), str(SHARED)) for one in arguments]
        driver = made[0].start(sys.executable, "-m", "verl.trainer.main_ppo", *arguments, log="verl.log", **environment)
        try:
            driver.wait(JOB_SECONDS)
        finally:
            driver.kill()
        log = made[0].log("verl.log")
        assert driver.returncode == 0, log[-6000:]
        logged = metrics(made.shared)
        assert sorted(logged) == list(range(1, STEPS + 1))
        check_samples(samples(made.shared), list(range(1, STEPS + 1)), max_age=max_age)
        current = [line[LARGEST_DIFFERENCE] for line in logged.values() if line[AGE] == 0]
        assert current and max(current) < SAME_PROBABILITY
        # The second epoch; a unit of two batches is generated for its first step.
        assert sum(logged[step].get("rhyme/spec/accepted_tokens", 0) for step in (3, 4)) > 0
        for index in range(2):
            assert f"{address(index)}:" in next(line for line in log.splitlines() if "LLMServerManager: " in line)
            assert (made.shared / f"stats/replica-{index}.jsonl").stat().st_size > 0
        assert "HistoPipe schedules 2 replicas" in log
