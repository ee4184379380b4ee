"""What one step of an engine costs as a function of its running sequences: the table that plans are made with."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

PREFILL_SECONDS_PER_TOKEN = 5e-5  # of a model of some billions of parameters, while nothing is measured


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
