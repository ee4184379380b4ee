"""Which of two ways is faster in this job, pairs of steps or a stream of answers: both are tried, the faster is kept.

What pairs win (no answer is interrupted and its prefix recomputed) and what they cost (the wait for the longest
answer) depends on the model, the lengths, and the hardware, so it is measured: in tokens of finished answers per second
of the whole job, training included. The ways come in the order A B A, with as many rounds of each, so that what changes
steadily in a job (lengths, drafts that are accepted) favours neither. A pure object: the time is passed in.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Literal

Way = Literal["pairs", "stream"]

ROUNDS: tuple[Way, ...] = ("pairs",) * 3 + ("stream",) * 5 + ("pairs",) * 3  # the first after a change does not count
BATCHES = 2  # in a round, as in a pair of steps
MARGIN = 0.05  # by which a stream has to be faster: the answers of pairs are younger, and each of one policy
REPEAT_ROUNDS = 200  # after which it is tried again: lengths change as a policy learns


@dataclass(frozen=True)
class Outcome:
    """Of a trial: tokens per second of each way, medians of its rounds, and which way is kept."""

    pairs: float
    stream: float
    kept: Way


class Trial:
    """Says how each batch is to be rolled out.

    Attributes:
        outcome: of the latest trial, or None before the first has ended.
    """

    def __init__(self) -> None:
        self.outcome: Outcome | None = None
        self._batches = 0
        self._round = -1
        self._began = 0.0
        self._tokens = 0
        self._rates: dict[Way, list[float]] = {"pairs": [], "stream": []}

    def add(self, tokens: int) -> None:
        """Take the length of an answer that has ended."""
        self._tokens += tokens

    def begin_batch(self, now: float) -> Way:
        """Return how a training batch that has come now, and what waits, is to be rolled out.

        Args:
            now: seconds.
        """
        self._batches += 1
        if self._batches % BATCHES == 0:
            self._end_round(now)
        if 0 <= self._round < len(ROUNDS):
            return ROUNDS[self._round]
        return ROUNDS[0] if self.outcome is None else self.outcome.kept

    def _end_round(self, now: float) -> None:
        if 0 < self._round < len(ROUNDS) and ROUNDS[self._round] == ROUNDS[self._round - 1]:
            self._rates[ROUNDS[self._round]].append(self._tokens / max(now - self._began, 1e-9))
        self._round += 1
        self._began, self._tokens = now, 0
        if self._round == len(ROUNDS):
            pairs, stream = (statistics.median(self._rates[way]) for way in ("pairs", "stream"))
            self.outcome = Outcome(pairs, stream, "stream" if stream > (1.0 + MARGIN) * pairs else "pairs")
        elif self._round == len(ROUNDS) + REPEAT_ROUNDS:
            self._round = 0
            self._rates = {"pairs": [], "stream": []}
