"""What a schedule leaves behind: a line per answer for the log, a report per unit for the metrics."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rhyme_verl.histopipe.lengths import PredictionError


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """When and where an answer ran, for the schedule's log.

    Attributes:
        replica: that gave its last token.
        start, end: seconds, on the clock of the calls.
        predicted: tokens.
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


@dataclass(frozen=True, kw_only=True)
class UnitReport:
    """What a unit did, from its beginning to its release.

    Attributes:
        step: of the trainer.
        answers, tokens: of the answers that ended.
        seconds: it took.
        bubble: share of lanes that were free, over all replicas.
        idle: share of replica-seconds without any answer.
        carried: groups that go on in the next unit.
        error: of the length predictions.
    """

    step: int
    answers: int
    tokens: int
    seconds: float
    bubble: float
    idle: float
    carried: int
    error: PredictionError


def unit_metrics(reports: Sequence[UnitReport], versions: Sequence[tuple[int, int]]) -> list[dict[str, float]]:
    """Return one mapping of metrics per unit, oldest first; values that are not known are left out.

    Args:
        versions: first and last policy version of each answer that has finished; counted in the last unit.
    """
    lines = [
        {
            "step": report.step,
            "answers": report.answers,
            "tokens": report.tokens,
            "makespan_s": report.seconds,
            "bubble": report.bubble,
            "idle": report.idle,
            "carried_groups": report.carried,
            "predictor_rank_correlation": report.error.rank_correlation,
            "predictor_below_p50": report.error.below_p50,
            "predictor_below_p90": report.error.below_p90,
        }
        for report in reports
    ]
    if lines and versions:
        lines[-1]["versions_spanned"] = sum(last > first for first, last in versions) / len(versions)
    return [{name: value for name, value in line.items() if not math.isnan(value)} for line in lines]
