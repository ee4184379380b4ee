"""What one step of an engine costs as a function of its running sequences: measured beforehand, or learnt in a job."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

PREFILL_SECONDS_PER_TOKEN = 5e-5  # of a model of some billions of parameters, while nothing is measured
DEFAULT_BASE, DEFAULT_PER_SEQUENCE = 15e-3, 5e-5  # seconds of a step, while nothing is measured
PRIOR_ANSWERS = 8.0  # answers that the default's shape counts as much as
FORGETTING = 0.998  # weight that the past keeps with every further answer
MIN_TOKENS = 8  # of an answer that is measured: shorter ones are mostly prefill


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
        found: np.ndarray = np.interp(running, np.arange(len(self.seconds)), self.seconds)
        return found


class StepCostMeter:
    """Learns what a step costs from the answers that replicas give.

    An answer of L tokens that took d seconds among b others on average tells that a step with b running takes d / L
    seconds. Drafted tokens make steps cheaper in this sense: tokens are counted, not passes.

    Args:
        max_running: sequences that run at once on a replica.
    """

    def __init__(self, max_running: int) -> None:
        self._max_running = max_running
        self._moments = np.zeros((2, 2))  # of (1, running)
        self._products = np.zeros(2)  # with seconds per token
        self._scale_sums = np.zeros(2)  # seconds per token relative to the default's, and their number

    def observe(self, tokens: int, seconds: float, running: float) -> None:
        """Take an answer that was generated without interruption, and the mean number running meanwhile."""
        if tokens < MIN_TOKENS or seconds <= 0.0:
            return
        pace, features = seconds / tokens, np.array([1.0, running])
        self._moments = FORGETTING * self._moments + np.outer(features, features)
        self._products = FORGETTING * self._products + pace * features
        expected = DEFAULT_BASE + DEFAULT_PER_SEQUENCE * running
        self._scale_sums = FORGETTING * self._scale_sums + np.array([pace / expected, 1.0])

    def base_and_slope(self) -> tuple[float, float]:
        """Return the seconds of a step beside its sequences, and per sequence.

        A ridge regression towards the default's shape at the measured scale: where all answers ran among equally many
        others, the data alone do not tell base from slope.
        """
        if not self._scale_sums[1]:
            return DEFAULT_BASE, DEFAULT_PER_SEQUENCE
        prior = self._scale_sums[0] / self._scale_sums[1] * np.array([DEFAULT_BASE, DEFAULT_PER_SEQUENCE])
        weights = PRIOR_ANSWERS * np.diag([1.0, (self._max_running / 2.0) ** 2])
        base, slope = np.linalg.solve(self._moments + weights, self._products + weights @ prior)
        floor = 0.01 * prior
        return max(float(base), float(floor[0])), max(float(slope), float(floor[1]))


@dataclass(frozen=True, kw_only=True)
class MeasuredCost:
    """What `rhyme calibrate` found out about an engine.

    Attributes:
        running: ascending numbers of sequences that ran at once.
        seconds: of a step with each of them.
        prefill_seconds_per_token: what it takes to recompute the prefix of a sequence that is resumed elsewhere.
    """

    running: tuple[float, ...]
    seconds: tuple[float, ...]
    prefill_seconds_per_token: float = PREFILL_SECONDS_PER_TOKEN

    def table(self, max_running: int) -> StepCost:
        """Return the seconds of a step with up to `max_running` sequences."""
        return StepCost.from_table(list(self.running), list(self.seconds), max_running)


def load(path: str | Path) -> MeasuredCost:
    """Read a step-cost table: JSON with lists "running" and "ms", and if known "prefill_us_per_token".

    Raises:
        ValueError: there is no such file, or something else is in it.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        running, milliseconds = content["running"], content["ms"]
        default = PREFILL_SECONDS_PER_TOKEN * 1e6
        found = MeasuredCost(
            running=tuple(map(float, running)),
            seconds=tuple(float(one) / 1e3 for one in milliseconds),
            prefill_seconds_per_token=float(content.get("prefill_us_per_token", default)) / 1e6,
        )
        found.table(1)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{path}: not a step-cost table of `rhyme calibrate`: {reason}") from None
    return found
