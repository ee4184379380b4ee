"""A worker's client of the router: answers wait here for their lane, finished groups for their publication.

Reports to the router are collected for `FLUSH_SECONDS`. Ray repeats calls after a network failure, or once it has
restarted the router. Does not depend on verl.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ray.exceptions import RayError

from rhyme_verl.histopipe.messages import Begun, Finished, Follows, GroupEnded, Report, Started, Stopped
from rhyme_verl.request_id import AnswerId

logger = logging.getLogger(__name__)

FLUSH_SECONDS = 0.02
LOST_SECONDS = 5.0  # delay before Ray's error is logged, because the router may exit before workers when a job ends


@dataclass(frozen=True, slots=True)
class GrantedLane:
    """The replica to which an answer's requests are sent, with the actor handle of its server."""

    answer: AnswerId
    replica: str
    handle: Any


_AwaitedLane = asyncio.Future[str]
_AwaitedLanes = dict[int, _AwaitedLane | None]


@dataclass(slots=True, eq=False)
class _FollowedGroup:
    lanes: _AwaitedLanes = field(default_factory=dict)  # by sample; None once it has been generated or has failed
    left: int = 0  # number of answers with which verl's worker is not done
    has_begun: bool = False
    failed: bool = False
    published: asyncio.Event = field(default_factory=asyncio.Event)


class WorkerLanes:
    """The lanes and publications of one worker, which the router (an actor's handle) knows by its name.

    All methods are called from the event loop that follows groups, except for those of requests (`lane`, `start` and
    `stop`): an agent loop may send requests from a thread with a loop of its own.
    """

    def __init__(self, router: Any, worker: str) -> None:
        self._router = router
        self._worker = worker
        self._handles: dict[str, Any] = {}
        self._groups: dict[str, _FollowedGroup] = {}
        self._reports: list[Report] = []
        self._num_reports = 0  # calls of the router's `report`
        self._sender: asyncio.Task[None] | None = None
        self._listener: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_lost = False

    def follow(self, uids: Sequence[str]) -> None:
        """Listen for news of these groups, which have already been submitted to the router."""
        if self._listener is None:
            self._loop = asyncio.get_running_loop()
            self._listener = self._loop.create_task(self._listen())
        self._groups.update((uid, _FollowedGroup()) for uid in uids)
        self._tell(Follows(list(uids)))

    async def open(self, uid: str, num_samples: int) -> None:
        """Expect this number of answers of a group; if it is 0, return when the trainer may see the group."""
        self._groups[uid].left = num_samples
        if not num_samples:
            await self._wait_until_published(uid)

    async def lane(self, answer: AnswerId) -> GrantedLane | None:
        """Wait until an answer has a lane, and return it; None: verl's client finds a replica.

        That is so if HistoPipe has ended, and for requests after the end of their answer.
        """
        if self._loop not in (None, asyncio.get_running_loop()):
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self.lane(answer), self._loop))
        uid, sample = answer
        lanes: _AwaitedLanes = self._groups[uid].lanes if uid in self._groups else {sample: None}
        while not self._is_lost and lanes.get(sample, True) is not None:
            lane = lanes.get(sample) or self._expect(lanes, sample)
            replica = await asyncio.shield(lane)
            if lanes.get(sample) is not lane:
                continue
            if replica in self._handles:
                return GrantedLane(answer, replica, self._handles[replica])
            del lanes[sample]
        return None

    def begin(self, uid: str) -> None:
        """Report that an answer of a group begins; its age counts from here, whoever sends its requests."""
        group = self._groups[uid]
        if not group.has_begun:
            group.has_begun = True
            self._tell(Begun(uid))

    def start(self, answer: AnswerId) -> None:
        """Report that a request of an answer is sent to the replica of its lane."""
        self._tell(Started(answer))

    def stop(self, answer: AnswerId) -> None:
        """Report that a request of an answer has ended."""
        self._tell(Stopped(answer))

    def finish(self, one: Finished) -> None:
        """Report that an answer has ended, so that its lane goes to another one."""
        uid, sample = one.answer
        if uid in self._groups:
            self._groups[uid].lanes[sample] = None
        self._tell(one)

    async def end(self, answer: AnswerId, failed: bool) -> None:
        """Report that verl's worker is done with an answer, and wait until the trainer may see its group."""
        uid, sample = answer
        group = self._groups[uid]
        if group.lanes.get(sample, True) is not None:
            self.finish(Finished(answer, tokens=None))
        group.left -= 1
        group.failed |= failed
        await self._wait_until_published(uid)

    def close(self, uid: str) -> None:
        """Forget a group with which verl's worker is done, perhaps before its answers began."""
        if self._groups.pop(uid).left:
            self._tell(GroupEnded(uid, True))

    # Internals.

    async def _wait_until_published(self, uid: str) -> None:
        group = self._groups[uid]
        if not group.left:
            self._tell(GroupEnded(uid, group.failed))
        if not self._is_lost:
            await group.published.wait()

    @staticmethod
    def _expect(lanes: _AwaitedLanes, sample: int) -> _AwaitedLane:
        lanes[sample] = lane = asyncio.get_running_loop().create_future()
        return lane

    def _tell(self, report: Report) -> None:
        assert self._loop is not None
        if asyncio.get_running_loop() is not self._loop:
            self._loop.call_soon_threadsafe(self._tell, report)
        elif not self._is_lost:
            self._reports.append(report)
            if self._sender is None:
                self._sender = self._loop.create_task(self._send())

    async def _send(self) -> None:
        """Send reports until there are no more, one call at a time, so that the router recognises a repeated one."""
        while self._reports and not self._is_lost:
            await asyncio.sleep(FLUSH_SECONDS)
            reports, self._reports = self._reports, []
            self._num_reports += 1
            try:
                await self._router.report.remote(self._worker, self._num_reports, reports)
            except RayError as error:
                self._lose(error)
        self._sender = None

    async def _listen(self) -> None:
        received = 0
        while not self._is_lost:
            try:
                news = await self._router.news.remote(self._worker, received)
            except RayError as error:
                return self._lose(error)
            if news is None:
                return self._lose("it has failed or was restarted")
            received = news.number
            self._handles.update(news.handles)
            for (uid, sample), replica in news.lanes:
                group = self._groups.get(uid)
                if group is None or group.lanes.get(sample, True) is None:
                    continue  # late news of an answer that has ended
                lane = group.lanes.get(sample)
                if lane is None or lane.done():
                    lane = self._expect(group.lanes, sample)
                if replica is not None:
                    lane.set_result(replica)
            for uid in news.published:
                if uid in self._groups:
                    self._groups[uid].published.set()

    def _lose(self, reason: object) -> None:
        """Continue without the router: verl's client chooses replicas, and nothing is held back."""
        if self._is_lost:
            return
        self._is_lost = True
        self._reports = []
        message = "HistoPipe's router is dead; answers go to the replica with the fewest requests: %s"
        delay = LOST_SECONDS if isinstance(reason, RayError) else 0.0
        asyncio.get_running_loop().call_later(delay, logger.error, message, str(reason).partition("\n")[0])
        for group in self._groups.values():
            for lane in group.lanes.values():
                if lane is not None and not lane.done():
                    lane.set_result("")
            group.published.set()
