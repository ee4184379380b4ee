"""Models replicas as continuous-batching engines: each step generates the next token of every running sequence.

A replica therefore needs no event per token. It counts its steps on its own clock: a sequence that starts at step s
ends at s + length, and the seconds per step change only when a sequence starts or ends.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rhyme_verl.sim.replica_cost import ReplicaCost

ROUNDING = 1e-6  # tolerance in tokens


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """The replicas of a job.

    Attributes:
        speeds: float64 [replicas], relative to `cost`.
        max_running: maximum number of running sequences per replica.
        cost: cost of a step on a replica of speed 1.
    """

    speeds: np.ndarray
    max_running: int
    cost: ReplicaCost


class Replica:
    """One engine; sequences beyond `max_running` wait in the order of arrival. Times are in seconds and never decrease.

    Args:
        step_seconds: seconds per step, indexed by the number of running sequences; includes the replica's speed.
        max_running: maximum number of running sequences.
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
        "waiting",
    )

    def __init__(self, step_seconds: Sequence[float], max_running: int) -> None:
        self.max_running = max_running
        self.waiting: deque[tuple[int, float, int, float]] = deque()  # arguments of `start`
        self.busy_seconds = 0.0  # with at least one sequence
        self.sequence_seconds = 0.0  # number of running sequences, integrated over time
        self.generated_tokens = 0.0
        self.stalled_seconds = 0.0  # spent recomputing prefixes
        self._step_seconds = step_seconds
        self._steps = 0.0
        self._since = 0.0  # time of `_steps`; ahead of the clock while prefixes are recomputed
        self._ends: list[tuple[float, int]] = []  # heap of (step, sequence)
        self._started: dict[int, tuple[float, float, int]] = {}  # sequence -> step, second, tokens before

    def __len__(self) -> int:
        return len(self._ends)

    def advance(self, now: float) -> None:
        """Advance the step clock to `now`."""
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

    def start(self, sequence: int, tokens: float, now: float, *, before: int = 0, recompute: float = 0.0) -> None:
        """Run a sequence for `tokens` tokens after `before` earlier ones, whose prefix takes `recompute` seconds."""
        if len(self._ends) >= self.max_running:
            self.waiting.append((sequence, tokens, before, recompute))
            return
        self.advance(now)
        self._started[sequence] = (self._steps, now, before)
        heapq.heappush(self._ends, (self._steps + tokens, sequence))
        if recompute:
            self.stall(recompute)

    def stall(self, seconds: float) -> None:
        """Delay all sequences while a prefix is recomputed."""
        running = len(self._ends)
        self._since += seconds
        self.stalled_seconds += seconds
        self.busy_seconds += seconds
        self.sequence_seconds += seconds * running

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
        limit = self._steps + ROUNDING
        ends, started = self._ends, self._started
        while ends and ends[0][0] <= limit:
            sequence = heapq.heappop(ends)[1]
            ended.append((sequence, started.pop(sequence)[1]))
        while self.waiting and len(ends) < self.max_running:
            sequence, tokens, before, recompute = self.waiting.popleft()
            self.start(sequence, tokens, now, before=before, recompute=recompute)
        return ended

    def interrupt(self, now: float) -> list[tuple[int, int, float | None]]:
        """Abort all sequences; return each with its tokens so far and the second of its start, None if it waited."""
        self.advance(now)
        aborted: list[tuple[int, int, float | None]] = []
        for sequence, (_, start, _) in self._started.items():
            aborted.append((sequence, int(self.tokens_of(sequence) + ROUNDING), start))
        aborted += [(sequence, before, None) for sequence, _, before, _ in self.waiting]
        self._ends.clear()
        self._started.clear()
        self.waiting.clear()
        return aborted

    def tokens_of(self, sequence: int) -> float:
        """Return the number of tokens of a running sequence at the last `advance`."""
        step, _, before = self._started[sequence]
        return before + self._steps - step


def replicas_of(fleet: Fleet) -> list[Replica]:
    """Return the engines of a fleet."""
    tables = {speed: (fleet.cost.seconds / speed).tolist() for speed in np.unique(fleet.speeds).tolist()}
    return [Replica(tables[speed], fleet.max_running) for speed in fleet.speeds.tolist()]
