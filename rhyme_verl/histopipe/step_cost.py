"""What one step of an engine costs as a function of its running sequences: the table that plans are made with."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class StepCost:
    """Seconds of one engine step, which gives every running sequence its next token.

    Attributes:
        seconds: float64 [max running + 1]; entry b is of b running sequences, entry 0 is unused and equals entry 1.
            Neither falls with b, nor does seconds / b rise: more sequences never make the engine slower in all.
    """

    seconds: np.ndarray

    @classmethod
    def affine(cls, base_seconds: float, per_sequence_seconds: float, max_running: int) -> StepCost:
        """A step costs the same for each sequence, beside what it always costs."""
        running = np.maximum(np.arange(max_running + 1), 1)
        return cls(base_seconds + per_sequence_seconds * running)

    @classmethod
    def from_table(
        cls, running: np.ndarray | list[float], seconds: np.ndarray | list[float], max_running: int
    ) -> StepCost:
        """Interpolate measured points (ascending `running`); beyond the last one cost grows in proportion.

        Raises:
            ValueError: the points are empty, not ascending or not positive.
        """
        running = np.asarray(running, dtype=np.float64)
        seconds = np.asarray(seconds, dtype=np.float64)
        if not len(running) or len(running) != len(seconds) or np.any(np.diff(running) <= 0):
            raise ValueError("step cost: give as many seconds as running sequences, these in ascending order")
        if running[0] < 1 or seconds.min() <= 0:
            raise ValueError("step cost: running sequences start at 1, seconds are positive")
        grid = np.maximum(np.arange(max_running + 1, dtype=np.float64), 1)
        cost = np.interp(grid, running, seconds)
        cost = np.where(grid > running[-1], seconds[-1] * grid / running[-1], cost)
        cost = np.maximum.accumulate(cost)  # measured points are noisy
        per_sequence = np.minimum.accumulate((cost / grid)[1:])
        return cls(np.concatenate([per_sequence[:1], per_sequence * grid[1:]]))

    @property
    def max_running(self) -> int:
        return len(self.seconds) - 1

    def at(self, running: np.ndarray | float) -> np.ndarray:
        """Return the seconds of a step, also between whole numbers of sequences."""
        return np.interp(running, np.arange(len(self.seconds)), self.seconds)

    def replica_seconds(self, tokens: np.ndarray | float, longest: np.ndarray | float, max_running: int) -> np.ndarray:
        """Return how long a replica takes for `tokens` in sequences of at most `longest` tokens each.

        It takes as many steps as the longest sequence has tokens, or as there is work for at `max_running`, at the
        cost of the mean number that runs: exact where cost is affine in the number running.
        """
        steps = np.maximum(longest, tokens / max_running)
        return steps * self.at(tokens / np.maximum(steps, 1e-9))
