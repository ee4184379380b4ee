"""Which of two ways is faster in this job, pairs of steps or a stream of answers: both are tried, the faster is kept.

What pairs win (no answer is interrupted and its prefix recomputed) and what they cost (the wait for the longest
answer) depends on the model, the lengths, and the hardware, so it is measured: in tokens of finished answers per second
of the whole job, training included. The ways take turns, and neighbours are compared: so what changes steadily in a job
(lengths, drafts that are accepted) favours neither, and a jump (a new epoch) spoils one comparison of six. A pure
object: the time is passed in.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

Way = Literal["pairs", "stream"]

TURNS: tuple[Way, ...] = ("pairs", "stream", "pairs", "stream", "pairs", "stream", "pairs")
BATCHES = 2  # in a round, as in a pair of steps
MARGIN = 0.05  # by which a stream has to be faster: the answers of pairs are younger, and each of one policy
REPEAT_ROUNDS = 200  # after which it is tried again: lengths change as a policy learns


@dataclass(frozen=True)
class Outcome:
    """Of a trial: by what factor a stream was faster than pairs, and which way is kept."""

    gain: float
    kept: Way


@dataclass(slots=True)
class _Round:
    way: Way
    counts: bool
    began: float
    tokens: int = 0
    prompts: int = 0


class Trial:
    """Says how each batch is to be rolled out.

    Args:
        batch_size: prompts that the trainer takes at once.
        prefetched: batches that the trainer sends ahead; so many of the old way come after a change to the new one.

    Attributes:
        outcome: of the latest trial, or None before the first has ended.
    """

    def __init__(self, batch_size: int, prefetched: float = 1.0) -> None:
        self.outcome: Outcome | None = None
        self._batch_size = batch_size
        self._num_settling = max(1, math.ceil(prefetched / BATCHES))  # rounds that do not count after a change of way
        self._batches = 0
        self._resting = 0  # rounds until the next trial
        self._current: _Round | None = None
        self._left: list[tuple[Way, bool]] = []  # rounds to come: way, and whether it counts
        self._rates: list[tuple[Way, float]] = []
        self._plan()

    @property
    def num_steps(self) -> int:
        """Training steps that a trial takes."""
        return BATCHES * len(TURNS) * (1 + self._num_settling)

    def add(self, tokens: int) -> None:
        """Take the length of an answer that has ended."""
        if self._current is not None:
            self._current.tokens += tokens

    def begin(self, prompts: int, now: float) -> Way:
        """Return how prompts that the trainer sends, and what waits, are to be rolled out.

        Args:
            prompts: a batch, or less to replace what the trainer has thrown away: such work is not counted.
            now: seconds.
        """
        if prompts >= self._batch_size:
            self._batches += 1
            if self._batches % BATCHES == 0:
                self._end_round(now)
        if self._current is not None:
            self._current.prompts += prompts
            return self._current.way
        return "pairs" if self.outcome is None else self.outcome.kept

    def _plan(self) -> None:
        self._rates = []
        self._left = [(way, index == self._num_settling) for way in TURNS for index in range(self._num_settling + 1)]

    def _end_round(self, now: float) -> None:
        done, self._current = self._current, None
        if done is not None and done.counts:
            used = min(1.0, BATCHES * self._batch_size / max(1, done.prompts))
            self._rates.append((done.way, used * max(1, done.tokens) / max(now - done.began, 1e-9)))
        if done is not None and not self._left:
            gains = [b / a if way == "pairs" else a / b for (way, a), (_, b) in pairwise(self._rates)]
            gain = statistics.median(gains)
            self.outcome = Outcome(gain, "stream" if gain > 1.0 + MARGIN else "pairs")
            self._resting = REPEAT_ROUNDS
        if self._resting:
            self._resting -= 1
            if not self._resting:
                self._plan()
            return
        way, counts = self._left.pop(0)
        self._current = _Round(way, counts, now)
