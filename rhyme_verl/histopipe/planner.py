"""Shares a step's prompt groups out over the replicas by predicted length: HistoPipe's two tiers, as pure functions.

Tier 1 sorts the work from long to short and cuts the order into one contiguous range a replica, each as large as the
replica can finish within its budget of seconds by the step-cost table: long sequences run few together, short ones
many. Budgets fall linearly along the ranks. Tier 2 gives the ranks out in opposite orders in odd and even steps, so
that the budgets of a pair add up to the same on every replica. Where each step ends in a barrier all budgets are
equal, which makes the step's makespan as short as it can be. Source: RhymeRL, arXiv 2508.18588, section on HistoPipe.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from rhyme_verl.histopipe.step_cost import StepCost

Mode = Literal["pipelined", "barrier"]

P90_SCORE = 1.2815515655446004  # standard deviations of the 90th percentile of a normal distribution
SPAN_SCORES = (1.3, 2.0, 2.6, 3.3, 4.5)  # tried for the longest that an answer is planned with
MAX_DRAWS = 16
SAMPLED_SEQUENCES = 131072  # lengths drawn, in all, to compare them
LAST_TO_FIRST = (0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 1.0)  # tried ratios of a pair's smallest budget to its largest
SEARCH_REPLICAS = 64  # budgets are searched with at most this many stand-ins for all replicas
TOLERANCE = 1e-3  # of the budget search
GROWTH = 1.002  # of budgets that were too small for whole sequences
SLACK = 0.02  # of the shortest time there is, given up for margin
FILLING = 0.9  # share of idle lanes' time that fillers can be counted on to use


@dataclass(frozen=True, kw_only=True)
class Work:
    """What is to be generated, one entry a prompt group (or a sequence, with `samples` 1).

    Attributes:
        tokens: float64 [groups], expected length of one answer.
        p50: float64 [groups], length that half of the answers exceed.
        p90: float64 [groups], length that one answer in ten exceeds; equal to p50 if lengths are certain.
        samples: int64 [groups], answers to generate.
        max_tokens: cap on the length of an answer.
    """

    tokens: np.ndarray
    p50: np.ndarray
    p90: np.ndarray
    samples: np.ndarray
    max_tokens: float

    @classmethod
    def certain(cls, tokens: np.ndarray) -> Work:
        """Sequences of known lengths, float64 [sequences]."""
        samples = np.ones(len(tokens), dtype=np.int64)
        return cls(tokens=tokens, p50=tokens, p90=tokens, samples=samples, max_tokens=float(tokens.max()))

    @classmethod
    def joined(cls, parts: Sequence[Work]) -> Work:
        """Several steps' work as one."""
        return cls(
            tokens=np.concatenate([part.tokens for part in parts]),
            p50=np.concatenate([part.p50 for part in parts]),
            p90=np.concatenate([part.p90 for part in parts]),
            samples=np.concatenate([part.samples for part in parts]),
            max_tokens=max(part.max_tokens for part in parts),
        )

    def spread(self) -> np.ndarray:
        """Return the standard deviation of log length [groups], lengths taken to be log-normal within a group.

        A few answers tell little of a group's own spread, so that of all groups counts as much.
        """
        own = np.log(self.p90 / self.p50) / P90_SCORE
        return np.sqrt((own**2 + np.mean(own**2)) / 2.0)

    def spans(self, scores: float) -> np.ndarray:
        """Return the length [groups] that lies `scores` standard deviations above the median."""
        spans = self.p50 * np.exp(scores * self.spread())
        return np.minimum(np.maximum(spans, self.tokens), self.max_tokens)


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
    """Seconds that the replica of each rank has for its range: from `first` (the longest work) linearly to `last`.

    Ranges are cut so that spans `margin` times as long still end in time, where that leaves as many sequences together
    as at the longest work.
    """

    first: float
    last: float
    margin: float = 1.0

    def of_rank(self, rank: np.ndarray | int, ranks: int) -> np.ndarray:
        """Return the budgets of ranks 0 to ranks - 1."""
        place = np.asarray(rank) / (ranks - 1) if ranks > 1 else 0.5  # one replica is its own mirror image
        return self.first + (self.last - self.first) * np.minimum(place, 1.0)

    def scaled(self, factor: float) -> Budgets:
        return Budgets(self.first * factor, self.last * factor, self.margin)


