"""The shape of units is chosen by simulating candidates with a job's own lengths, in another process."""

import asyncio

import numpy as np
import pytest

from rhyme_verl.histopipe.choice import MIN_GROUPS, candidates, choose_shape
from rhyme_verl.histopipe.scheduler import Job, Scheduler
from rhyme_verl.histopipe.units import UnitShape, default_shape

BATCH_SIZE = 32
SAMPLES = 8


class Silent:
    def grant(self, answer, replica, predicted_tokens): ...

    def park(self, answer): ...

    def publish(self, uid): ...


def scheduler_of(num_groups):
    """A job on four replicas whose latest groups had long-tailed lengths, well predicted."""
    job = Job(batch_size=BATCH_SIZE, max_running=64, max_tokens=8192, max_age=2, shape=default_shape(2, BATCH_SIZE))
    scheduler, rng = Scheduler(job, Silent()), np.random.default_rng(0)
    scheduler.lanes.add_replicas(map(str, range(4)), 0.0)
    for mean in rng.lognormal(6.0, 1.0, num_groups):
        lengths = rng.normal(mean, 0.1 * mean, SAMPLES).clip(1, 8192).astype(int)
        scheduler.recent.append((float(mean), lengths.tolist()))
    for running in range(1, 65):
        scheduler.cost.observe(100, 100 * (0.015 + 5e-5 * running), float(running))
    return scheduler


def test_candidates_respect_the_age_and_what_verl_submits_ahead():
    found = candidates(2, BATCH_SIZE, 2)
    assert found[0] == default_shape(2, BATCH_SIZE)
    assert UnitShape(3, 0) in found and UnitShape(2, 16) in found and UnitShape(1, 24) in found
    assert all(one.batches <= 3 and (one.carried == 0 or one.batches <= 2) for one in found)
    assert UnitShape(3, 0) not in candidates(2, BATCH_SIZE, 1.5)


def test_the_best_shape_is_chosen_and_explained():
    choice = asyncio.run(choose_shape(scheduler_of(400), 2, SAMPLES))
    assert choice.shape in candidates(2, BATCH_SIZE, 2)
    assert choice.best.max_age <= 2 and choice.best.steps_per_hour >= 0.98 * choice.default.steps_per_hour
    assert choice.default.shape == default_shape(2, BATCH_SIZE)
    assert "rollouts per hour expected" in str(choice) and "\n" not in str(choice)


@pytest.mark.parametrize("num_groups", [0, MIN_GROUPS - 1])
def test_too_few_lengths_choose_nothing(num_groups):
    assert asyncio.run(choose_shape(scheduler_of(num_groups), 2, SAMPLES)) is None
