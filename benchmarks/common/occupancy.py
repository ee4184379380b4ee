"""Computes how full replicas were from the times of their requests; all times are in seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Interval = tuple[float, float]


@dataclass(frozen=True)
class Occupancy:
    """Replica-seconds within the given windows.

    Attributes:
        total: windows times replicas.
        empty: time with no running sequence.
        bubble: mean share of free lanes, in [0, 1].
    """

    total: float
    empty: float
    bubble: float

    @property
    def empty_share(self) -> float:
        return self.empty / self.total if self.total else 0.0


def occupancy(requests: Sequence[Sequence[Interval]], windows: Sequence[Interval], num_lanes: int) -> Occupancy:
    """Measure how full replicas were.

    Args:
        requests: per replica, the interval from arrival to end of each request; more than `num_lanes` at a time queue.
        windows: disjoint intervals in which all replicas may generate.
        num_lanes: sequences that a replica runs concurrently.
    """
    total = empty = missing = 0.0
    for replica in requests:
        for start, end, count in _counts(replica, windows):
            seconds = end - start
            total += seconds
            running = min(count, num_lanes)
            empty += seconds * (running == 0)
            missing += seconds * (num_lanes - running) / num_lanes
    return Occupancy(total, empty, missing / total if total else 0.0)


def _counts(requests: Sequence[Interval], windows: Sequence[Interval]) -> list[tuple[float, float, int]]:
    """Cut the windows into pieces (start, end, number of requests)."""
    changes: list[tuple[float, int, int]] = []  # (time, change of requests, change of windows)
    for start, end in requests:
        changes += [(start, 1, 0), (end, -1, 0)]
    for start, end in windows:
        changes += [(start, 0, 1), (end, 0, -1)]
    changes.sort()
    pieces = []
    present = inside = 0
    before = changes[0][0] if changes else 0.0
    for time, request, window in changes:
        if inside and time > before:
            pieces.append((before, time, present))
        present, inside, before = present + request, inside + window, time
    return pieces


def open_intervals(gates: Sequence[Sequence[tuple[float, bool]]], start: float, end: float) -> list[Interval]:
    """Return the intervals within [start, end] in which all replicas were open. Replicas are open at first.

    Args:
        gates: per replica, the times at which it was opened (true) or closed (false), in order.
    """
    changes = sorted((time, replica, is_open) for replica, events in enumerate(gates) for time, is_open in events)
    closed: set[int] = set()
    result = []
    since: float | None = start
    for time, replica, is_open in changes:
        if is_open:
            closed.discard(replica)
        else:
            closed.add(replica)
        if closed and since is not None:
            result.append((since, time))
            since = None
        elif not closed and since is None:
            since = time
    if since is not None:
        result.append((since, end))
    return clip(result, start, end)


def clip(intervals: Sequence[Interval], start: float, end: float) -> list[Interval]:
    """Return the parts of the intervals within [start, end]."""
    return [(max(a, start), min(b, end)) for a, b in intervals if min(b, end) > max(a, start)]
