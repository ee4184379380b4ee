"""The schedule of a run on disk: one JSON line per finished answer, `pipe.jsonl`, for reports and the simulator."""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path

from rhyme_verl.histopipe.records import Schedule

logger = logging.getLogger(__name__)

FILE = "pipe.jsonl"


class ScheduleLog:
    """Collects finished answers; `flush` writes them. A write error is logged once, and recording stops.

    Args:
        folder: where `pipe.jsonl` goes; None: nowhere.
        clock_offset: added to the answers' seconds to get Unix time.
    """

    def __init__(self, folder: str | None, clock_offset: float) -> None:
        self._path = None if folder is None else Path(folder) / FILE
        self._offset = clock_offset
        self._lines: list[str] = []

    def add(self, one: Schedule) -> None:
        if self._path is not None:
            line = dataclasses.asdict(one)
            line["start"] = round(one.start + self._offset, 4)
            line["end"] = round(one.end + self._offset, 4)
            line["predicted"] = round(one.predicted, 1)
            self._lines.append(json.dumps(line))

    def flush(self) -> None:
        if self._path is None or not self._lines:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with open(self._path, "a", encoding="utf-8") as file:
                file.write("\n".join(self._lines) + "\n")
        except OSError as error:
            logger.error("the schedule cannot be written to %s and is not recorded: %s", self._path, error)
            self._path = None
        self._lines = []
