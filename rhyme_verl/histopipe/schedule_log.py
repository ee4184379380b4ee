"""Writes the schedule of a run to `pipe.jsonl`, one JSON line per finished answer."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from rhyme_verl.histopipe.records import Schedule
from rhyme_verl.telemetry.files import JsonLines

FILE = "pipe.jsonl"


class ScheduleLog:
    """Collects finished answers until `flush` writes them.

    Args:
        folder: folder of `pipe.jsonl`; None: nothing is written.
        clock_offset: seconds that convert the scheduler's clock to Unix time.
    """

    def __init__(self, folder: str | None, clock_offset: float) -> None:
        self._file = JsonLines(None if folder is None else Path(folder) / FILE, "HistoPipe's schedules")
        self._offset = clock_offset
        self._lines: list[dict[str, Any]] = []

    def add(self, schedule: Schedule) -> None:
        if self._file.path is None:
            return
        times = {"start": round(schedule.start + self._offset, 4), "end": round(schedule.end + self._offset, 4)}
        self._lines.append({**dataclasses.asdict(schedule), **times, "predicted": round(schedule.predicted, 1)})

    def flush(self) -> None:
        self._file.append(self._lines)
        self._lines = []