class Ranges:
    """Work in the order of its span, longest first, and how it is cut into ranges.

    A range is at most one wave: as many sequences as run at once. What a replica could do in its budget beyond its
    range, it does with fillers, the shortest sequences, which start late as lanes get free.
    """

    def __init__(self, work: Work, spans: np.ndarray, fleet: Fleet) -> None:
        self.order = np.lexsort((-work.tokens, -spans))
        samples = work.samples[self.order]
        tokens = work.tokens[self.order]
        self._span: list[float] = spans[self.order].tolist()
        self._tokens: list[float] = tokens.tolist()
        self._counts: list[int] = np.cumsum(samples).tolist()
        self._sums: list[float] = np.cumsum(tokens * samples).tolist()
        self._cost: list[float] = fleet.cost.seconds[: fleet.max_running + 1].tolist()
        self._max_running = fleet.max_running
        self._wave = fleet.max_running
        self.num_sequences = self._counts[-1] if self._counts else 0

    def limit_wave(self, sequences: int) -> None:
        """Let no range have more than so many sequences."""
        self._wave = min(self._wave, sequences)

    def span_at(self, position: float) -> float:
        """Return the span of the sequence at a position, counted in sequences from the long end."""
        return self._span[bisect_right(self._counts, position)]

    def tokens_before(self, position: float) -> float:
        """Return the tokens of all sequences before a position."""
        group = min(bisect_left(self._counts, position), len(self._counts) - 1)
        return self._sums[group] - (self._counts[group] - position) * self._tokens[group]

    def capacity(self, seconds: float, span: float, budgets: Budgets) -> float:
        """Return the tokens that a replica of speed 1 finishes in `seconds` if the longest sequence has `span`.

        Its steps may then take seconds / span on average, and the table says how many sequences run at that; none if
        even a sequence alone does not end in time. The margin of `budgets` is kept.
        """
        per_step = seconds / span
        margin = max(1.0, min(budgets.margin, per_step * self._span[0] / budgets.first))
        per_step /= margin
        most = self._max_running
        if per_step >= self._cost[most]:
            return most * seconds / (margin * self._cost[most])
        running = bisect_right(self._cost, per_step, lo=1) - 1
        if running == 0:
            return 0.0
        low, high = self._cost[running], self._cost[running + 1]
        return span * (running + (per_step - low) / (high - low))

    def range_end(self, start: float, capacity: float, copies: float = 1.0) -> float:
        """Return the end of a range of at most `capacity` tokens and one wave, of `copies` replicas together."""
        wave = min(start + copies * self._wave, self.num_sequences)
        limit = self.tokens_before(start) + copies * capacity
        if self.tokens_before(wave) <= limit:
            return wave
        group = bisect_left(self._sums, limit)
        return self._counts[group] - (self._sums[group] - limit) / self._tokens[group]

    def cut(self, budgets: Budgets, speeds: list[float], copies: float = 1.0) -> Cut:
        """Cut the work into ranges for replicas of these speeds, by rank, each of which stands for `copies` of them."""
        position = 0.0
        ends: list[float] = []
        spare: list[float] = []
        free_steps: list[float] = []  # of a lane, after a sequence of the range
        all_seconds = (budgets.of_rank(np.arange(len(speeds)), len(speeds)) * np.asarray(speeds)).tolist()
        for seconds in all_seconds:
            left = steps = 0.0
            if position < self.num_sequences:
                span = self.span_at(position)
                capacity = self.capacity(seconds, span, budgets)
                if capacity == 0.0:
                    return Cut([], [], False)
                end = self.range_end(position, capacity, copies)
                if copies == 1.0:
                    end = min(max(round(end), round(position) + 1), self.num_sequences)
                left = copies * capacity - (self.tokens_before(end) - self.tokens_before(position))
                steps = capacity / self._max_running - self._tokens[bisect_right(self._counts, position)]
                position = end
            else:
                left = copies * self._max_running * seconds / self._cost[self._max_running]
                steps = left
            ends.append(position)
            spare.append(max(0.0, left))
            free_steps.append(steps)
        if position >= self.num_sequences:
            return Cut(ends, spare, True)
        longest = self._tokens[bisect_right(self._counts, position)]
        usable = sum(tokens for tokens, steps in zip(spare, free_steps, strict=True) if steps >= longest)
        fillers = self.tokens_before(self.num_sequences) - self.tokens_before(position)
        return Cut(ends, spare, fillers <= FILLING * usable)


