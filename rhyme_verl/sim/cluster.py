"""Replicas as continuous-batching engines: every running sequence of a replica gets its next token in the same step.

So a replica needs no event per token: it counts its steps on a clock of its own, a sequence that starts at step s ends
at s + length, and the seconds of a step change only when one starts or ends.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from rhyme_verl.histopipe.step_cost import StepCost

ROUNDING = 1e-6  # of a token


class Replica:
    """One engine. All times are seconds of the simulated cluster, none may go back.

    Args:
        step_seconds: by the number of running sequences, this replica's speed included.
        max_running: sequences that run at once.
    """

    __slots__ = (
        "_ends",
        "_remaining",
        "_since",
        "_started",
        "_step_seconds",
        "_steps",
        "busy_seconds",
        "generated_tokens",
        "max_running",
        "sequence_seconds",
        "stalled_seconds",
        "version",
    )

    def __init__(self, step_seconds: Sequence[float], max_running: int) -> None:
        self.max_running = max_running
        self.version = 0
        self.busy_seconds = 0.0  # with any sequence
        self.sequence_seconds = 0.0  # the integral of the number running
        self.generated_tokens = 0.0
        self.stalled_seconds = 0.0  # spent on recomputing prefixes
        self._step_seconds = step_seconds
        self._steps = 0.0
        self._since = 0.0  # _steps is as of this moment; ahead of the clock while prefixes are recomputed
        self._ends: list[tuple[float, int]] = []  # a heap of (step, sequence)
        self._started: dict[int, tuple[float, float, int]] = {}  # by sequence: step, seconds, tokens before

    def __len__(self) -> int:
        return len(self._ends)

    @property
    def sequences(self) -> list[int]:
        return list(self._started)

    def advance(self, now: float) -> None:
        """Bring the clock of steps up to `now`."""
        elapsed = now - self._since
        if elapsed <= 0.0:
            return
        running = len(self._ends)
        if running:
            steps = elapsed / self._step_seconds[running]
            self._steps += steps
            self.generated_tokens += steps * running
            self.busy_seconds += elapsed
            self.sequence_seconds += elapsed * running
        self._since = now

    def start(
        self, sequence: int, tokens: float, now: float, *, before: int = 0, recompute_seconds: float = 0.0
    ) -> None:
        """Run a sequence for `tokens` more tokens, after `before` of which the prefix has to be recomputed."""
        self.advance(now)
        self._started[sequence] = (self._steps, now, before)
        heapq.heappush(self._ends, (self._steps + tokens, sequence))
        if recompute_seconds:
            self.stall(recompute_seconds)

    def stall(self, seconds: float) -> None:
        """Hold all sequences up: prefixes are recomputed."""
        running = len(self._ends)
        self._since += seconds
        self.stalled_seconds += seconds
        self.busy_seconds += seconds
        self.sequence_seconds += seconds * running

    def pause(self, seconds: float, now: float) -> None:
        """Hold all sequences up, and count it as no work: the engine sleeps."""
        self.advance(now)
        self._since += seconds

    def next_end(self) -> float:
        """Return when the next sequence ends (infinity: none runs)."""
        if not self._ends:
            return float("inf")
        left = max(0.0, self._ends[0][0] - self._steps)
        return self._since + left * self._step_seconds[len(self._ends)]

    def pop_ended(self, now: float) -> list[tuple[int, float]]:
        """Remove what has ended by `now`; return each sequence with the second at which it had started here."""
        self.advance(now)
        ended = []
        limit = self._steps + ROUNDING
        ends, started = self._ends, self._started
        while ends and ends[0][0] <= limit:
            sequence = heapq.heappop(ends)[1]
            ended.append((sequence, started.pop(sequence)[1]))
        return ended

    def tokens_of(self, sequence: int) -> float:
        """Return how many tokens a running sequence has, as of the last `advance`."""
        step, _, before = self._started[sequence]
        return before + self._steps - step

    def remove(self, sequence: int, now: float) -> tuple[int, float]:
        """Abort a running sequence; return its whole tokens so far and the second at which it had started here."""
        self.advance(now)
        tokens = int(self.tokens_of(sequence) + ROUNDING)
        start = self._started.pop(sequence)[1]
        self._ends = [entry for entry in self._ends if entry[1] != sequence]
        heapq.heapify(self._ends)
        return tokens, start


def replicas_of(cost: StepCost, speeds: np.ndarray, max_running: int) -> list[Replica]:
    """Return a replica for each relative speed (1: as `cost` says)."""
    tables = {speed: (cost.seconds / speed).tolist() for speed in np.unique(speeds).tolist()}
    return [Replica(tables[speed], max_running) for speed in speeds.tolist()]
