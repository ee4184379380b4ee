"""A rollout server's side of the history: sends finished answers to the store, and fetches those of its prompts.

Nothing here delays or fails a request: if the store does not respond, the replica's engine drafts from less history.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from rhyme_verl._core import prompt_key
from rhyme_verl.config import GIB, HistoryConfig
from rhyme_verl.history.answers import AnswerBatch
from rhyme_verl.history.client import HistoryClient
from rhyme_verl.history.feed import AnswerPublisher
from rhyme_verl.history.store import StoreCounters
from rhyme_verl.history.trajectories import ServedTrajectories, ServedTrajectory
from rhyme_verl.history.vocabulary import Vocabulary
from rhyme_verl.request_id import RequestTag

ENGINE_BYTES_PER_TOKEN = 32  # upper bound for the engine's index
SPEAKERS = 4  # replicas that tell the store and the router of a finished step; all of a large job would flood them
FETCH_SECONDS = 0.002  # prompts that arrive within this time are fetched in one call
PROMPTS_PER_FETCH = 8  # from each shard; keeps the first of many prompts from waiting for the answers of all


@dataclass(slots=True)
class _Fetched:
    """What was fetched for a prompt."""

    step: int = -1  # the latest one that asked
    version: int = 0  # of the store
    num_tokens: int = 0


def is_speaker(rank: int, num_standalone: int) -> bool:
    """Return whether the replica of this rank tells the store and the router of finished steps.

    `num_standalone`: number of replicas with GPUs of their own; 0 if this one shares the trainer's. Ranks of standalone
    replicas follow those of the trainer's replicas, which verl does not tell of every step.
    """
    return rank % max(1, num_standalone // SPEAKERS) == 0 if num_standalone else rank < SPEAKERS


class ReplicaHistory:
    """Connects requests, the store and the engine. All methods must be called from one running event loop.

    `host`: IP address of this node if the replica has engines on other nodes, else None.
    """

    def __init__(self, settings: HistoryConfig, vocabulary: Vocabulary, host: str | None = None) -> None:
        self._client = HistoryClient(settings, vocabulary)
        self._publisher = AnswerPublisher(host)
        self._trajectories = ServedTrajectories()
        self._prompts_per_fetch = PROMPTS_PER_FETCH * settings.shards
        self._fetched: OrderedDict[int, _Fetched] = OrderedDict()  # by prompt key, most recently fetched last
        self._num_fetched_tokens = 0
        self._max_fetched_tokens = int(settings.replica_budget_gib * GIB / ENGINE_BYTES_PER_TOKEN)
        self._wanted: dict[int, None] = {}  # prompt keys in the order of their requests
        self._fetcher: asyncio.Task[None] | None = None

    async def bind(self, call_workers: Callable[..., Awaitable[list[Any]]]) -> list[Any]:
        """Subscribe the engine's processes to the answers, and return the results of `rhyme_bind`.

        `call_workers` calls a method of all workers of all engines by its name and returns all results.
        """
        self._publisher.allow(await call_workers("rhyme_feed_key"))
        return await self._publisher.accept(call_workers("rhyme_bind", asdict(self._publisher.address)))

    def begin(self, prompt: np.ndarray, step: int, tag: RequestTag | None = None) -> ServedTrajectory:
        """Register a request with this prompt (int32 [tokens]) and start fetching the prompt's answers.

        `step`: version of the weights. Without a tag, an answer that the request continues is recognised by its tokens.
        """
        if tag is None:
            trajectory = self._trajectories.begin(prompt, step)
        else:
            root = prompt_key(prompt[: tag.prompt_tokens])
            trajectory = ServedTrajectory(root, tag.answer_key, tag.prompt_tokens, is_tagged=True)
        fetched = self._fetched.setdefault(trajectory.prompt_key, _Fetched())
        if fetched.step != step:
            fetched.step = step
            self._wanted[trajectory.prompt_key] = None
            if self._fetcher is None:
                self._fetcher = asyncio.get_running_loop().create_task(self._fetch())
        return trajectory

    def end(self, trajectory: ServedTrajectory, prompt: np.ndarray, answer: np.ndarray, step: int) -> None:
        """Store the prompt and answer (int32 [tokens] each) of a request that is over, for whatever reason.

        A later request of the same answer (its next turn, or its continuation after an abort) replaces them, unless it
        holds less under the same weights. If the answer is empty, nothing is stored, and the request may come again.
        """
        context = np.concatenate([prompt, answer])
        if not trajectory.is_tagged and len(context) > trajectory.root_len:
            self._trajectories.end(trajectory, context)
        if len(answer):
            self._client.add(trajectory.prompt_key, trajectory.answer_id, step, context[trajectory.root_len :])

    async def finish_step(self, step: int, tells_store: bool = True) -> None:
        """Forget the prompts without answers, and ask the store to save a snapshot if verl has saved a checkpoint."""
        self._fetched = OrderedDict((key, fetched) for key, fetched in self._fetched.items() if fetched.num_tokens)
        if tells_store:
            await self._client.finish_step(step)

    async def counters(self) -> StoreCounters | None:
        """Return the counters of the whole store; None if it does not respond."""
        return await self._client.counters()

    async def _fetch(self) -> None:
        try:
            while self._wanted:
                await asyncio.sleep(FETCH_SECONDS)
                keys = list(self._wanted)[: self._prompts_per_fetch]
                for key in keys:
                    del self._wanted[key]
                if self._publisher.has_lost_answers():
                    self._fetched.clear()
                    self._num_fetched_tokens = 0
                nothing = _Fetched()
                wanted = {key: self._fetched.get(key, nothing).version for key in keys}
                batches, missed = await self._client.changes(wanted)
                for batch in batches:
                    if self._publisher.publish(batch):
                        self._note(batch)
                    else:
                        missed.add(batch.prompt_key)
                for key in missed:
                    self._forget(key)  # the prompt's next request asks again
                while self._num_fetched_tokens > self._max_fetched_tokens:
                    self._forget(next(iter(self._fetched)))
        finally:
            self._fetcher = None

    def _note(self, batch: AnswerBatch) -> None:
        fetched = self._fetched.setdefault(batch.prompt_key, _Fetched())
        fetched.version = batch.version
        fetched.num_tokens += len(batch.tokens)
        self._num_fetched_tokens += len(batch.tokens)
        self._fetched.move_to_end(batch.prompt_key)

    def _forget(self, prompt_key: int) -> None:
        """Make the next fetch for this prompt ask for all answers: the engine may have evicted what it received."""
        forgotten = self._fetched.pop(prompt_key, None)
        if forgotten is not None:
            self._num_fetched_tokens -= forgotten.num_tokens
