"""Work in the order of its length, and how it is cut into ranges, one a replica, by budgets of seconds.

Knows nothing of how budgets are found (`planner`) or when sequences start (`binder`).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rhyme_verl.histopipe.step_cost import StepCost

P90_SCORE = 1.2815515655446004  # standard deviations of the 90th percentile of a normal distribution
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
                steps = seconds / self._cost[self._max_running]
                left = copies * self._max_running * steps
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
