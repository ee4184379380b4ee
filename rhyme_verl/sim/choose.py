"""Simulates shapes of units for a running job.

Groups are drawn with replacement from the job's latest ones (predicted and true lengths). The cluster is scaled down to
at most eight replicas.
"""

from __future__ import annotations

import os
import time

import numpy as np

from rhyme_verl.histopipe.choice import Candidates, Expected
from rhyme_verl.histopipe.units import UnitShape
from rhyme_verl.sim.cluster import affine_step_seconds
from rhyme_verl.sim.experiment import Case, play
from rhyme_verl.sim.trainer import Scenario
from rhyme_verl.sim.workload import Workload

MAX_REPLICAS = 8
MIN_STEPS, MIN_UNITS = 18, 6  # minimum length of a simulation; its first third is excluded from the results
MAX_ANSWERS = 1500  # answers per step; larger steps are scaled down to keep the simulation fast


def simulate_at_low_priority(given: Candidates) -> list[Expected]:
    """Do the same as `simulate` in a process of its own, whose priority is lowered for good."""
    os.nice(10)
    return simulate(given)


def simulate(given: Candidates) -> list[Expected]:
    """Return the outcomes of as many shapes as time permits, at least that of the first."""
    began = time.monotonic()
    job, (base, slope) = given.job, given.step_seconds
    scale = max(given.replicas / MAX_REPLICAS, job.batch_size * given.job.samples / MAX_ANSWERS, 1.0)
    batch_size = max(4, round(job.batch_size / scale))
    scale = job.batch_size / batch_size
    replicas = max(1, round(given.replicas / scale))
    lanes = max(1, round(given.max_running * given.replicas / scale / replicas))
    steps = max(MIN_STEPS, MIN_UNITS * max(shape.batches for shape in given.shapes))
    scenario = Scenario(
        workload=_workload(given, steps, batch_size),
        speeds=np.ones(replicas),
        step_seconds=affine_step_seconds(base, slope * given.max_running / lanes, lanes),
        steps=steps,
    )
    warmup = max(1, int(job.warmup_batches))
    outcomes = []
    for wanted in given.shapes:
        shape = UnitShape(wanted.batches, round(wanted.carried / scale))
        case = Case(mode="colocate_async", system="histopipe", max_age=job.max_age, shape=shape, warmup_batches=warmup)
        found, _ = play(scenario, case)
        outcomes.append(
            Expected(
                shape=wanted, steps_per_hour=found.steps_per_hour, mean_age=found.age_mean, max_age=found.age_max,
                mixed=found.mixed,
            )
        )  # fmt: skip
        if time.monotonic() - began > given.max_seconds * len(outcomes) / (len(outcomes) + 1):
            break
    return outcomes


def _workload(given: Candidates, steps: int, batch_size: int) -> Workload:
    rng = np.random.default_rng(0)
    groups = [given.groups[index] for index in rng.integers(0, len(given.groups), steps * batch_size)]
    lengths = np.array([rng.choice(answers, given.job.samples) for _, answers in groups], dtype=np.int64)
    return Workload(
        lengths=lengths.reshape(steps, batch_size, given.job.samples),
        mean=np.array([mean for mean, _ in groups]).reshape(steps, batch_size),
        max_tokens=float(lengths.max()),
    )
