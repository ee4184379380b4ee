"""Models replicas as continuous-batching engines: each step generates the next token of every running sequence.

A replica therefore needs no event per token. It counts its steps on its own clock: a sequence that starts at step s
ends at s + length, and the seconds per step change only when a sequence starts or ends.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence

import numpy as np

PREFILL_SECONDS_PER_TOKEN = 5e-5  # default, for a model with a few billion parameters
ROUNDING = 1e-6  # tolerance in tokens


def affine_step_seconds(base: float, per_sequence: float, max_running: int) -> np.ndarray:
    """Return the seconds of engine steps that are constant per step plus constant per sequence."""
    found: np.ndarray = base + per_sequence * np.maximum(np.arange(max_running + 1), 1)
    return found


def interpolate_step_seconds(
    running: Sequence[float] | np.ndarray, seconds: Sequence[float] | np.ndarray, max_running: int
) -> np.ndarray:
    """Interpolate measured seconds of engine steps; beyond the last point, they grow proportionally.

    Args:
        running: ascending numbers of running sequences.

    Returns:
        float64 [max_running + 1]; entry b is for b running sequences, entry 0 is unused and equals entry 1. Entries
        never fall with b, and seconds / b never rises: more sequences never lower the throughput.
    """
    grid = np.maximum(np.arange(max_running + 1, dtype=np.float64), 1)
    found = np.interp(grid, running, seconds)
    found = np.where(grid > running[-1], seconds[-1] * grid / running[-1], found)
    found = np.maximum.accumulate(found)  # removes noise in the measured points
    per_sequence = np.minimum.accumulate((found / grid)[1:])
    return np.concatenate([per_sequence[:1], per_sequence * grid[1:]])


class Replica:
    """One engine; sequences beyond `max_running` wait in the order of arrival. Times are in seconds and never decrease.

    Args:
        step_seconds: seconds per step by running sequences, up to `max_running`; includes the replica's speed.
    """

    def __init__(self, step_seconds: Sequence[float]) -> None:
        self.max_running = len(step_seconds) - 1
        self.waiting: deque[tuple[int, float, int, float]] = deque()  # arguments of `start`
        self.sequence_seconds = 0.0  # number of running sequences, integrated over time
        self.generated_tokens = 0.0
        self.stalled_seconds = 0.0  # spent recomputing prefixes
        self._step_seconds = step_seconds
        self._steps = 0.0
        self._since = 0.0  # time of `_steps`; ahead of the clock while prefixes are recomputed
        self._ends: list[tuple[float, int]] = []  # heap of (step, sequence)
        self._started: dict[int, tuple[float, float, int]] = {}  # sequence -> step, second, tokens before

    def advance(self, now: float) -> None:
        """Advance the step clock to `now`."""
        elapsed, running = now - self._since, len(self._ends)
        if elapsed > 0.0 and running:
            steps = elapsed / self._step_seconds[running]
            self._steps += steps
            self.generated_tokens += steps * running
            self.sequence_seconds += elapsed * running
        self._since = max(self._since, now)

    def start(self, sequence: int, tokens: float, now: float, *, before: int = 0, recompute: float = 0.0) -> None:
        """Run a sequence for `tokens` tokens after `before` earlier ones, whose prefix takes `recompute` seconds."""
        if len(self._ends) >= self.max_running:
            self.waiting.append((sequence, tokens, before, recompute))
            return
        self.advance(now)
        self._started[sequence] = (self._steps, now, before)
        heapq.heappush(self._ends, (self._steps + tokens, sequence))
        self._since += recompute  # delays all sequences
        self.stalled_seconds += recompute
        self.sequence_seconds += recompute * len(self._ends)

    def next_end(self) -> float:
        """Return when the next sequence ends; infinity if none runs."""
        if not self._ends:
            return float("inf")
        left = max(0.0, self._ends[0][0] - self._steps)
        return self._since + left * self._step_seconds[len(self._ends)]

    def pop_ended(self, now: float) -> list[tuple[int, float]]:
        """Remove the sequences that have ended by `now`; return each with the second at which it started here."""
        self.advance(now)
        ended = []
        while self._ends and self._ends[0][0] <= self._steps + ROUNDING:
            sequence = heapq.heappop(self._ends)[1]
            ended.append((sequence, self._started.pop(sequence)[1]))
        while self.waiting and len(self._ends) < self.max_running:
            sequence, tokens, before, recompute = self.waiting.popleft()
            self.start(sequence, tokens, now, before=before, recompute=recompute)
        return ended

    def interrupt(self, now: float) -> list[tuple[int, int, float | None]]:
        """Abort all sequences; return each with its tokens so far and the second of its start, None if it waited."""
        self.advance(now)
        aborted: list[tuple[int, int, float | None]] = [
            (sequence, int(before + self._steps - step + ROUNDING), start)
            for sequence, (step, start, before) in self._started.items()
        ]
        aborted += [(sequence, before, None) for sequence, _, before, _ in self.waiting]
        self._ends.clear()
        self._started.clear()
        self.waiting.clear()
        return aborted
