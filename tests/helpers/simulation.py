"""Small simulated clusters, made by hand and at random; shared by the simulator's tests and the contract of a rule."""

from dataclasses import replace

import numpy as np
from hypothesis import strategies as st

from rhyme_verl.histopipe.units import UnitShape
from rhyme_verl.sim.cluster import affine_step_seconds
from rhyme_verl.sim.experiment import CASES, Case
from rhyme_verl.sim.trainer import Scenario
from rhyme_verl.sim.workload import LogNormal, Workload, from_distribution

STEP_SECONDS = affine_step_seconds(0.015, 5e-5, 128)
STEP = [0.0, 1.0, 1.5, 2.0]  # seconds of a step by running sequences
SYNC = Case(mode="sync")


def workload_of(lengths):
    lengths = np.array(lengths)
    mean = lengths.mean(axis=2)
    return Workload(
        lengths=lengths, mean=mean, max_tokens=float(lengths.max()),
        rank_correlation=1.0, rank_churn=0.0,
    )  # fmt: skip


def scenario_of(workload, replicas=4, max_running=8, speeds=None, steps=None, **kwargs):
    speeds = np.ones(replicas) if speeds is None else speeds
    step_seconds, steps = STEP_SECONDS[: max_running + 1], steps or len(workload.lengths)
    return Scenario(workload=workload, speeds=speeds, step_seconds=step_seconds, steps=steps, **kwargs)


def units(max_age, *shape, **kwargs):
    return Case(
        mode="colocate_async", system="histopipe", max_age=max_age, shape=UnitShape(*shape) if shape else None, **kwargs
    )


sizes = st.tuples(st.integers(0, 2**31), st.integers(1, 5), st.integers(1, 10), st.integers(1, 4))


def random_scenario(size):
    seed, replicas, groups, samples = size
    rng = np.random.default_rng(seed)
    workload = from_distribution(
        LogNormal(median=60.0, p99_over_median=float(rng.uniform(1.5, 10)), cap=400, within_group=rng.uniform(0, 1)),
        steps=6,
        groups=groups,
        samples=samples,
        epochs_before=int(rng.integers(0, 3)),
        seed=seed,
    )
    speeds = rng.uniform(0.5, 2.0, replicas)
    train_seconds = float(rng.choice([0.0, 0.7, 5.0]))
    return scenario_of(workload, speeds=speeds, max_running=int(rng.integers(1, 9)), train_seconds=train_seconds)


def drawn_units(age, batches, carried):
    return units(age, min(age, batches), carried)


shapes = st.builds(drawn_units, st.integers(2, 4), st.integers(1, 4), st.integers(0, 10))
cases = st.one_of(st.sampled_from(CASES), shapes)


def fitting(case, scenario):
    """A unit carries no more than a batch."""
    groups = scenario.workload.lengths.shape[1]
    if case.shape is None:
        return case
    return replace(case, shape=UnitShape(case.shape.batches, min(case.shape.carried, groups)))
