"""Shares a step's prompt groups out over the replicas by predicted length: HistoPipe's two tiers, as pure functions.

Tier 1 sorts the work from long to short and cuts the order into one contiguous range a replica, each as large as the
replica can finish within its budget of seconds by the step-cost table: long sequences run few together, short ones
many. Budgets fall linearly along the ranks. Tier 2 gives the ranks out in opposite orders in odd and even steps, so
that the budgets of a pair add up to the same on every replica. Where each step ends in a barrier all budgets are
equal, which makes the step's makespan as short as it can be. Source: RhymeRL, arXiv 2508.18588, section on HistoPipe.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from rhyme_verl.histopipe.step_cost import StepCost

Mode = Literal["pipelined", "barrier"]

LAST_TO_FIRST = (0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 1.0)  # tried ratios of a pair's smallest budget to its largest
SEARCH_REPLICAS = 64  # budgets are searched with at most this many stand-ins for all replicas
TOLERANCE = 1e-3  # of the budget search
GROWTH = 1.002  # of budgets that were too small for whole sequences
SLACK = 0.02  # of the makespan that a barrier's plan gives up for safety
FILLING = 0.9  # share of idle lanes' time that fillers can be counted on to use


@dataclass(frozen=True, kw_only=True)
class Work:
    """What is to be generated, one entry a prompt group (or a sequence, with `samples` 1).

    Attributes:
        tokens: float64 [groups], expected length of one answer.
        span_tokens: float64 [groups], what the longest of the answers is planned with; never below `tokens`.
        samples: int64 [groups], answers to generate.
    """

    tokens: np.ndarray
    span_tokens: np.ndarray
    samples: np.ndarray


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """The replicas.

    Attributes:
        speeds: float64 [replicas], 1 where `cost` holds, 2 where steps take half of it.
        max_running: sequences that run at once on each.
        cost: seconds of a step.
    """

    speeds: np.ndarray
    max_running: int
    cost: StepCost


@dataclass(frozen=True)
class Budgets:
    """Seconds that the replica of each rank has for its range: from `first` (the longest work) linearly to `last`."""

    first: float
    last: float

    def of_rank(self, rank: np.ndarray | int, ranks: int) -> np.ndarray:
        """Return the budgets of ranks 0 to ranks - 1."""
        return self.first + (self.last - self.first) * np.minimum(np.asarray(rank) / max(1, ranks - 1), 1.0)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Who should run what.

    Attributes:
        replica: int64 [sequences], group by group in the order of `Work`; the planned replica of each sequence.
        order: int64 [sequences], all sequences in the order in which they should be started, longest first.
        seconds: float64 [replicas], predicted seconds of each replica's range.
        budgets: what the ranges were cut by.
    """

    replica: np.ndarray
    order: np.ndarray
    seconds: np.ndarray
    budgets: Budgets


class Ranges:
    """Work in the order of its span, longest first, and how it is cut into ranges.

    A range is at most one wave: as many sequences as run at once. What a replica could do in its budget beyond its
    range, it does with fillers, the shortest sequences, which start late as lanes get free.
    """

    def __init__(self, work: Work, fleet: Fleet) -> None:
        self.order = np.lexsort((-work.tokens, -work.span_tokens))
        samples = work.samples[self.order]
        tokens = work.tokens[self.order]
        self._span: list[float] = work.span_tokens[self.order].tolist()
        self._tokens: list[float] = tokens.tolist()
        self._counts: list[int] = np.cumsum(samples).tolist()
        self._sums: list[float] = np.cumsum(tokens * samples).tolist()
        self._cost: list[float] = fleet.cost.seconds[: fleet.max_running + 1].tolist()
        self._max_running = fleet.max_running
        self.num_sequences = self._counts[-1] if self._counts else 0

    def span_at(self, position: float) -> float:
        """Return the span of the sequence at a position, counted in sequences from the long end."""
        return self._span[bisect_right(self._counts, position)]

    def tokens_before(self, position: float) -> float:
        """Return the tokens of all sequences before a position."""
        group = min(bisect_left(self._counts, position), len(self._counts) - 1)
        return self._sums[group] - (self._counts[group] - position) * self._tokens[group]

    def capacity(self, seconds: float, span: float) -> float:
        """Return the tokens that a replica of speed 1 finishes in `seconds` if the longest sequence has `span`.

        Its steps may then take seconds / span on average, and the table says how many sequences run at that; none if
        even a sequence alone does not end in time.
        """
        per_step = seconds / span
        most = self._max_running
        if per_step >= self._cost[most]:
            return most * seconds / self._cost[most]
        running = bisect_right(self._cost, per_step, lo=1) - 1
        if running == 0:
            return 0.0
        low, high = self._cost[running], self._cost[running + 1]
        return span * (running + (per_step - low) / (high - low))

    def range_end(self, start: float, capacity: float, copies: float = 1.0) -> float:
        """Return the end of a range of at most `capacity` tokens and one wave, of `copies` replicas together."""
        wave = min(start + copies * self._max_running, self.num_sequences)
        limit = self.tokens_before(start) + copies * capacity
        if self.tokens_before(wave) <= limit:
            return wave
        group = bisect_left(self._sums, limit)
        return self._counts[group] - (self._sums[group] - limit) / self._tokens[group]

    def cut(self, budgets: list[float], copies: float = 1.0) -> Cut:
        """Cut the work into ranges for budgets of replicas of speed 1, each of which stands for `copies` of them."""
        position = 0.0
        ends, spare = [], []
        for seconds in budgets:
            left = 0.0
            if position < self.num_sequences:
                capacity = self.capacity(seconds, self.span_at(position))
                if capacity == 0.0:
                    return Cut([], [], False)
                end = self.range_end(position, capacity, copies)
                if copies == 1.0:
                    end = min(max(round(end), round(position) + 1), self.num_sequences)
                left = copies * capacity - (self.tokens_before(end) - self.tokens_before(position))
                position = end
            ends.append(position)
            spare.append(max(0.0, left))
        fillers = self.tokens_before(self.num_sequences) - self.tokens_before(position)
        return Cut(ends, spare, fillers <= FILLING * sum(spare) + 1e-6)


