"""Plays one workload under many policies and trainer modes and says how well each did."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from rhyme_verl.histopipe.ranges import Fleet
from rhyme_verl.histopipe.step_cost import PREFILL_SECONDS_PER_TOKEN, StepCost
from rhyme_verl.sim.policies import EarlyBinding, HistoPipe, LongestFirst, Policy
from rhyme_verl.sim.trainer import Run, Simulation, Trainer, TrainerMode
from rhyme_verl.sim.workload import Workload

POLICIES = ("default", "round-robin", "longest-first", "histopipe", "histopipe-migrate", "two-tier", "perfect")
OURS = ("histopipe", "histopipe-migrate", "two-tier", "perfect")
COMBINATIONS: tuple[tuple[TrainerMode, str], ...] = (
    ("sync", "default"),
    ("sync", "round-robin"),
    ("sync", "longest-first"),
    ("sync", "histopipe"),
    ("sync", "perfect"),
    ("one_step_off", "default"),
    ("one_step_off", "histopipe"),
    ("colocate_async", "default"),
    ("colocate_async", "histopipe"),
    ("colocate_async", "perfect"),
    ("separate_async", "default"),
    ("separate_async", "histopipe"),
    ("pairs", "default"),
    ("pairs", "longest-first"),
    ("pairs", "histopipe"),
    ("pairs", "histopipe-migrate"),
    ("pairs", "perfect"),
    ("pipelined", "default"),
    ("pipelined", "two-tier"),
    ("pipelined", "histopipe"),
    ("pipelined", "perfect"),
)


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """What all policies have to cope with.

    Attributes:
        workload: the steps.
        fleet: the replicas.
        train_seconds: of one step, the transfer of weights included.
        steps_ahead: how far verl's asynchronous modes run ahead of training.
        tokens_per_step: mean tokens of a sequence in an engine step; more than 1 with HistoSpec.
        recompute_seconds_per_token: prefill of a sequence that is resumed.
    """

    workload: Workload
    fleet: Fleet
    train_seconds: float = 0.0
    steps_ahead: int = 1
    tokens_per_step: float = 1.0
    recompute_seconds_per_token: float = PREFILL_SECONDS_PER_TOKEN

    @property
    def drafting_fleet(self) -> Fleet:
        """The replicas, with the seconds of a step by the tokens that it yields each sequence."""
        return replace(self.fleet, cost=StepCost(self.fleet.cost.seconds / self.tokens_per_step))


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How one policy did under one trainer mode.

    Where answers outlive a change of weights, verl ends with `steps_ahead` steps' answers unfinished; here these are
    played to their end, but steps per hour and staleness are those of the steps before.

    Attributes:
        mode: of the trainer.
        policy: who ran what.
        rollout_seconds: from the start to the end of the last rollout.
        makespan: mean seconds from a step's opening to its last token.
        steps_per_hour: trained.
        of_bound: lower bound of all pairs of steps by rollout_seconds.
        of_step_bound: lower bound of all steps, one after the other, by rollout_seconds; above 1 where steps overlap.
        bubble: share of places for running sequences that were free, over all replicas and rollout_seconds.
        idle: share of replica-seconds without any running sequence.
        staleness_mean, staleness_max: policy versions between generation and training.
        spanning: share of answers that more than one policy version generated.
        moved: answers moved to another replica.
        recompute_seconds: spent on prefixes, all replicas together.
    """

    mode: TrainerMode
    policy: str
    rollout_seconds: float
    makespan: float
    steps_per_hour: float
    of_bound: float
    of_step_bound: float
    bubble: float
    idle: float
    staleness_mean: float
    staleness_max: int
    spanning: float
    moved: int
    recompute_seconds: float


def play(scenario: Scenario, mode: TrainerMode, policy: str) -> tuple[Outcome, Run]:
    """Play the scenario under one policy and trainer mode.

    Raises:
        ValueError: the policy is not one of `POLICIES`.
    """
    trainer = Trainer(
        mode=mode,
        train_seconds=scenario.train_seconds,
        steps_ahead=scenario.steps_ahead,
        whole_pairs=mode == "colocate_async" and policy in OURS,
    )
    run = Simulation(
        scenario.workload,
        scenario.drafting_fleet,
        make_policy(policy, mode, scenario.drafting_fleet),
        trainer,
        recompute_seconds_per_token=scenario.recompute_seconds_per_token,
    ).run()
    steps = max(1, len(run.trained) - (scenario.steps_ahead if trainer.resumes else 0))
    staleness = run.staleness[run.trained_in < steps]
    seconds = run.seconds * len(scenario.fleet.speeds)
    places = seconds * scenario.fleet.max_running
    outcome = Outcome(
        mode=mode,
        policy=policy,
        rollout_seconds=run.seconds,
        makespan=float(np.mean(np.array(run.rolled_out) - np.array(run.opened))),
        steps_per_hour=3600.0 * steps / run.trained[steps - 1],
        of_bound=lower_bound(scenario, 2) / run.seconds,
        of_step_bound=lower_bound(scenario, 1) / run.seconds,
        bubble=1.0 - sum(replica.sequence_seconds for replica in run.replicas) / places,
        idle=1.0 - sum(replica.busy_seconds for replica in run.replicas) / seconds,
        staleness_mean=float(staleness.mean()),
        staleness_max=int(staleness.max()),
        spanning=float(np.mean(run.versions_spanned > 1)),
        moved=run.moved,
        recompute_seconds=sum(replica.stalled_seconds for replica in run.replicas),
    )
    return outcome, run


def play_all(scenario: Scenario) -> Iterator[tuple[Outcome, Run]]:
    """Play all sensible combinations, one after the other."""
    for mode, policy in COMBINATIONS:
        yield play(scenario, mode, policy)


def make_policy(name: str, mode: TrainerMode, fleet: Fleet) -> Policy:
    """Make one of `POLICIES`, as it is used under a trainer mode.

    Raises:
        ValueError: there is no policy of this name.
    """
    if name in ("default", "round-robin"):
        return EarlyBinding(len(fleet.speeds), least_in_flight=name == "default")
    if name == "longest-first":
        return LongestFirst()
    if name == "two-tier":
        return HistoPipe(fleet, "mirrored", perfect=False)
    if name not in POLICIES:
        raise ValueError(f"policy {name!r} is not known: choose from {', '.join(POLICIES)}")
    if mode == "separate_async":
        return LongestFirst(oldest_first=True)  # nothing ends together here that ranges could be cut for
    halves = mode == "pipelined" and len(fleet.speeds) > 1
    return HistoPipe(
        fleet,
        "halves" if halves else "shared",
        perfect=name == "perfect",
        pairs=mode in ("pairs", "colocate_async"),
        migrate=name == "histopipe-migrate",
    )


def lower_bound(scenario: Scenario, steps_together: int) -> float:
    """Return the seconds that no schedule beats in which so many steps overlap, but not these with others.

    Together they take at least as long as all tokens do on replicas that are full throughout, and as the longest
    answer does alone on the fastest replica.
    """
    fleet = scenario.drafting_fleet
    cost, speeds = fleet.cost.seconds, fleet.speeds
    full = cost[fleet.max_running] / fleet.max_running
    lengths = scenario.workload.lengths
    total = 0.0
    for first in range(0, len(lengths), steps_together):
        part = lengths[first : first + steps_together]
        total += max(part.sum() * full / speeds.sum(), part.max() * cost[1] / speeds.max())
    return float(total)
