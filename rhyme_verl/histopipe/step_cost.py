"""Learns the cost of an engine step from the answers that replicas generate."""

from __future__ import annotations

import numpy as np

DEFAULT_BASE, DEFAULT_PER_SEQUENCE = 15e-3, 5e-5  # seconds per step, until answers have been measured
PRIOR_ANSWERS = 8.0  # weight of the default cost, in measured answers
FORGETTING = 0.998  # factor on the weight of past answers with each new one
MIN_TOKENS = 8  # shorter answers are not measured, because they are mostly prefill


class StepCostMeter:
    """Learns the cost of a step on replicas of `max_running` lanes.

    An answer of L tokens that took d seconds, while b answers ran on average, shows that a step with b running takes
    d / L seconds. Accepted drafts make steps cheaper in this sense: tokens are counted, not forward passes.
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
