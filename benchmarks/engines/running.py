"""How many sequences ran in an engine's run: fewer than it was allowed, because answers run out at its end."""

from __future__ import annotations

import statistics
from collections.abc import Sequence


def mean_running(runs: Sequence[dict[str, float]]) -> float:
    """Return the mean number of running sequences over an engine's steps; the median over its runs."""
    return statistics.median(run["verifies"] / run["steps"] for run in runs)
