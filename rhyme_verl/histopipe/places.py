"""A worker's side of the router: trajectories wait here for their places, and finished prompts for the trainer's eye.

All that waits in a worker costs the router one call, and so does all that ends within `FLUSH_SECONDS`. Knows nothing of
verl.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ray.exceptions import RayError

from rhyme_verl.histopipe.request_id import Trajectory

logger = logging.getLogger(__name__)

FLUSH_SECONDS = 0.02
LOST_SECONDS = 5.0  # after which the loss of the router is told


@dataclass(frozen=True, slots=True)
class Release:
    """The end of a request at a replica."""

    replica: str
    request_id: str | None


@dataclass(frozen=True, slots=True)
class Finish:
    """The end of a trajectory, which has its last token or has failed.

    Attributes:
        trajectory: which.
        tokens: generated; None if it failed.
        truncated: it was cut off at the cap.
        prompt_tokens: of its prompt.
        versions: first and last policy version that generated it, if known.
    """

    trajectory: Trajectory
    tokens: int | None
    truncated: bool = False
    prompt_tokens: int = 0
    versions: tuple[int, int] | None = None


class Places:
    """What one worker knows of its prompts. All methods are called from one event loop.

    Args:
        router: handle of a `HistoPipeRouter`.
    """

    def __init__(self, router: Any) -> None:
        self._router = router
        self._worker = uuid.uuid4().hex
        self._bound: dict[Trajectory, asyncio.Event] = {}
        self._published: dict[str, asyncio.Event] = {}
        self._ended: list[Release | Finish] = []  # that the router has not been told
        self._listener: asyncio.Task | None = None
        self._is_lost = False

    async def follow(self, uids: Sequence[str]) -> None:
        """Listen for news of prompts from now on; they have been submitted."""
        if self._listener is None:
            self._listener = asyncio.get_running_loop().create_task(self._listen())
        try:
            await self._router.follow.remote(self._worker, list(uids))
        except RayError as error:
            self._lose(error)

    async def wait_for_place(self, trajectory: Trajectory) -> None:
        """Return when a replica has room for a trajectory."""
        if not self._is_lost:
            await self._bound.setdefault(trajectory, asyncio.Event()).wait()

    def end(self, one: Finish) -> None:
        """Give the place of a trajectory to another one. Nothing is waited for."""
        self._bound.pop(one.trajectory, None)
        self._tell(one)

    def release(self, replica: str, request_id: str | None) -> None:
        """A request has ended. Nothing is waited for."""
        self._tell(Release(replica, request_id))

    async def wait_until_published(self, uid: str) -> None:
        """All answers to a prompt are complete: return when the trainer may see them."""
        event = self._published.setdefault(uid, asyncio.Event())
        self._flush()
        try:
            await self._router.end_prompt.remote(uid)
            if not self._is_lost:
                await event.wait()
        except RayError as error:
            self._lose(error)
        self._published.pop(uid, None)

    def _tell(self, ended: Release | Finish) -> None:
        if not self._ended:
            asyncio.get_running_loop().call_later(FLUSH_SECONDS, self._flush)
        self._ended.append(ended)

    def _flush(self) -> None:
        if self._ended:
            self._router.take_ended.remote(self._ended)
            self._ended = []

    async def _listen(self) -> None:
        while not self._is_lost:
            try:
                news = await self._router.news.remote(self._worker)
            except RayError as error:
                self._lose(error)
                return
            for trajectory in news.bound:
                self._bound.setdefault(trajectory, asyncio.Event()).set()
            for uid in news.published:
                self._published.setdefault(uid, asyncio.Event()).set()

    def _lose(self, error: RayError) -> None:
        """Without its router the job will fail at the next request; what is finished is not lost.

        Said late: at a job's end the router may go some moments before the workers do.
        """
        if not self._is_lost:
            message = str(error).partition("\n")[0]
            loop = asyncio.get_running_loop()
            loop.call_later(LOST_SECONDS, logger.error, "HistoPipe's router does not answer: %s", message)
        self._is_lost = True
        for event in (*self._bound.values(), *self._published.values()):
            event.set()
