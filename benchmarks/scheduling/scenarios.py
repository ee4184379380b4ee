"""The simulated clusters and workloads of HistoPipe's bars, and helpers for their results."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import numpy as np

from rhyme_verl.sim.cluster import affine_step_seconds, interpolate_step_seconds
from rhyme_verl.sim.experiment import Case, lower_bound, play
from rhyme_verl.sim.trainer import Scenario
from rhyme_verl.sim.workload import LogNormal, Workload, from_distribution

MEDIAN_TOKENS = 2000.0
CAP = 16384
REPLICAS = 64
GROUPS_PER_REPLICA = 8
SAMPLES = 16
MAX_RUNNING = 128
BASE_SECONDS, SEQUENCE_SECONDS = 15e-3, 5e-5  # per engine step and per running sequence in it
TAIL = 8.0  # 99th percentile of lengths relative to their median
STEPS = 24
# Spread within a group and from epoch to epoch, relative to the spread over all answers.
AS_RECORDED = (0.257, 0.0244)  # the quickstart trace: rank correlation .96
NOISY = (0.6, 0.2)  # rank correlation .75

Row = dict[str, Any]


def workload(
    *, tail: float = TAIL, spread: tuple[float, float] = AS_RECORDED, seed: int = 0, replicas: int = REPLICAS
) -> Workload:
    """Return steps with `GROUPS_PER_REPLICA` groups per replica."""
    within, noise = spread
    lengths = LogNormal(median=MEDIAN_TOKENS, p99_over_median=tail, cap=CAP, within_group=within, epoch_noise=noise)
    return from_distribution(lengths, steps=STEPS, groups=GROUPS_PER_REPLICA * replicas, samples=SAMPLES, seed=seed)


def stated_step_seconds(speedups: dict[float, float] | None = None) -> np.ndarray:
    """Return the seconds of an engine step by running sequences.

    Args:
        speedups: tokens/s with drafts relative to none, by running sequences; linear in the logarithm between these
            numbers and constant beyond them.
    """
    seconds = affine_step_seconds(BASE_SECONDS, SEQUENCE_SECONDS, MAX_RUNNING)
    if speedups is not None:
        running = np.arange(1, MAX_RUNNING + 1)
        factor = np.interp(np.log2(running), np.log2(list(speedups)), list(speedups.values()))
        seconds = interpolate_step_seconds(running, seconds[1:] / factor, MAX_RUNNING)
    return seconds


def play_case(one: Scenario, case: Case, **facts: Any) -> Row:
    """Simulate a case and return its row."""
    outcome, _ = play(one, case)
    figures = {name: _rounded(value) for name, value in asdict(outcome).items()}
    return {**facts, **figures, "bound_seconds": lower_bound(one, case)}


def _rounded(value: Any) -> Any:
    return float(f"{value:.6g}") if isinstance(value, float) else value


def pick(rows: Iterable[Row], **facts: Any) -> list[Row]:
    """Return the rows with these values."""
    return [row for row in rows if all(row.get(name) == value for name, value in facts.items())]


def worst_ratio(rows: list[Row], one: Row, other: Row, name: str = "steps_per_hour") -> float:
    """Return the smallest ratio over the seeds of `name` in the rows of `one` to that in the rows of `other`."""
    by_seed = {row["seed"]: row[name] for row in pick(rows, **other)}
    return min(row[name] / by_seed[row["seed"]] for row in pick(rows, **one))
