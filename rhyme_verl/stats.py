"""What one replica's rollout did between two weight updates, timed in the server, one JSON line each."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager


class RolloutStats:
    """Collects a replica's rollout; `flush` writes a line and starts anew. One event loop, no locking.

    A line holds `step` (version of the weights that generated), `busy_seconds` (time with at least one request
    running), `answers`, `tokens`, and the change of every engine counter since the line before; counters whose names
    start with `history_` are sizes and are written as they are.
    """

    def __init__(self, folder: str | None, replica_rank: int) -> None:
        self.path = None if folder is None else os.path.join(folder, f"replica-{replica_rank}.jsonl")
        if self.path is not None:
            os.makedirs(os.path.dirname(self.path), exist_ok=True)
        self._running = 0
        self._busy_since = 0.0
        self._busy_seconds = 0.0
        self._answers = 0
        self._tokens = 0
        self._totals: dict[str, int] = {}

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count the enclosed request as running."""
        if self._running == 0:
            self._busy_since = time.perf_counter()
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1
            if self._running == 0:
                self._busy_seconds += time.perf_counter() - self._busy_since

    def add_answer(self, num_tokens: int) -> None:
        self._answers += 1
        self._tokens += num_tokens

    def flush(self, step: int | None, totals: dict[str, int]) -> None:
        """Write the line of weights version `step`, given the engine's running totals; nothing if nothing ran."""
        changes = {
            name: value if name.startswith("history_") else value - self._totals.get(name, 0)
            for name, value in totals.items()
        }
        self._totals = totals
        if self.path is not None and self._answers:
            line = {
                "step": step,
                "busy_seconds": round(self._busy_seconds, 4),
                "answers": self._answers,
                "tokens": self._tokens,
                **changes,
            }
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        self._busy_seconds, self._answers, self._tokens = 0.0, 0, 0
