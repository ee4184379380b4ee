"""The clusters and workloads that HistoPipe's bars are about, and what was played on them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.length_errors import Spread
from rhyme_verl.histopipe.ranges import Fleet
from rhyme_verl.histopipe.step_cost import StepCost
from rhyme_verl.sim.experiment import Scenario, play
from rhyme_verl.sim.step_times import PublishedStepTime
from rhyme_verl.sim.trainer import TrainerMode
from rhyme_verl.sim.workload import LogNormal, from_distribution

MEDIAN_TOKENS = 2000.0
CAP = 16384
REPLICAS = 64
GROUPS_PER_REPLICA = 8
SAMPLES = 16
MAX_RUNNING = 128
STEP_TIME_MODEL = "qwen2.5-7b"  # whose published step times the replicas have
MEAN_CONTEXT = 2800  # answer tokens of a running sequence, mean over steps, where p99 is eight times the median
REPORTED = (
    "rollout_seconds",
    "of_bound",
    "of_step_bound",
    "steps_per_hour",
    "bubble",
    "idle",
    "staleness_mean",
    "staleness_max",
    "spanning",
    "recompute_seconds",
)

Row = dict[str, Any]


def scenario(
    spread: Spread,
    *,
    tail: float,
    cap: int = CAP,
    steps: int,
    seed: int,
    replicas: int = REPLICAS,
    train_seconds: float = 0.0,
) -> Scenario:
    """Return the stated cluster with `GROUPS_PER_REPLICA` prompts a replica in each step."""
    lengths = LogNormal(
        median=MEDIAN_TOKENS,
        p99_over_median=tail,
        cap=cap,
        within_group=spread.within_group,
        epoch_noise=spread.epoch_noise,
    )
    return Scenario(
        workload=from_distribution(
            lengths, steps=steps, groups=GROUPS_PER_REPLICA * replicas, samples=SAMPLES, seed=seed
        ),
        fleet=stated_fleet(replicas),
        train_seconds=train_seconds,
    )


def stated_fleet(replicas: int) -> Fleet:
    """Return so many replicas, all of the same speed, that take the published step times."""
    cost = PublishedStepTime(STEP_TIME_MODEL).step_cost(MAX_RUNNING, MEAN_CONTEXT)
    return Fleet(speeds=np.ones(replicas), max_running=MAX_RUNNING, cost=cost)


def drafting(one: Scenario, speedups: dict[int, float]) -> Scenario:
    """Return the scenario with HistoSpec: a token costs its seconds by the speed-up at that many running sequences.

    Args:
        one: the scenario.
        speedups: by running sequences; between them by the logarithm of the number, beyond as at the last.
    """
    running = np.arange(1, MAX_RUNNING + 1)
    factor = np.interp(np.log2(running), np.log2(list(speedups)), list(speedups.values()))
    seconds = one.fleet.cost.seconds[1:] / factor
    return replace(one, fleet=replace(one.fleet, cost=StepCost.from_table(running.tolist(), seconds, MAX_RUNNING)))


def play_rows(one: Scenario, combinations: Iterable[tuple[TrainerMode, str]], **facts: Any) -> list[Row]:
    """Play the scenario under each trainer mode and policy; return what came of it, one row each."""
    rows = []
    for mode, policy in combinations:
        outcome, _ = play(one, mode, policy)
        measured = {name: float(f"{getattr(outcome, name):.6g}") for name in REPORTED}
        rows.append({**facts, "mode": mode, "policy": policy, **measured})
    return rows


def pick(rows: Iterable[Row], **facts: Any) -> list[Row]:
    """Return the rows of these facts."""
    return [row for row in rows if all(row.get(name) == value for name, value in facts.items())]


def ratios(rows: list[Row], name: str, one: Row, other: Row) -> list[float]:
    """Return `name` of the rows picked by `one` by that of the rows picked by `other`, seed by seed."""
    by_seed = {row["seed"]: row[name] for row in pick(rows, **other)}
    return [row[name] / by_seed[row["seed"]] for row in pick(rows, **one)]
