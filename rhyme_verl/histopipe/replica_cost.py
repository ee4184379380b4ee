"""The cost of an engine step as a function of its running sequences."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

PREFILL_SECONDS_PER_TOKEN = 5e-5  # default, for a model with a few billion parameters
DEFAULT_BASE, DEFAULT_PER_SEQUENCE = 15e-3, 5e-5  # seconds per step, until answers have been measured
PRIOR_ANSWERS = 8.0  # weight of the default cost, in measured answers
FORGETTING = 0.998  # factor on the weight of past answers with each new one
MIN_TOKENS = 8  # shorter answers are not measured, because they are mostly prefill


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


class ReplicaCostMeter:
    """Learns the cost of a step from the answers that replicas generate.

    An answer of L tokens that took d seconds, while b answers ran on average, shows that a step with b running takes
    d / L seconds. Accepted drafts make steps cheaper in this sense: tokens are counted, not forward passes.

    Args:
        max_running: number of lanes per replica.
    """

    def __init__(self, max_running: int) -> None:
        self._max_running = max_running
        self._moments = np.zeros((2, 2))  # sum of the outer products of (1, running)
        self._products = np.zeros(2)  # sum of (1, running) times seconds per token
        self._scale_sums = np.zeros(2)  # of seconds per token relative to the default, and of answers

    def observe(self, tokens: int, seconds: float, running: float) -> None:
        """Record an answer generated without interruption, and the mean number of answers running meanwhile."""
        if tokens < MIN_TOKENS or seconds <= 0.0:
            return
        pace, features = seconds / tokens, np.array([1.0, running])
        self._moments = FORGETTING * self._moments + np.outer(features, features)
        self._products = FORGETTING * self._products + pace * features
        expected = DEFAULT_BASE + DEFAULT_PER_SEQUENCE * running
        self._scale_sums = FORGETTING * self._scale_sums + np.array([pace / expected, 1.0])

    def base_and_slope(self) -> tuple[float, float]:
        """Return the constant seconds of a step, and the seconds per sequence.

        This is a ridge regression towards the default cost, rescaled to the measurements. If all answers ran at the
        same concurrency, the measurements alone cannot separate base from slope.
        """
        if not self._scale_sums[1]:
            return DEFAULT_BASE, DEFAULT_PER_SEQUENCE
        prior = self._scale_sums[0] / self._scale_sums[1] * np.array([DEFAULT_BASE, DEFAULT_PER_SEQUENCE])
        weights = PRIOR_ANSWERS * np.diag([1.0, (self._max_running / 2.0) ** 2])
        base, slope = np.linalg.solve(self._moments + weights, self._products + weights @ prior)
        floor = 0.01 * prior
        return max(float(base), float(floor[0])), max(float(slope), float(floor[1]))
