"""Collects the news of each agent-loop worker: lanes of its answers, and groups that the trainer may see.

A group's news waits here until a worker has received the group. Does not depend on Ray.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from rhyme_verl.histopipe.messages import Group, LaneNews, News

NEWS_SECONDS = 0.01  # time for which news is collected before it is sent to a worker


class _Worker:
    """A worker's latest and pending news, and the replicas whose handles it has."""

    def __init__(self) -> None:
        self.known_replicas: set[str] = set()
        self._sent = News()
        self._news = News(number=1)
        self._is_new = asyncio.Event()

    def change(self) -> News:
        """Wake the listener, and return the pending news for an addition."""
        self._is_new.set()
        return self._news

    async def listen(self, received: int) -> News:
        if self._sent.number == received:
            await self._is_new.wait()
            await asyncio.sleep(NEWS_SECONDS)
        if self._sent.number == received:  # an earlier call, whose result is lost, may have waited for the same news
            self._is_new.clear()
            self._sent, self._news = self._news, News(number=self._news.number + 1)
        return self._sent


@dataclass(slots=True, eq=False)
class _SubmittedGroup:
    """A submitted group, the worker that follows it, and the lanes granted before it did."""

    is_validation: bool
    worker: str | None = None
    missed: list[LaneNews] = field(default_factory=list)


class NewsBoard:
    """Collects the news of all workers. All methods are called from one event loop."""

    def __init__(self) -> None:
        self._workers: dict[str, _Worker] = {}
        self._groups: dict[str, _SubmittedGroup] = {}

    def add(self, groups: Iterable[Group], is_validation: bool) -> list[Group]:
        """Register submitted groups, which no worker follows yet; return the new ones."""
        new = [group for group in groups if group.uid not in self._groups]
        self._groups.update((group.uid, _SubmittedGroup(is_validation)) for group in new)
        return new

    def follow(self, worker: str, uids: Sequence[str]) -> None:
        """Record that a worker has received groups, and send it what it missed."""
        channel = self._workers.setdefault(worker, _Worker())
        for uid in uids:
            found = self._groups.get(uid)
            if found is None:  # not submitted to the router, so it is not held back
                channel.change().published.append(uid)
                continue
            found.worker = worker
            if found.missed:
                channel.change().lanes.extend(found.missed)
                found.missed = []

    def tell(self, lane: LaneNews) -> None:
        """Add an answer's lane to the news of its group's worker."""
        found = self._groups.get(lane[0][0])
        if found is not None:
            lanes = found.missed if found.worker is None else self._workers[found.worker].change().lanes
            lanes.append(lane)

    def publish(self, uid: str) -> bool:
        """Notify a group's worker that the trainer may see it; return whether it is a training group with a worker."""
        found = self._groups.pop(uid, None)
        if found is None or found.worker is None:
            return False
        self._workers[found.worker].change().published.append(uid)
        return not found.is_validation

    def remove_groups_of(self, worker: str) -> list[str]:
        """Forget the groups of a dead worker, and return their uids."""
        lost = [uid for uid, found in self._groups.items() if found.worker == worker]
        for uid in lost:
            del self._groups[uid]
        return lost

    async def listen(self, worker: str, received: int) -> tuple[News, set[str]]:
        """Wait for a worker's news, and return it with the replicas in it whose handles the worker lacks.

        It has received news up to the number `received`, 0 for none; the next is sent again if it was sent before.
        """
        found = self._workers.setdefault(worker, _Worker())
        news = await found.listen(received)
        missing = {name for _, name in news.lanes if name is not None} - found.known_replicas
        found.known_replicas |= missing
        return news, missing

    def wake_all(self) -> None:
        """End all waiting for news."""
        for worker in self._workers.values():
            worker.change()

    def forget_replicas(self, names: Iterable[str]) -> None:
        """Record that replicas have new handles, which no worker has."""
        for worker in self._workers.values():
            worker.known_replicas.difference_update(names)
