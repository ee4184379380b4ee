"""Access to the history's actors from an event loop: sends run in the background, and no method raises.

While an actor is down, new answers wait in a bounded buffer and queries return nothing. Both recover by themselves.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.exceptions import ActorDiedError, RayTaskError

from rhyme_verl.config import HistoryConfig
from rhyme_verl.history import snapshot
from rhyme_verl.history.actors import open_actor, shard_of
from rhyme_verl.history.answers import AnswerBatch, NewAnswer, NewReward
from rhyme_verl.history.store import StoreCounters
from rhyme_verl.history.vocabulary import Vocabulary
from rhyme_verl.telemetry.logs import LogOnce

logger = logging.getLogger(__name__)

BATCH_SECONDS = 0.005  # items that arrive within this time are sent in one call
RETRY_SECONDS = 1.0
CALL_SECONDS = 30.0
STEP_SECONDS = 5.0  # time limit of calls that a weight update waits for
SILENT_SECONDS = 0.1  # the same, if the previous call was not answered
DRAIN_SECONDS = 1.0
MAX_WAITING = 16384  # limit on the answers, and on the rewards, in the buffer of one shard


class _Outbox:
    """Items waiting to be sent to one shard, and the task that sends them."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.answers: list[NewAnswer] = []
        self.rewards: list[NewReward] = []
        self.num_sends = 0
        self.sender: asyncio.Task[None] | None = None


class HistoryClient:
    """One process's access to the history. All methods must be called from one running event loop."""

    def __init__(self, settings: HistoryConfig, vocabulary: Vocabulary) -> None:
        self._settings = settings
        self._vocabulary = vocabulary
        self._name = secrets.token_hex(8)
        # By the clock of the file system, which may differ from this process's.
        self._started_at = 0.0 if settings.snapshot_dir is None else snapshot.newest_time(Path(settings.snapshot_dir))
        self._actors: dict[int, ray.actor.ActorHandle[Any]] = {}
        self._outboxes = [_Outbox(index) for index in range(settings.shards)]
        self._silent: set[int] = set()  # shards that did not respond to the latest call
        self._log_once = LogOnce(logger)

    def add(self, prompt_key: int, answer_id: int, step: int, tokens: np.ndarray) -> None:
        """Send an answer (int32 [tokens]) in the background. It replaces an answer with the same id, unless that one is
        longer.
        """
        outbox = self._outboxes[shard_of(prompt_key, self._settings.shards)]
        self._put(outbox, outbox.answers, NewAnswer(prompt_key, answer_id, step, tokens.astype(np.int32).tobytes()))

    def set_reward(self, prompt_key: int, answer_id: int, reward: float) -> None:
        """Send the reward of an answer in the background."""
        outbox = self._outboxes[shard_of(prompt_key, self._settings.shards)]
        self._put(outbox, outbox.rewards, NewReward(prompt_key, answer_id, reward))

    async def changes(self, wanted: Mapping[int, int]) -> tuple[list[AnswerBatch], set[int]]:
        """Fetch the answers that the caller does not have yet (prompt key -> last version received, 0: none).

        Returns:
            The answers, and the keys of the prompts whose actor did not respond.
        """
        batches: list[AnswerBatch] = []
        unanswered: set[int] = set()

        async def ask(index: int, keys: dict[int, int]) -> None:
            answer = await self._ask(index, "changes", CALL_SECONDS, keys)
            if answer is None:
                unanswered.update(keys)
            else:
                batches.extend(answer)

        questions: dict[int, dict[int, int]] = {}
        for prompt_key, since in wanted.items():
            questions.setdefault(shard_of(prompt_key, self._settings.shards), {})[prompt_key] = since
        await asyncio.gather(*(ask(index, keys) for index, keys in questions.items()))
        return batches, unanswered

    async def finish_step(self, step: int) -> None:
        """Ask every shard to save a snapshot if this step has a checkpoint. Does not wait for the disk."""
        await self.drain(DRAIN_SECONDS)
        await self._ask_all("finish_step", step)

    async def counters(self) -> StoreCounters | None:
        """Return the sums over all shards, or None if a shard does not respond."""
        shards = await self._ask_all("counters")
        if None in shards:
            return None
        names = [field.name for field in dataclasses.fields(StoreCounters)]
        return StoreCounters(**{name: sum(getattr(shard, name) for shard in shards) for name in names})

    async def drain(self, timeout_seconds: float) -> None:
        """Wait until everything is sent, for at most `timeout_seconds`."""
        senders = [outbox.sender for outbox in self._outboxes if outbox.sender is not None]
        if senders:
            await asyncio.wait(senders, timeout=timeout_seconds)

    def _put(self, outbox: _Outbox, items: list[Any], item: tuple[Any, ...]) -> None:
        if len(items) >= MAX_WAITING:
            message = "the history does not keep up: answers and rewards beyond its buffer are dropped"
            self._log_once(logging.WARNING, message)
            return
        items.append(item)
        if outbox.sender is None:
            outbox.sender = asyncio.get_running_loop().create_task(self._send(outbox))

    async def _send(self, outbox: _Outbox) -> None:
        try:
            while outbox.answers or outbox.rewards:
                await asyncio.sleep(BATCH_SECONDS)
                answers, rewards = outbox.answers, outbox.rewards
                outbox.answers, outbox.rewards = [], []
                outbox.num_sends += 1
                send = (self._name, outbox.num_sends, answers, rewards)
                while (
                    await self._ask(outbox.index, "ingest", CALL_SECONDS, *send) is None
                    and outbox.index in self._silent
                ):
                    await asyncio.sleep(RETRY_SECONDS)
        finally:
            outbox.sender = None

    async def _ask_all(self, method: str, *arguments: Any) -> list[Any]:
        """Call all actors during a weight update, which must not wait for silent ones in every step."""
        limits = [SILENT_SECONDS if index in self._silent else STEP_SECONDS for index in range(self._settings.shards)]
        return await asyncio.gather(
            *(self._ask(index, method, limit, *arguments) for index, limit in enumerate(limits))
        )

    async def _ask(self, index: int, method: str, timeout_seconds: float, *arguments: Any) -> Any:
        """Call an actor. Returns None if it fails or does not respond."""
        actor = self._actors.get(index)
        try:
            if actor is None:
                actor = self._actors[index] = open_actor(index, self._settings, self._vocabulary, self._started_at)
            answer = await asyncio.wait_for(getattr(actor, method).remote(*arguments), timeout_seconds)
        except RayTaskError as error:  # a fault in the actor's code: a retry would fail again
            self._log_once(logging.ERROR, "the history failed in %s: %s", method, error, kind=method)
            self._silent.discard(index)
            return None
        except Exception as error:  # rollouts continue after any error
            if isinstance(error, ActorDiedError) and self._actors.get(index) is actor:
                del self._actors[index]  # Ray does not restart it; the next call starts or finds another
            if not self._silent:
                reason = str(error).partition("\n")[0] or type(error).__name__
                logger.warning("the history does not respond; rollouts continue without it until it does: %s", reason)
            self._silent.add(index)
            return None
        if index in self._silent:
            self._silent.remove(index)
            if not self._silent:
                logger.warning("the history responds again")
        return answer
