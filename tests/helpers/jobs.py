"""Whole verl jobs on a few problems of the quickstart: what they run, what they leave, and what has to hold."""

import json
import time
from contextlib import contextmanager

from examples.quickstart import policy, problems, quickstart
from examples.quickstart.job import VerlJob
from rhyme_verl.history import snapshot
from tests.helpers import processes

BATCH_SIZE = 8
PROBLEMS = 2 * BATCH_SIZE
SAMPLES = 4
MAX_AGE = 2
ROLLOUT = "actor_rollout_ref.rollout"
SAMPLERS = {"sync": "RecordedReplayBuffer"}  # by mode; of the others "RecordedReplayBufferAsync"


def arguments_of(out, *overrides, mode="colocate_async", replicas=1, steps=9):
    """What `verl.trainer.main_ppo` gets for a job with an epoch of two steps; makes the problems.

    `replicas`: each with a trainer rank; in `separate_async`, where these have GPUs of their own, one rank trains.
    """
    if not (out / "data").exists():
        problems.write_parquet(out / "data/train.parquet", "train", 0, PROBLEMS)
        problems.write_parquet(out / "data/test.parquet", "test", 0, BATCH_SIZE)
    return [
        *quickstart.job_arguments(out, epochs=100, rollout="rhyme"),
        f"trainer.total_training_steps={steps}",
        f"trainer.v1.trainer_mode={mode}",
        f"+{ROLLOUT}.custom.rhyme.pipe.max_age={MAX_AGE}",
        "trainer.v1.sampler.custom_sampler.path=pkg://benchmarks.jobs.recorded_sampler",
        f"trainer.v1.sampler.custom_sampler.name={SAMPLERS.get(mode, 'RecordedReplayBufferAsync')}",
        f"data.train_batch_size={BATCH_SIZE}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={BATCH_SIZE}",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16",
        f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=16",
        f"{ROLLOUT}.n={SAMPLES}",
        f"{ROLLOUT}.agent.num_workers=2",
        *(separate_arguments(replicas) if mode == "separate_async" else colocated_arguments(replicas)),
        "ray_kwargs.ray_init.num_cpus=32",
        quickstart.FP32_TRAINER,
        *overrides,
    ]


def colocated_arguments(replicas):
    return [f"trainer.n_gpus_per_node={replicas}", f"ray_kwargs.ray_init.num_gpus={replicas}"]


def separate_arguments(replicas):
    return [
        "trainer.n_gpus_per_node=1",
        f"ray_kwargs.ray_init.num_gpus={1 + replicas}",
        "trainer.v1.separate_async.parameter_sync_step=1",
        f"trainer.v1.sampler.max_off_policy_threshold={MAX_AGE + 1}",
        "trainer.v1.sampler.max_off_policy_strategy=wait",
        "actor_rollout_ref.hybrid_engine=false",  # the trainer's slot holds no replica
        f"{ROLLOUT}.nnodes=1",
        f"{ROLLOUT}.n_gpus_per_node={replicas}",
        f"{ROLLOUT}.checkpoint_engine.backend=cpu",
        f"{ROLLOUT}.checkpoint_engine.custom_backend_module=benchmarks.jobs.cpu_checkpoint_engine",
    ]


@contextmanager
def job(out, *overrides, environment=None, **settings):
    """A job with an epoch of two steps; in `colocate_async`, with units of two batches and 2 groups carried over."""
    arguments = arguments_of(out, *overrides, **settings)
    variables = {
        "PYTHONPATH": str(policy.REPOSITORY),
        "RHYME_BENCH_TIMES": str(out / "times"),
        "VERL_FILE_LOGGER_PATH": str(out / "metrics.jsonl"),
    }
    with VerlJob(arguments, out / "verl.log", variables | (environment or {})) as running:
        yield running


def samples(out):
    """The batches that the trainer has taken, as `benchmarks.jobs.recorded_sampler` records them."""
    path = out / "times/samples.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def log(out):
    return (out / "verl.log").read_text(errors="replace")


def metrics(out):
    """verl's metrics of the latest run, by step; what is not finite is None."""
    lines = (json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["data"] for line in lines}


def snapshot_file(out, step):
    return snapshot.shard_file(out / f"checkpoints/global_step_{step}" / snapshot.FOLDER, 0, 1)


def wait_for(condition, running, seconds=1200.0):
    """Wait until `condition` holds while the job runs."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert running.poll() is None, running.log_tail(60)
        assert time.monotonic() < deadline, running.log_tail(60)
        time.sleep(0.2)


def end_of(running, seconds=3600.0):
    """Wait until the job ends and return its exit status."""
    deadline = time.monotonic() + seconds
    while running.poll() is None:
        assert time.monotonic() < deadline, running.log_tail(60)
        time.sleep(0.2)
    return running.poll()


def process(running, title):
    """Return a process of the job by its title."""
    found = processes.find(running._process.pid, title)
    assert found, f"no process {title}"
    return found[0]


def check_samples(found, steps, max_age=MAX_AGE):
    """Each step has a whole batch, no group is trained twice, and no answer is older than promised."""
    assert [line["step"] for line in found] == steps
    groups = [group for line in found for group in line["groups"]]
    assert len(set(groups)) == len(groups) == BATCH_SIZE * len(steps)
    for line in found:
        assert len(line["versions"]) >= BATCH_SIZE * SAMPLES
        assert max(line["step"] - 1 - first for first, _ in line["versions"]) <= max_age
