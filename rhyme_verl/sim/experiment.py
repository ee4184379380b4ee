"""Simulates one workload under several trainer modes and systems, and measures the steady state."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rhyme_verl.histopipe.units import UnitShape, default_shape
from rhyme_verl.sim.systems import HistoPipe, TwoTier, VerlBalancer
from rhyme_verl.sim.trainer import Scenario, Simulation, TrainerMode

WARM_UP_SHARE = 1.0 / 3.0  # share of the steps that is excluded from all figures


@dataclass(frozen=True, kw_only=True)
class Case:
    """A trainer mode and the system that schedules its rollouts.

    Attributes:
        system: `verl`, `round-robin`, `histopipe`, `perfect` (HistoPipe with the true lengths), `two-tier`, or a
            subclass of `HistoPipe` with a rule of its own.
        max_age: HistoPipe's `pipe.max_age` in `colocate_async`.
        shape: shape of HistoPipe's units; None: the default.
        warmup_batches: verl's `num_warmup_batches`; None: 1, or `max_age` with HistoPipe.
        wait_threshold: threshold of verl's `max_off_policy_strategy=wait`; None: off.
    """

    mode: TrainerMode
    system: str | type[HistoPipe] = "verl"
    max_age: int = 0
    shape: UnitShape | None = None
    warmup_batches: int | None = None
    wait_threshold: int | None = None

    @property
    def name(self) -> str:
        parts = [self.mode.replace("_", " "), self.system if isinstance(self.system, str) else self.system.__name__]
        if self.wait_threshold is not None:
            parts.append(f"wait {self.wait_threshold}")
        if self.has_units:
            parts.append(f"max_age {self.max_age}")
        if self.shape is not None:
            parts.append(f"({self.shape.batches}, {self.shape.carried})")
        return ", ".join(parts)

    @property
    def is_histopipe(self) -> bool:
        return isinstance(self.system, type) or self.system in ("histopipe", "perfect")

    @property
    def has_units(self) -> bool:
        """Whether HistoPipe generates units, whose answers are at most `max_age` old."""
        return self.is_histopipe and self.mode == "colocate_async"


STOCK = Case(mode="colocate_async")
CASES = (
    Case(mode="sync"),
    Case(mode="sync", system="round-robin"),
    Case(mode="sync", system="histopipe"),
    Case(mode="sync", system="perfect"),
    Case(mode="one_step_off"),
    Case(mode="pipelined", system="two-tier"),
    STOCK,
    Case(mode="colocate_async", wait_threshold=2),
    Case(mode="colocate_async", wait_threshold=3),
    *(Case(mode="colocate_async", system="histopipe", max_age=age) for age in (1, 2, 3)),
    Case(mode="colocate_async", system="perfect", max_age=2),
    Case(mode="separate_async"),
    Case(mode="separate_async", system="histopipe"),
)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The figures of a case in the steady state.

    Attributes:
        case: name of the case.
        steps_per_hour: training steps per hour.
        of_bound: steps per hour relative to the upper bound for its age limit; NaN if no bound is known.
        bubble: share of lanes that were free, over all replicas and the whole run.
        age_mean, age_max: weight updates between an answer's first token and its training.
        mixed: share of trained answers that more than one policy version generated.
        recompute_seconds: seconds per step per replica that recompute prefixes.
        tokens_per_answer: mean length of trained answers.
    """

    case: str
    steps_per_hour: float
    of_bound: float
    bubble: float
    age_mean: float
    age_max: int
    mixed: float
    recompute_seconds: float
    tokens_per_answer: float


def play(scenario: Scenario, case: Case) -> tuple[Outcome, Simulation]:
    """Simulate the scenario in one case; the figures begin after its warm-up and end together with a unit.

    Raises:
        ValueError: the system is unknown, or there are fewer steps than a unit has.
    """
    shape = None
    if case.has_units:
        shape = case.shape or default_shape(case.max_age, scenario.workload.lengths.shape[1])
    period = 1 if shape is None else shape.batches
    last = scenario.steps // period * period
    if not last:
        raise ValueError(f"{scenario.steps} steps are fewer than the {period} of a unit")
    warmup = case.warmup_batches or (max(1, case.max_age) if case.has_units else 1)
    simulation = Simulation(scenario, case.mode, warmup_batches=warmup, wait_threshold=case.wait_threshold)
    if case.system in ("verl", "round-robin"):
        simulation.system = VerlBalancer(simulation, in_turn=case.system == "round-robin")
    elif case.system == "two-tier":
        simulation.system = TwoTier(simulation)
    elif case.is_histopipe:
        rule = case.system if isinstance(case.system, type) else HistoPipe
        simulation.system = rule(simulation, max_age=case.max_age, shape=shape, perfect=case.system == "perfect")
    else:
        raise ValueError(f"system {case.system!r} is not known")
    simulation.run()
    first = min(last - period, max(period, round(WARM_UP_SHARE * last) // period * period))
    seconds = (simulation.trained[last - 1] - (simulation.trained[first - 1] if first else 0.0)) / (last - first)
    counted = (simulation.trained_in >= first) & (simulation.trained_in < last)
    replicas = len(scenario.speeds)
    lanes = simulation.now * replicas * scenario.max_running
    bound = lower_bound(scenario, case)
    outcome = Outcome(
        case=case.name,
        steps_per_hour=3600.0 / seconds,
        of_bound=bound / seconds,
        bubble=1.0 - sum(replica.sequence_seconds for replica in simulation.replicas) / lanes,
        age_mean=float(simulation.age[counted].mean()),
        age_max=int(simulation.age[counted].max()),
        mixed=float(np.mean(simulation.versions_spanned[counted] > 1)),
        recompute_seconds=sum(replica.stalled_seconds for replica in simulation.replicas)
        / replicas
        / len(simulation.trained),
        tokens_per_answer=float(simulation.lengths[counted].mean()),
    )
    return outcome, simulation


def lower_bound(scenario: Scenario, case: Case) -> float:
    """Return a lower bound on the seconds per step for the case's age limit; NaN if its age is not limited.

    A step takes at least as long as its tokens on full replicas. An answer of age S spans at most 2 S steps (two units
    of S batches), so these also take at least as long as the longest answer alone on the fastest replica.
    """
    lengths, seconds = scenario.workload.lengths, scenario.seconds_per_token
    full = float(lengths.sum() / len(lengths) * seconds[-1] / scenario.max_running / scenario.speeds.sum())
    longest = float(lengths.max(axis=(1, 2)).mean() * seconds[1] / scenario.speeds.max())
    if case.mode == "one_step_off":
        return max(full, longest, scenario.train_seconds)
    if case.mode == "sync":
        max_age = 0
    elif case.wait_threshold is not None:
        max_age = case.wait_threshold - 1
    elif case.has_units:
        max_age = case.max_age
    else:
        return float("nan")
    return max(full, longest / max(1, 2 * max_age)) + scenario.train_seconds
