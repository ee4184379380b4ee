"""A worker's client of the router: answers wait here for their lane, finished groups for their publication.

Reports to the router are collected for `FLUSH_SECONDS`. Does not depend on verl.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ray.exceptions import RayError

from rhyme_verl.histopipe.messages import (
    Finished,
    Follows,
    GroupEnded,
    GroupVisible,
    Report,
    Started,
    Stopped,
)
from rhyme_verl.request_id import AnswerId

logger = logging.getLogger(__name__)

FLUSH_SECONDS = 0.02
LOST_SECONDS = 5.0  # delay before the router's death is logged, because it may exit before the workers when a job ends


@dataclass(frozen=True, slots=True)
class GrantedLane:
    """The replica to which an answer's requests are sent.

    Attributes:
        handle: actor handle of the replica's server.
        predicted_tokens: predicted length of the answer; 0 if unknown.
    """

    replica: str
    handle: Any
    predicted_tokens: float


class WorkerLanes:
    """The lanes and publications of one worker. All methods are called from one event loop.

    Args:
        router: handle of the `HistoPipeRouter` actor.
        worker: name under which the router knows the worker.
    """

    def __init__(self, router: Any, worker: str) -> None:
        self._router = router
        self._worker = worker
        self._handles: dict[str, Any] = {}
        self._lanes: dict[AnswerId, asyncio.Future[tuple[str, float]]] = {}
        self._published: dict[str, asyncio.Event] = {}
        self._reports: list[Report] = []
        self._listener: asyncio.Task[None] | None = None
        self._is_lost = False

    def follow(self, uids: Sequence[str]) -> None:
        """Listen for news of these groups, which have already been submitted to the router."""
        if self._listener is None:
            self._listener = asyncio.get_running_loop().create_task(self._listen())
        self._tell(Follows(list(uids)))

    async def lane(self, answer: AnswerId) -> GrantedLane:
        """Wait until an answer has a lane, and return it."""
        while not self._is_lost:
            lane = self._lane(answer)
            replica, predicted = await asyncio.shield(lane)
            if self._lanes.get(answer) is lane and replica in self._handles:
                return GrantedLane(replica, self._handles[replica], predicted)
            if self._lanes.get(answer) is lane:
                del self._lanes[answer]
        if not self._handles:
            raise RuntimeError("HistoPipe's router died before this worker knew any replica")
        replica = random.choice(list(self._handles))
        return GrantedLane(replica, self._handles[replica], 0.0)

    def start(self, answer: AnswerId) -> None:
        """Report that a request of an answer is sent to the replica of its lane."""
        self._tell(Started(answer))

    def stop(self, answer: AnswerId) -> None:
        """Report that a request of an answer has ended."""
        self._tell(Stopped(answer))

    def finish(self, one: Finished) -> None:
        """Report that an answer has ended, so that its lane goes to another one."""
        self._lanes.pop(one.answer, None)
        self._tell(one)

    def abandon(self, uid: str) -> None:
        """Report that a group has failed before its answers started."""
        self._tell(GroupEnded(uid, True))

    async def wait_until_published(self, uid: str, failed: bool) -> None:
        """Report that all answers of a group have ended, and wait until the trainer may see it."""
        if not self._is_lost:
            event = self._published.setdefault(uid, asyncio.Event())
            self._tell(GroupEnded(uid, failed))
            await event.wait()
        self._published.pop(uid, None)

    def show(self, uid: str) -> None:
        """Report that verl's replay buffer contains a published group."""
        self._tell(GroupVisible(uid))

    # Internals.

    def _lane(self, answer: AnswerId) -> asyncio.Future[tuple[str, float]]:
        found = self._lanes.get(answer)
        if found is None:
            found = self._lanes[answer] = asyncio.get_running_loop().create_future()
        return found

    def _tell(self, report: Report) -> None:
        if not self._reports:
            asyncio.get_running_loop().call_later(FLUSH_SECONDS, self._flush)
        self._reports.append(report)

    def _flush(self) -> None:
        reports, self._reports = self._reports, []
        if not self._is_lost:
            self._router.report.remote(self._worker, reports)

    async def _listen(self) -> None:
        while not self._is_lost:
            try:
                news = await self._router.news.remote(self._worker)
            except RayError as error:
                self._lose(error)
                return
            self._handles.update(news.handles)
            for answer, replica, predicted in news.lanes:
                lane = self._lane(answer)
                if lane.done():
                    lane = self._lanes[answer] = asyncio.get_running_loop().create_future()
                if replica is not None:
                    lane.set_result((replica, predicted))
            for uid in news.published:
                self._published.setdefault(uid, asyncio.Event()).set()

    def _lose(self, error: RayError) -> None:
        """Continue without the router: answers go to random known replicas, and nothing is held back."""
        self._is_lost = True
        loop = asyncio.get_running_loop()
        reason = str(error).partition("\n")[0]
        loop.call_later(
            LOST_SECONDS, logger.error, "HistoPipe's router is dead; answers go to random replicas: %s", reason
        )
        for lane in self._lanes.values():
            if not lane.done():
                lane.set_result(("", 0.0))
        for event in self._published.values():
            event.set()
