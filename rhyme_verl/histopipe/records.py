"""Records of a schedule: one line per answer for the log, one report per unit for the metrics."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Timing:
    """Where and how long an answer ran that took one request: one observation of the step cost.

    Attributes:
        start, seconds: start and duration of the request.
        mean_running: mean number of lanes held on the replica meanwhile, the answer's own included.
        is_queued: whether the engine could not generate it at once, so that `seconds` includes a wait.
    """

    replica: str
    start: float
    seconds: float
    mean_running: float
    is_queued: bool


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """When and where an answer ran, for the log of the schedule.

    Attributes:
        replica: name of the replica that generated the last token.
        start, end: seconds on the scheduler's clock.
        tokens, predicted: true and predicted length.
    """

    replica: str
    uid: str
    sample: int
    step: int
    start: float
    end: float
    tokens: int
    predicted: float
    lanes: int

    def line(self, clock_offset: float) -> dict[str, Any]:
        """Return the log's line; `clock_offset`: seconds from the scheduler's clock to Unix time."""
        times = {"start": round(self.start + clock_offset, 4), "end": round(self.end + clock_offset, 4)}
        return {**vars(self), **times, "predicted": round(self.predicted, 1)}


@dataclass(frozen=True, kw_only=True)
class UnitReport:
    """Measurements of a unit, from its beginning to its release, by the names of their metrics.

    Attributes:
        step: training step of the release.
        answers, tokens: number of answers that ended, and their tokens.
        makespan_s: duration of the unit.
        bubble: share of lanes that were free, over all replicas.
        idle: share of replica-seconds without any answer.
        carried_groups: number of groups that continue in the next unit.
        predictor_rank_correlation: of predicted and true lengths; NaN if unknown.
    """

    step: int
    answers: int
    tokens: int
    makespan_s: float
    bubble: float
    idle: float
    carried_groups: int
    predictor_rank_correlation: float


def unit_metrics(reports: Sequence[UnitReport], versions: Sequence[tuple[int, int]]) -> list[dict[str, float]]:
    """Return one mapping of metrics per unit, oldest first; unknown values are left out.

    Args:
        versions: first and last policy version of each finished answer; reported with the last unit.
    """
    lines = [asdict(report) for report in reports]
    if lines and versions:
        lines[-1]["versions_spanned"] = sum(last > first for first, last in versions) / len(versions)
    return [{name: value for name, value in line.items() if not math.isnan(value)} for line in lines]
