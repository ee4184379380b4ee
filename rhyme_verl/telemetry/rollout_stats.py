"""Statistics of one replica between two weight updates, measured in the server; optionally written as JSON lines."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from rhyme_verl.telemetry.files import JsonLines

POSITIONS = (0, *(64 << i for i in range(15)))  # lower bounds of the ranges of an answer by which drafts are counted


def is_state(name: str) -> bool:
    """Return whether a value is a current state, such as a size, and not a count."""
    return name.startswith(("history_", "drafting_off"))


class RolloutStats:
    """Collects a replica's statistics; `flush` returns and resets them. For one event loop, without locks.

    Args:
        folder: folder of the JSON-lines files, one per replica; None: no file is written.
    """

    def __init__(self, folder: str | None, replica_rank: int) -> None:
        path = None if folder is None else Path(folder) / f"replica-{replica_rank}.jsonl"
        self._file = JsonLines(path, "rollout statistics")
        self.num_running = 0
        self._busy_since = 0.0
        self._counts = {"busy_seconds": 0.0, "answers": 0, "tokens": 0}
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
                self._counts["busy_seconds"] += time.perf_counter() - self._busy_since

    def add_tokens(self, num_tokens: int, *, is_new_answer: bool = True) -> None:
        """Count the tokens of a request, and the answer that begins with them."""
        self._counts["answers"] += is_new_answer
        self._counts["tokens"] += num_tokens

    def flush(self, step: int | None, totals: Mapping[str, float]) -> dict[str, float]:
        """Return the counts since the last flush, and write them as a line with `step`; nothing without new tokens.

        They are `busy_seconds` (time with at least one request running), `answers` that have begun, `tokens` and
        the change of every engine counter; states (`is_state`) are passed on unchanged.

        Args:
            step: version of the weights that generated the answers.
            totals: the engine's running totals.
        """
        if not self._counts["tokens"]:
            return {}
        counts, self._counts = self._counts, dict.fromkeys(self._counts, 0)
        if self.num_running:
            now = time.perf_counter()
            counts["busy_seconds"] += now - self._busy_since
            self._busy_since = now
        counts["busy_seconds"] = round(counts["busy_seconds"], 4)
        for name, value in totals.items():
            counts[name] = value if is_state(name) else value - self._totals.get(name, 0)
        self._totals = dict(totals)
        self._file.append([{"step": step, **counts}])
        return counts
