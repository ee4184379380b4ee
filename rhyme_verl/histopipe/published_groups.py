"""Counts the finished groups that verl's trainer has not taken, in verl's own table.

The table lags: a group appears there shortly after a worker is notified to publish it. Does not depend on Ray.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Protocol

from rhyme_verl.telemetry.logs import LogOnce

logger = logging.getLogger(__name__)

VISIBLE_SECONDS = 5.0  # a published group that takes longer to appear in the table is no longer waited for


class GroupTable(Protocol):
    """The part of verl's table of groups that the router uses."""

    def count_available(self) -> int:
        """Return how many finished training groups the trainer has not taken."""

    def mark_failed(self, uids: Sequence[str]) -> None:
        """Mark groups that will never finish as failed, for the trainer."""


class PublishedGroups:
    """Tracks the published training groups. All methods are called from one event loop; counting runs in a thread."""

    def __init__(self, table: GroupTable | None = None) -> None:
        self._table = table
        self._invisible: set[str] = set()
        self._all_visible = asyncio.Event()
        self._num_published = 0
        self._log_once = LogOnce(logger)

    def publish(self, uid: str) -> None:
        """Record that a worker is notified to publish a group."""
        self._invisible.add(uid)
        self._num_published += 1

    def see(self, uid: str) -> None:
        """Record that a group is in verl's table."""
        self._invisible.discard(uid)
        if not self._invisible:
            self._all_visible.set()

    async def count_available(self) -> int:
        """Count once the table contains all published groups, and again if more are published meanwhile."""
        while self._table is not None:
            if self._invisible:
                await self._wait_until_visible()
            published = self._num_published
            available = await asyncio.to_thread(self._table.count_available)
            if published == self._num_published:
                return available
        return 0

    async def mark_failed(self, uids: Sequence[str]) -> None:
        """Mark groups that will never finish as failed, for the trainer."""
        if uids and self._table is not None:
            await asyncio.to_thread(self._table.mark_failed, uids)

    async def _wait_until_visible(self) -> None:
        self._all_visible.clear()
        try:
            await asyncio.wait_for(self._all_visible.wait(), VISIBLE_SECONDS)
        except asyncio.TimeoutError:
            message = "HistoPipe: no longer waiting for %d published groups missing in verl's table"
            self._log_once(logging.ERROR, message, len(self._invisible))
            self._invisible.clear()
