"""Records how long calls of Ray actors take, as their callers see it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Collection, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

LAG_SECONDS = 0.01
T = TypeVar("T")

Recorded = dict[str, np.ndarray]  # by kind of call: float64 [calls, 2], start (`time.time()`) and duration in seconds


class Calls:
    """The durations of one process's calls, and how late its event loop was (`lag`)."""

    def __init__(self) -> None:
        self._calls: dict[str, list[tuple[float, float]]] = {}

    def note(self, kind: str, start: float, seconds: float) -> None:
        self._calls.setdefault(kind, []).append((start, seconds))

    async def timed(self, kind: str, call: Awaitable[T]) -> T:
        start, began = time.time(), time.perf_counter()
        result = await call
        self.note(kind, start, time.perf_counter() - began)
        return result

    async def watch_lag(self) -> None:
        """Record for ever how much later than asked the event loop wakes this task."""
        while True:
            start, began = time.time(), time.perf_counter()
            await asyncio.sleep(LAG_SECONDS)
            self.note("lag", start, time.perf_counter() - began - LAG_SECONDS)

    def take(self) -> Recorded:
        """Return what has been recorded since the last call."""
        calls, self._calls = self._calls, {}
        return {kind: np.array(found) for kind, found in calls.items()}


class TimedActor:
    """An actor's handle whose calls of some methods are recorded under the methods' names."""

    def __init__(self, actor: Any, calls: Calls, methods: Collection[str]) -> None:
        self._actor = actor
        self._calls = calls
        self._methods = methods

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._actor, name)
        return _TimedMethod(method, self._calls, name) if name in self._methods else method


class _TimedMethod:
    def __init__(self, method: Any, calls: Calls, kind: str) -> None:
        self._method = method
        self._calls = calls
        self._kind = kind

    async def remote(self, *arguments: Any, **named: Any) -> Any:
        return await self._calls.timed(self._kind, self._method.remote(*arguments, **named))


def merged(recorded: Sequence[Recorded]) -> Recorded:
    kinds = sorted({kind for one in recorded for kind in one})
    return {kind: np.concatenate([one[kind] for one in recorded if kind in one]) for kind in kinds}


def by_phase(recorded: Recorded, phases: Mapping[str, tuple[float, float]]) -> list[dict[str, Any]]:
    """Return a row per phase (start and end) and kind of call: the number of calls that began then, and their ms."""
    rows = []
    for phase, (start, end) in phases.items():
        for kind, calls in recorded.items():
            seconds = calls[(calls[:, 0] >= start) & (calls[:, 0] < end), 1]
            if len(seconds):
                p50, p99, longest = 1e3 * np.quantile(seconds, (0.5, 0.99, 1.0))
                row = {"phase": phase, "call": kind, "calls": len(seconds), "per_s": len(seconds) / (end - start)}
                rows.append(row | {"p50_ms": float(p50), "p99_ms": float(p99), "max_ms": float(longest)})
    return rows
