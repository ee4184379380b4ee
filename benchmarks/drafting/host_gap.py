"""The host time for which an accelerator waits between two engine steps, by rows and drafted tokens.

It passes between the arrival of a step's sampled tokens and the launch of the next step. The replay adds it to its
modelled steps, without the drafter's part, which it measures itself; whole jobs add it with that part (`engine_gap`).
Stock vLLM has none, because it schedules asynchronously. `make bench-host` measures the tables; before it has run, that
of an earlier measurement is used in replays for all engines with a drafter.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.common.result_files import RESULTS

HOST_RESULT = RESULTS / "host.json"


@dataclass(frozen=True, kw_only=True)
class HostGap:
    """A table of medians.

    Attributes:
        rows: numbers of running requests, ascending; at least two.
        undrafted_ms: milliseconds before a step without drafts, by `rows`.
        token_us: microseconds that each drafted token adds, by `rows`.
        is_asynchronous: whether the host schedules while the accelerator computes. A drafter is then waited for only if
            it drafts.
    """

    rows: tuple[int, ...]
    undrafted_ms: tuple[float, ...]
    token_us: tuple[float, ...]
    is_asynchronous: bool = False

    def seconds(self, rows: int, num_tokens: int) -> float:
        """Return the seconds before a step of `num_tokens` tokens: one per row, and drafts.

        Both columns are interpolated. Beyond the table, the first grows as between its last points, and the second
        stays as it is.
        """
        last = len(self.rows) - 1
        right = min(max(int(np.searchsorted(self.rows, rows)), 1), last)
        (end, end_ms), (start, start_ms) = ((self.rows[i], self.undrafted_ms[i]) for i in (right, right - 1))
        undrafted_ms = start_ms + (end_ms - start_ms) * (rows - start) / (end - start)
        token_us = float(np.interp(rows, self.rows, self.token_us))
        return 1e-3 * max(0.0, undrafted_ms) + 1e-6 * token_us * (num_tokens - rows)


# vLLM 0.28 in one process with log-probs on two Xeon cores, of a review in 2026-11: 1.5, 2.7 and 5.4 ms with nothing
# drafted; with drafts of up to 24 tokens in steps of 512, 2.25, 3.81 and 6.41 ms for schedule, output processing,
# bookkeeping, input preparation and `update_draft_token_ids`.
REVIEWED = HostGap(rows=(64, 128, 256), undrafted_ms=(1.5, 2.7, 5.4), token_us=(1.67, 2.89, 3.95))


class HostGaps(NamedTuple):
    """The tables of engines that schedule synchronously, and of rhyme; and where they come from."""

    synchronous: HostGap
    rhyme: HostGap
    source: str


def host_gaps(result: Path = HOST_RESULT) -> HostGaps:
    """Return the tables in the result of `make bench-host`, or, without one, the earlier measurement for all engines.

    Raises:
        ValueError: the file is not such a result.
    """
    if not result.is_file():
        return HostGaps(REVIEWED, REVIEWED, "synchronous scheduling, measured in 2026-11")
    measured, source = _measured(result)
    try:
        synchronous, rhyme = (
            _table(measured, method, method, _without_drafter, _without_drafter, method == "rhyme")
            for method in ("rhyme-sync", "rhyme")
        )
    except KeyError as error:
        raise ValueError(f"{result}: no result of bench-host: it lacks {error}") from None
    return HostGaps(synchronous, rhyme, source)


def engine_gap(method: str, result: Path = HOST_RESULT) -> HostGap:
    """Return the table of an engine with its drafter's time. `method`: rhyme, rhyme-sync or suffix.

    That of `suffix` without drafts is not measured: it is that of synchronous rhyme without the drafter's time. In a
    result without `suffix`, it is all of synchronous rhyme's, whose drafter takes less time.

    Raises:
        ValueError: the file is no such result.
        OSError: it is missing.
    """
    measured, _ = _measured(result)
    try:
        if method == "suffix":
            if method in measured["512-token steps"]:
                return _table(measured, "rhyme-sync", method, _without_drafter, _whole)
            method = "rhyme-sync"
        return _table(measured, method, method, _whole, _whole, method == "rhyme")
    except KeyError as error:
        raise ValueError(f"{result}: run make bench-host again: the result lacks {error}") from None


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
    measured: dict[str, Any],
    undrafted_method: str,
    drafted_method: str,
    undrafted_ms: Callable[[dict[str, float]], float],
    drafted_ms: Callable[[dict[str, float]], float],
    is_asynchronous: bool = False,
) -> HostGap:
    undrafted, drafted = measured["nothing drafted"][undrafted_method], measured["512-token steps"][drafted_method]
    rows = sorted(map(int, drafted))
    bases = [undrafted_ms(undrafted[str(row)]) for row in rows]

    def token_us(row: int, base_ms: float) -> float:
        step = drafted[str(row)]
        return 1e3 * max(0.0, drafted_ms(step) - base_ms) / (step["tokens"] - row)

    return HostGap(
        rows=tuple(rows),
        undrafted_ms=tuple(bases),
        token_us=tuple(map(token_us, rows, bases)),
        is_asynchronous=is_asynchronous,
    )
