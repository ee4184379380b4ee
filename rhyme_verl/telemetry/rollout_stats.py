"""What one replica's rollout did between two weight updates, timed in the server; one JSON line each if asked for."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

logger = logging.getLogger(__name__)

STATES = ("history_", "drafting_off")  # beginnings of names of what is so now, and not counted


def is_state(name: str) -> bool:
    """Whether a value says how things are, such as a size, rather than how much was done."""
    return name.startswith(STATES)


class RolloutStats:
    """Collects a replica's rollout; `flush` sums it up and starts anew. One event loop, no locking.

    Args:
        folder: where the lines go, one file a replica; None: they are not written.
    """

    def __init__(self, folder: str | None, replica_rank: int) -> None:
        self.path = None if folder is None else os.path.join(folder, f"replica-{replica_rank}.jsonl")
        if self.path is not None:
            os.makedirs(os.path.dirname(self.path), exist_ok=True)
        self.num_running = 0
        self._busy_since = 0.0
        self._busy_seconds = 0.0
        self._answers = 0
        self._tokens = 0
        self._totals: dict[str, float] = {}

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count the enclosed request as running."""
        if self.num_running == 0:
            self._busy_since = time.perf_counter()
        self.num_running += 1
        try:
            yield
        finally:
            self.num_running -= 1
            if self.num_running == 0:
                self._busy_seconds += time.perf_counter() - self._busy_since

    def add_answer(self, num_tokens: int) -> None:
        self._answers += 1
        self._tokens += num_tokens

    def flush(self, step: int | None, totals: Mapping[str, float]) -> dict[str, float]:
        """Return what was done since the last flush (empty: nothing ran), and write it as a line with `step`.

        It holds `busy_seconds` (time with at least one request running), `answers`, `tokens`, and the change of every
        engine counter; states (`is_state`) are given as they are.

        Args:
            step: version of the weights that generated.
            totals: the engine's running totals.
        """
        changes = {
            name: value if is_state(name) else value - self._totals.get(name, 0) for name, value in totals.items()
        }
        self._totals = dict(totals)
        if self.num_running:
            now = time.perf_counter()
            self._busy_seconds += now - self._busy_since
            self._busy_since = now
        counts: dict[str, float] = {}
        if self._answers:
            counts = {
                "busy_seconds": round(self._busy_seconds, 4),
                "answers": self._answers,
                "tokens": self._tokens,
                **changes,
            }
            self._write({"step": step, **counts})
        self._busy_seconds, self._answers, self._tokens = 0.0, 0, 0
        return counts

    def _write(self, line: dict[str, Any]) -> None:
        if self.path is None:
            return
        try:
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            self.path = None
            logger.error("rollout statistics cannot be written and end here; rollouts go on: %s", error)