@dataclass(frozen=True)
class Cut:
    """Ranges by rank: their ends in sequences from the long end, tokens to spare, and whether the rest fits there."""

    ends: list[float]
    spare: list[float]
    complete: bool


def find_budgets(ranges: Ranges, fleet: Fleet, mode: Mode) -> Budgets:
    """Return the smallest budgets in which the fleet finishes the work.

    Args:
        ranges: the work.
        fleet: the replicas.
        mode: `pipelined`: the sum of first and last, a pair's seconds, is minimised. `barrier`: all budgets are alike
            and the makespan is. What a fleet could do beyond that becomes margin, for `SLACK` more time.
    """
    stand_ins = min(SEARCH_REPLICAS, len(fleet.speeds))
    copies = float(fleet.speeds.sum()) / stand_ins
    speeds = [1.0] * stand_ins

    def fits(budgets: Budgets) -> bool:
        return ranges.cut(budgets, speeds, copies).complete

    def smallest(ratio: float) -> Budgets:
        first = _bisect(lambda first: fits(Budgets(first, ratio * first)))
        return Budgets(first, ratio * first)

    ratios = (1.0,) if mode == "barrier" else LAST_TO_FIRST
    best = min((smallest(ratio) for ratio in ratios), key=lambda one: one.first + one.last).scaled(1.0 + SLACK)
    inverse = _bisect(lambda inverse: fits(Budgets(best.first, best.last, 1.0 / inverse)), 1.0)
    return Budgets(best.first, best.last, 1.0 / inverse)


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
    while True:
        cut = ranges.cut(budgets, speeds.tolist())
        if cut.complete:
            return cut, budgets
        budgets = budgets.scaled(GROWTH)


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A step's work in order, longest first, and how it is cut.

    Attributes:
        ranges: the work.
        budgets: by which it is cut.
        cut: the ranges.
        spans: float64 [groups], what the longest answer of each group is planned with.
        sequences: int64 [sequences], numbers of the sequences (group by group in the order of `Work`), longest first.
    """

    ranges: Ranges
    budgets: Budgets
    cut: Cut
    spans: np.ndarray
    sequences: np.ndarray


def schedule(work: Work, fleet: Fleet, mode: Mode, *, seed: int = 0) -> Schedule:
    """Order and cut a step's work for replicas by rank, in the order of `fleet.speeds`.

    How much longer than expected answers have to be planned for is found by trial: lengths are drawn from the
    predictions, and the schedule that ends first on average is taken.
    """
    rng = np.random.default_rng(seed)
    num_sequences = int(work.samples.sum())
    certain = bool(np.all(work.p90 <= work.p50))
    num_draws = 1 if certain else max(1, min(MAX_DRAWS, SAMPLED_SEQUENCES // num_sequences))
    median = np.repeat(work.p50, work.samples)
    spread = np.repeat(work.spread(), work.samples)
    draws = median * np.exp(spread * rng.standard_normal((num_draws, num_sequences)))
    lengths = np.minimum(draws, work.max_tokens)

    def mean_seconds(one: Schedule) -> float:
        return float(np.mean([_seconds(one, draw, fleet, mode) for draw in lengths]))

    trials = [_schedule(work, scores, fleet, mode) for scores in ((0.0,) if certain else SPAN_SCORES)]
    if mode == "barrier":
        trials.append(_even_schedule(work, fleet))
    return min(trials, key=mean_seconds)


def _even_schedule(work: Work, fleet: Fleet) -> Schedule:
    """Deal the longest sequences out in turn, as many to each replica: best where lanes, not lengths, are short."""
    spans = work.spans(0.0)
    ranges = Ranges(work, spans, fleet)
    sequences = _longest_first(work, ranges)
    num, num_sequences = len(fleet.speeds), len(sequences)
    wave = min(fleet.max_running, -(-num_sequences // num))
    ranges.limit_wave(wave)
    total = ranges.tokens_before(num_sequences)
    alone = fleet.cost.replica_seconds(total, work.max_tokens, fleet.max_running) / fleet.speeds.min()
    seconds = 2.0 * float(alone)  # not what the work is cut by
    budgets = Budgets(seconds, seconds)
    place = np.arange(min(num_sequences, wave * num))
    sequences[: len(place)] = sequences[np.lexsort((place, place % num))]
    cut = ranges.cut(budgets, fleet.speeds.tolist())
    return Schedule(ranges=ranges, budgets=budgets, cut=cut, spans=spans, sequences=sequences)


def _schedule(work: Work, scores: float, fleet: Fleet, mode: Mode) -> Schedule:
    spans = work.spans(scores)
    ranges = Ranges(work, spans, fleet)
    cut, budgets = exact_cut(ranges, find_budgets(ranges, fleet, mode), fleet.speeds)
    return Schedule(ranges=ranges, budgets=budgets, cut=cut, spans=spans, sequences=_longest_first(work, ranges))


def _longest_first(work: Work, ranges: Ranges) -> np.ndarray:
    """Return the numbers [sequences] of all sequences in the order of the ranges."""
    samples = work.samples[ranges.order]
    first = (np.cumsum(work.samples) - work.samples)[ranges.order]
    within = np.arange(samples.sum()) - np.repeat(np.cumsum(samples) - samples, samples)
    return np.repeat(first, samples) + within


def ranks_of(schedule: Schedule, tokens: np.ndarray) -> np.ndarray:
    """Return the rank [sequences] that should run each sequence of the schedule, of expected `tokens` in its order."""
    rank = np.searchsorted(np.asarray(schedule.cut.ends), np.arange(len(tokens)) + 0.5)
    fillers = rank == len(schedule.cut.ends)
    if fillers.any():
        spare = np.cumsum(schedule.cut.spare)
        done = np.cumsum(tokens[fillers])
        rank[fillers] = np.searchsorted(spare / spare[-1], (done - tokens[fillers] / 2.0) / done[-1])
    return rank


def _seconds(one: Schedule, lengths: np.ndarray, fleet: Fleet, mode: Mode) -> float:
    """Return the seconds of the step, or of a pair of such steps, if the answers have these lengths."""
    num = len(fleet.speeds)
    ordered = lengths[one.sequences]
    rank = ranks_of(one, ordered)
    longest = np.zeros(num)
    np.maximum.at(longest, rank, ordered)
    tokens = np.bincount(rank, weights=ordered, minlength=num)
    seconds = fleet.cost.replica_seconds(tokens, longest, fleet.max_running) / fleet.speeds
    return float((seconds if mode == "barrier" else seconds + seconds[::-1]).max())


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


def plan(work: Work, fleet: Fleet, mode: Mode, *, step: int = 1) -> Plan:
    """Plan one step.

    Args:
        work: its prompt groups.
        fleet: the replicas.
        mode: `barrier` if the work, a step or a pair of steps, is all that the fleet does until it is over;
            `pipelined` for one step of a pair whose other step is not known.
        step: number of the step, for `pipelined`; odd ones go from short to long over the replicas, even ones from
            long to short.
    """
    num_replicas = len(fleet.speeds)
    ranks = np.arange(num_replicas)
    if mode == "barrier":
        replica_of_rank = np.argsort(-fleet.speeds, kind="stable")
    else:
        replica_of_rank = ranks[::-1] if step % 2 else ranks
    one = schedule(work, replace(fleet, speeds=fleet.speeds[replica_of_rank]), mode)
    tokens = np.repeat(work.tokens, work.samples)[one.sequences]
    rank = _keep_groups_together(ranks_of(one, tokens), work.samples[one.ranges.order])
    replica = np.empty(len(tokens), dtype=np.int64)
    replica[one.sequences] = replica_of_rank[rank]
    total = np.bincount(replica[one.sequences], weights=tokens, minlength=num_replicas)
    longest = np.zeros(num_replicas)
    np.maximum.at(longest, replica, np.repeat(one.spans, work.samples))
    seconds = fleet.cost.replica_seconds(total, longest, fleet.max_running) / fleet.speeds
    return Plan(replica=replica, order=one.sequences, seconds=seconds, budgets=one.budgets)


def _keep_groups_together(rank: np.ndarray, samples: np.ndarray) -> np.ndarray:
    """Give a group that lies on two ranges, each of them at least as large as the group, to the one with more of it."""
    size = np.bincount(rank)
    ends = np.cumsum(samples)
    first, last = rank[ends - samples], rank[ends - 1]
    middle = rank[ends - samples // 2 - 1]
    whole = (last - first == 1) & (np.minimum(size[first], size[last]) >= 2 * samples)
    return np.where(np.repeat(whole, samples), np.repeat(middle, samples), rank)
