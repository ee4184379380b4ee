"""What the replicas cost, learnt from the answers they give: seconds of a step by running sequences, and speeds.

An answer of L tokens that took d seconds among b others on average says that a step with b running takes d / L seconds
(less what drafts save: tokens, not passes, are counted, so a fleet that drafts simply has cheaper steps). Knows nothing
of verl, vLLM or Ray. Not thread-safe.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rhyme_verl.histopipe.ranges import Fleet
from rhyme_verl.histopipe.step_cost import StepCost

DEFAULT_BASE, DEFAULT_PER_SEQUENCE = 15e-3, 5e-5  # seconds, until anything has been measured
PRIOR_ANSWERS = 8.0  # answers that the default's shape counts as much as
FORGETTING = 0.998  # weight that the past keeps with every further answer
SPEED_FORGETTING = 0.995
MIN_SPEED_ANSWERS = 100  # of a replica whose speed is told from the others'
SAME_SPEED = 0.2  # a difference of speeds that may be chance
SLOWEST, FASTEST = 0.1, 10.0
MIN_TOKENS = 8  # of an answer that is measured: shorter ones are mostly prefill


@dataclass
class _Pace:
    """How long a replica's answers took, by how long they would have on the fleet's mean replica: a running mean."""

    ratio: float = 1.0
    answers: int = 0


class FleetMeter:
    """Learns step cost and speeds.

    Args:
        max_running: sequences that run at once on a replica.
        table: measured step cost; only its scale is learnt then, otherwise base and slope are.
    """

    def __init__(self, max_running: int, table: StepCost | None = None) -> None:
        self._max_running = max_running
        self._table = table
        self._shape = table or StepCost.affine(DEFAULT_BASE, DEFAULT_PER_SEQUENCE, max_running)
        self._moments = np.zeros((2, 2))  # of (1, running)
        self._products = np.zeros(2)  # with seconds a token
        self._scale_sums = np.zeros(2)  # seconds a token by the shape's, and their number
        self._paces: dict[str, _Pace] = {}

    def observe(self, replica: str, tokens: int, seconds: float, running: float) -> None:
        """Take in an answer.

        Args:
            replica: where it was generated.
            tokens: its length.
            seconds: it took.
            running: mean number of sequences there meanwhile, itself included.
        """
        if tokens < MIN_TOKENS or seconds <= 0.0:
            return
        pace = seconds / tokens
        features = np.array([1.0, running])
        self._moments = FORGETTING * self._moments + np.outer(features, features)
        self._products = FORGETTING * self._products + pace * features
        self._scale_sums = FORGETTING * self._scale_sums + np.array([pace / float(self._shape.at(running)), 1.0])
        of_replica = self._paces.setdefault(replica, _Pace())
        of_replica.answers += 1
        share = max(1.0 - SPEED_FORGETTING, 1.0 / of_replica.answers)
        of_replica.ratio += share * (pace / float(self.cost().at(running)) - of_replica.ratio)

    def cost(self) -> StepCost:
        """Return the seconds of a step of a replica of the fleet's mean speed."""
        if not self._scale_sums[1]:
            return self._shape
        scale = self._scale_sums[0] / self._scale_sums[1]
        if self._table is not None:
            return StepCost(scale * self._table.seconds)
        # Ridge towards the default's shape at the measured scale: where all answers ran among equally many others, the
        # data alone do not tell base from slope.
        prior = scale * np.array([DEFAULT_BASE, DEFAULT_PER_SEQUENCE])
        weights = PRIOR_ANSWERS * np.diag([1.0, (self._max_running / 2.0) ** 2])
        base, slope = np.linalg.solve(self._moments + weights, self._products + weights @ prior)
        floor = 0.01 * prior
        return StepCost.affine(max(float(base), floor[0]), max(float(slope), floor[1]), self._max_running)

    def fleet(self, replicas: Sequence[str], max_running: int) -> Fleet:
        """Return these replicas, in this order, for the planner; `max_running` as for the meter, or less."""
        return Fleet(
            speeds=np.array([self._speed(replica) for replica in replicas]),
            max_running=max_running,
            cost=StepCost(self.cost().seconds[: max_running + 1]),
        )

    def _speed(self, replica: str) -> float:
        pace = self._paces.get(replica)
        if pace is None or pace.answers < MIN_SPEED_ANSWERS:
            return 1.0
        known = [one.ratio for one in self._paces.values() if one.answers >= MIN_SPEED_ANSWERS]
        speed = float(np.clip(np.median(known) / pace.ratio, SLOWEST, FASTEST))
        return 1.0 if abs(speed - 1.0) < SAME_SPEED else speed