@dataclass(frozen=True)
class Cut:
    """Ranges by rank: their ends in sequences from the long end, tokens to spare, and whether the rest fits there."""

    ends: list[float]
    spare: list[float]
    complete: bool


def find_budgets(ranges: Ranges, fleet: Fleet, mode: Mode, least_seconds: float = 0.0) -> Budgets:
    """Return the smallest budgets in which the fleet finishes the work.

    Args:
        ranges: the work.
        fleet: the replicas.
        mode: `pipelined`: the sum of first and last, a pair's seconds, is minimised. `barrier`: the largest, a step's
            makespan; within `SLACK` of that the last is then made as small as it can be, so that replicas with work
            of less certain length are done early.
        least_seconds: no budget is smaller than this (what a weight update takes to become available, for example).
    """
    stand_ins = min(SEARCH_REPLICAS, len(fleet.speeds))
    copies = float(fleet.speeds.sum()) / stand_ins
    ranks = np.arange(stand_ins)

    def fits(first: float, last: float) -> bool:
        return ranges.cut(Budgets(first, last).of_rank(ranks, stand_ins).tolist(), copies).complete

    def smallest_first(ratio: float) -> Budgets:
        first = _bisect(lambda first: fits(first, max(ratio * first, min(least_seconds, first))))
        return Budgets(first, max(ratio * first, min(least_seconds, first)))

    if mode == "barrier":
        first = (1.0 + SLACK) * smallest_first(1.0).first
        return Budgets(first, _bisect(lambda last: fits(first, last), first))
    return min((smallest_first(ratio) for ratio in LAST_TO_FIRST), key=lambda one: one.first + one.last)


def _bisect(fits: Callable[[float], bool], most: float = float("inf")) -> float:
    """Return the smallest number that fits, where all above it do; `most` is known to."""
    high = min(1.0, most)
    while high < most and not fits(high):
        high = min(2.0 * high, most)
    low = high / 2.0 if high > 1.0 else 0.0
    while high - low > max(TOLERANCE * high, TOLERANCE):
        middle = (low + high) / 2.0
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def exact_cut(ranges: Ranges, budgets: Budgets, speeds: np.ndarray) -> tuple[Cut, Budgets]:
    """Cut for replicas of these speeds, in the order of their ranks, and give all more time until everything fits.

    The search for budgets has stand-ins for the replicas, and halves of sequences.
    """
    ranks = np.arange(len(speeds))
    while True:
        cut = ranges.cut((budgets.of_rank(ranks, len(speeds)) * speeds).tolist())
        if cut.complete:
            return cut, budgets
        budgets = Budgets(budgets.first * GROWTH, budgets.last * GROWTH)


def plan(work: Work, fleet: Fleet, mode: Mode, *, step: int = 1) -> Plan:
    """Plan one step.

    Args:
        work: its prompt groups.
        fleet: the replicas.
        mode: `pipelined` for one step of a pair, `barrier` where the step ends in a barrier.
        step: number of the step; odd ones go from short to long over the replicas, even ones from long to short.
    """
    num_replicas = len(fleet.speeds)
    ranges = Ranges(work, fleet)
    ranks = np.arange(num_replicas)
    replica_of_rank = ranks[::-1] if step % 2 else ranks
    speeds = fleet.speeds[replica_of_rank]
    budgets = find_budgets(ranges, fleet, mode)
    cut, budgets = exact_cut(ranges, budgets, speeds)
    samples = work.samples[ranges.order]
    tokens = np.repeat(work.tokens[ranges.order], samples)
    position = np.arange(len(tokens)) + 0.5
    rank = np.searchsorted(np.asarray(cut.ends), position)
    fillers = rank == num_replicas
    done = np.cumsum(tokens[fillers]) - tokens[fillers] / 2.0
    spare = np.cumsum(cut.spare)
    if done.size:
        rank[fillers] = np.searchsorted(spare / spare[-1], done / (done[-1] + tokens[-1] / 2.0))
    rank = _keep_groups_together(rank, samples)
    first_of_group = np.cumsum(work.samples) - work.samples
    within = np.arange(len(tokens)) - np.repeat(np.cumsum(samples) - samples, samples)
    order = np.repeat(first_of_group[ranges.order], samples) + within
    replica = np.empty(len(tokens), dtype=np.int64)
    replica[order] = replica_of_rank[rank]
    total = np.bincount(replica[order], weights=tokens, minlength=num_replicas)
    longest = np.zeros(num_replicas)
    np.maximum.at(longest, replica[order], np.repeat(work.span_tokens[ranges.order], samples))
    seconds = fleet.cost.replica_seconds(total, longest, np.full(num_replicas, fleet.max_running)) / fleet.speeds
    return Plan(replica=replica, order=order, seconds=seconds, budgets=budgets)


def _keep_groups_together(rank: np.ndarray, samples: np.ndarray) -> np.ndarray:
    """Give a group that lies on two ranges, each of them at least as large as the group, to the one with more of it."""
    size = np.bincount(rank)
    ends = np.cumsum(samples)
    first, last = rank[ends - samples], rank[ends - 1]
    middle = rank[ends - samples // 2 - 1]
    whole = (last - first == 1) & (np.minimum(size[first], size[last]) >= 2 * samples)
    return np.where(np.repeat(whole, samples), np.repeat(middle, samples), rank)
