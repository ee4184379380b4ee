"""The host time for which an accelerator waits between two engine steps, by rows and drafted tokens.

It passes between the arrival of a step's sampled tokens and the launch of the next step. The replay adds it to its
modelled steps, without the drafter's part, which it measures itself; whole jobs add it with that part (`engine_gap`).
Stock vLLM has none, because it schedules asynchronously. `make bench-host` measures the tables.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.common.result_files import RESULTS

HOST_RESULT = RESULTS / "host.json"
NOTHING, FOUND = "nothing drafted", "all that it finds"  # a result's names for such steps; `suffix` has no limit


@dataclass(frozen=True, kw_only=True)
class HostGap:
    """A table of medians.

    Attributes:
        rows: numbers of running requests, ascending; at least two.
        drafted: for each of `rows`, the numbers of drafted tokens that were measured, ascending. The first is 0.
        ms: for each of them, the milliseconds before such a step.
        is_asynchronous: whether the host schedules while the accelerator computes. A drafter is then waited for only if
            it drafts, and a step with few drafts is taken to cost as much as the one with the fewest that was measured.
    """

    rows: tuple[int, ...]
    drafted: tuple[tuple[float, ...], ...]
    ms: tuple[tuple[float, ...], ...]
    is_asynchronous: bool = False

    def seconds(self, rows: int, num_tokens: int) -> float:
        """Return the seconds before a step of `num_tokens` tokens: one per row, and drafts.

        Interpolated by drafted tokens and by rows; beyond the table, as between its last points.
        """
        right = min(max(bisect_left(self.rows, rows), 1), len(self.rows) - 1)
        (start, start_ms), (end, end_ms) = ((self.rows[i], self._ms(i, num_tokens - rows)) for i in (right - 1, right))
        return 1e-3 * max(0.0, start_ms + (end_ms - start_ms) * (rows - start) / (end - start))

    def _ms(self, index: int, num_drafted: int) -> float:
        drafted, ms = self.drafted[index], self.ms[index]
        if self.is_asynchronous and 0 < num_drafted < drafted[1]:
            return ms[1]
        right = min(max(bisect_left(drafted, num_drafted), 1), len(drafted) - 1)
        left = right - 1
        return ms[left] + (ms[right] - ms[left]) * (num_drafted - drafted[left]) / (drafted[right] - drafted[left])


class HostGaps(NamedTuple):
    """The tables of engines that schedule synchronously, and of rhyme; and where they come from."""

    synchronous: HostGap
    rhyme: HostGap
    source: str


def host_gaps(result: Path = HOST_RESULT) -> HostGaps:
    """Return the tables in the result of `make bench-host`, without the drafters' time.

    Raises:
        ValueError: the file is not such a result.
        OSError: it is missing.
    """
    measured, source = _measured(result)
    synchronous = _table(result, measured, "rhyme-sync", "rhyme-sync", _without_drafter)
    return HostGaps(synchronous, _table(result, measured, "rhyme", "rhyme", _without_drafter), source)


def engine_gap(method: str, result: Path = HOST_RESULT) -> HostGap:
    """Return the table of an engine with its drafter's time. `method`: rhyme, rhyme-sync or suffix.

    That of `suffix` without drafts is not measured: it is that of synchronous rhyme without the drafter's time. In a
    result without `suffix`, it is all of synchronous rhyme's, whose drafter takes less time.

    Raises:
        ValueError: the file is no such result.
        OSError: it is missing.
    """
    measured, _ = _measured(result)
    if method == "suffix" and not any(method in by_method for by_method in measured.values()):
        method = "rhyme-sync"
    if method == "suffix":
        return _table(result, measured, "rhyme-sync", method, _whole, undrafted_ms=_without_drafter)
    return _table(result, measured, method, method, _whole)


def _measured(result: Path) -> tuple[dict[str, Any], str]:
    """Return the milliseconds in a result of bench-host, and its name and date."""
    content = json.loads(result.read_text(encoding="utf-8"))
    return content.get("milliseconds", {}), f"{result.name}, {content['date']}"


def _whole(step: dict[str, float]) -> float:
    return step["arrival to launch"]


def _without_drafter(step: dict[str, float]) -> float:
    """Return the time before a step without the drafter's, of which a part may be hidden."""
    return max(0.0, step["arrival to launch"] - step["drafter"])


def _table(
    result: Path,
    measured: dict[str, Any],
    undrafted_method: str,
    drafted_method: str,
    drafted_ms: Callable[[dict[str, float]], float],
    undrafted_ms: Callable[[dict[str, float]], float] | None = None,
) -> HostGap:
    points: dict[int, list[tuple[float, float]]] = {}
    for drafting, by_method in measured.items():
        method, ms = drafted_method, drafted_ms
        if drafting == NOTHING:
            method, ms = undrafted_method, undrafted_ms or drafted_ms
        for row, step in by_method.get(method, {}).items():
            drafted = 0.0 if drafting == NOTHING else step["tokens"] - int(row)
            points.setdefault(int(row), []).append((drafted, ms(step)))
    rows = sorted(points)
    curves = [sorted(points[row]) for row in rows]
    if len(rows) < 2 or any(len(curve) < 2 or curve[0][0] != 0.0 for curve in curves):
        raise ValueError(f"{result}: run make bench-host again: the result lacks steps of {drafted_method}")
    return HostGap(
        rows=tuple(rows),
        drafted=tuple(tuple(drafted for drafted, _ in curve) for curve in curves),
        ms=tuple(tuple(one for _, one in curve) for curve in curves),
        is_asynchronous=drafted_method == "rhyme",
    )
