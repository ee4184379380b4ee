"""The cost of an engine step as a function of its running sequences."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

PREFILL_SECONDS_PER_TOKEN = 5e-5  # default, for a model with a few billion parameters


@dataclass(frozen=True)
class ReplicaCost:
    """Seconds of one engine step, which generates the next token of every running sequence.

    Attributes:
        seconds: float64 [max running + 1]; entry b is for b running sequences, entry 0 is unused and equals entry 1.
            Entries never fall with b, and seconds / b never rises: more sequences never lower the throughput.
    """

    seconds: np.ndarray

    @classmethod
    def affine(cls, base_seconds: float, per_sequence_seconds: float, max_running: int) -> ReplicaCost:
        """Return a cost that is constant per step plus constant per sequence."""
        running = np.maximum(np.arange(max_running + 1), 1)
        return cls(base_seconds + per_sequence_seconds * running)

    @classmethod
    def from_table(
        cls, running: np.ndarray | list[float], seconds: np.ndarray | list[float], max_running: int
    ) -> ReplicaCost:
        """Interpolate measured points (ascending `running`); beyond the last point, cost grows proportionally.

        Raises:
            ValueError: the points are empty, not ascending or not positive.
        """
        running = np.asarray(running, dtype=np.float64)
        seconds = np.asarray(seconds, dtype=np.float64)
        if not len(running) or len(running) != len(seconds) or np.any(np.diff(running) <= 0):
            raise ValueError("step cost: running sequences must be ascending, with one time for each")
        if running[0] < 1 or seconds.min() <= 0:
            raise ValueError("step cost: running sequences must be at least 1, and times positive")
        grid = np.maximum(np.arange(max_running + 1, dtype=np.float64), 1)
        cost = np.interp(grid, running, seconds)
        cost = np.where(grid > running[-1], seconds[-1] * grid / running[-1], cost)
        cost = np.maximum.accumulate(cost)  # removes noise in the measured points
        per_sequence = np.minimum.accumulate((cost / grid)[1:])
        return cls(np.concatenate([per_sequence[:1], per_sequence * grid[1:]]))

    @property
    def max_running(self) -> int:
        return len(self.seconds) - 1
