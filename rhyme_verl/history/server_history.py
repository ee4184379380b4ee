"""A rollout server's part in the history: sends finished answers to the store, and fetches what its prompts have there.

Nothing here makes a request wait or fail: without an answer from the store the replica's engine drafts from less.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from rhyme_verl._core import prompt_key
from rhyme_verl.config import HistoryConfig
from rhyme_verl.history.actors import GIB
from rhyme_verl.history.answers import AnswerBatch
from rhyme_verl.history.client import HistoryClient
from rhyme_verl.history.feed import AnswerPublisher, FeedAddress
from rhyme_verl.history.store import StoreCounters
from rhyme_verl.history.trajectories import Trajectories, Trajectory
from rhyme_verl.history.vocabulary import Vocabulary
from rhyme_verl.request_id import RequestTag

ENGINE_BYTES_PER_TOKEN = 32  # of the engine's index, at most
FETCH_SECONDS = 0.002  # requests that come within this time are fetched for together
PROMPTS_PER_FETCH = 64  # so that the first of many prompts need not wait for the answers of all

T = TypeVar("T")


@dataclass(slots=True)
class _Fetched:
    """What the engine was sent of a prompt: when last, up to which version of the store, and how much in all."""

    step: int = -1
    version: int = 0
    num_tokens: int = 0


class ReplicaHistory:
    """Between a server's requests, the store and the engine. All methods are called from one running event loop.

    Args:
        host: IP address of this node if the replica has engines on others.
    """

    def __init__(self, settings: HistoryConfig, vocabulary: Vocabulary, host: str | None = None) -> None:
        self._client = HistoryClient(settings, vocabulary)
        self._publisher = AnswerPublisher(host)
        self._trajectories = Trajectories()
        self._fetched: OrderedDict[int, _Fetched] = OrderedDict()  # by prompt key, the latest at the end
        self._num_fetched_tokens = 0
        self._max_fetched_tokens = int(settings.replica_budget_gib * GIB / ENGINE_BYTES_PER_TOKEN)
        self._wanted: dict[int, None] = {}  # prompt keys in the order of their requests
        self._fetcher: asyncio.Task[None] | None = None

    async def bind(self, bind_engines: Callable[[FeedAddress], Awaitable[T]]) -> T:
        """Have the engine's processes subscribe to answers: call `bind_engines` and return what it returns."""
        return await self._publisher.accept(bind_engines(self._publisher.address))

    def begin(self, prompt: np.ndarray, step: int, tag: RequestTag | None = None) -> Trajectory:
        """Start a request with this prompt (int32 [tokens]) and start fetching what the store has for it.

        Args:
            step: version of the weights.
            tag: the answer that the request continues; None: it is recognised by the prompt's content.
        """
        if tag is None:
            trajectory = self._trajectories.begin(prompt)
        else:
            trajectory = Trajectory(prompt_key(prompt[: tag.prompt_tokens]), tag.answer_key, tag.prompt_tokens)
        fetched = self._fetched.setdefault(trajectory.prompt_key, _Fetched())
        if fetched.step != step:
            fetched.step = step
            self._wanted[trajectory.prompt_key] = None
            if self._fetcher is None:
                self._fetcher = asyncio.get_running_loop().create_task(self._fetch())
        return trajectory

    def end(
        self,
        trajectory: Trajectory,
        prompt: np.ndarray,
        answer: np.ndarray,
        step: int,
        tag: RequestTag | None = None,
    ) -> None:
        """Remember what a request of the trajectory generated (int32 [tokens] both), finished or aborted.

        A later request of the same trajectory (its next turn, or its continuation after an abort) replaces it.
        """
        context = np.concatenate([prompt, answer])
        if tag is None:
            self._trajectories.end(trajectory, context)
        self._client.add(trajectory.prompt_key, trajectory.answer_id, step, context[trajectory.root_len :])

    async def finish_step(self, step: int) -> None:
        """Let the store save itself with verl's checkpoint of this step, if there is one."""
        self._fetched = OrderedDict((key, fetched) for key, fetched in self._fetched.items() if fetched.num_tokens)
        await self._client.finish_step(step)

    async def counters(self) -> StoreCounters | None:
        """What the whole store holds; None if it does not answer."""
        return await self._client.counters()

    async def _fetch(self) -> None:
        try:
            while self._wanted:
                await asyncio.sleep(FETCH_SECONDS)
                keys = list(self._wanted)[:PROMPTS_PER_FETCH]
                for key in keys:
                    del self._wanted[key]
                batches, unanswered = await self._client.changes({key: self._version_of(key) for key in keys})
                for batch in batches:
                    self._publisher.publish(batch)
                    self._note(batch)
                for key in unanswered:
                    self._forget(key)  # the prompt's next request asks again
                while self._num_fetched_tokens > self._max_fetched_tokens:
                    self._forget(next(iter(self._fetched)))
        finally:
            self._fetcher = None

    def _version_of(self, prompt_key: int) -> int:
        fetched = self._fetched.get(prompt_key)
        return 0 if fetched is None else fetched.version

    def _note(self, batch: AnswerBatch) -> None:
        fetched = self._fetched.setdefault(batch.prompt_key, _Fetched())
        fetched.version = batch.version
        fetched.num_tokens += len(batch.tokens)
        self._num_fetched_tokens += len(batch.tokens)
        self._fetched.move_to_end(batch.prompt_key)

    def _forget(self, prompt_key: int) -> None:
        """Have the next fetch for this prompt ask for everything: the engine may have evicted what it got."""
        forgotten = self._fetched.pop(prompt_key, None)
        if forgotten is not None:
            self._num_fetched_tokens -= forgotten.num_tokens
