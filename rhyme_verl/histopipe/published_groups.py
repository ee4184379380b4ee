"""Counts the finished groups that verl's trainer has not taken, in verl's own table.

The table lags: a group that a worker was told to publish appears there a moment later. Knows nothing of Ray.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Protocol

logger = logging.getLogger(__name__)

VISIBLE_SECONDS = 5.0  # within which the table shows what a worker was told to publish


class GroupTable(Protocol):
    """verl's table of groups, as far as the router uses it."""

    def count_available(self) -> int:
        """Return how many training groups are finished and not taken by the trainer."""

    def mark_failed(self, uids: Sequence[str]) -> None:
        """Tell the trainer that these groups will never finish."""


class PublishedGroups:
    """The published training groups. All methods are called from one event loop; counting blocks a thread instead."""

    def __init__(self, table: GroupTable | None = None) -> None:
        self._table = table
        self._invisible: set[str] = set()
        self._all_visible = asyncio.Event()
        self._num_published = 0
        self._has_failed = False

    def publish(self, uid: str) -> None:
        """A worker is told to publish a group."""
        self._invisible.add(uid)
        self._num_published += 1

    def show(self, uid: str) -> None:
        """verl's table has a group."""
        self._invisible.discard(uid)
        if not self._invisible:
            self._all_visible.set()

    async def count_available(self) -> int:
        """Count once the table shows all that has been published, and again if more is published meanwhile."""
        while self._table is not None:
            if self._invisible:
                await self._wait_until_visible()
            published = self._num_published
            available = await asyncio.to_thread(self._table.count_available)
            if published == self._num_published:
                return available
        return 0

    async def mark_failed(self, uids: Sequence[str]) -> None:
        """Tell the trainer that these groups will never finish."""
        if uids and self._table is not None:
            await asyncio.to_thread(self._table.mark_failed, uids)

    async def _wait_until_visible(self) -> None:
        self._all_visible.clear()
        try:
            await asyncio.wait_for(self._all_visible.wait(), VISIBLE_SECONDS)
        except asyncio.TimeoutError:
            if not self._has_failed:
                num = len(self._invisible)
                logger.error("HistoPipe: %d published groups are missing in verl's table, and are not waited for", num)
            self._has_failed = True
            self._invisible.clear()
