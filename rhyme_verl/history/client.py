"""Access to the history's actors from an event loop: sends run in the background, and no method raises.

While an actor is down, new answers wait in a bounded buffer and queries return nothing. Both recover by themselves.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
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
MAX_WAITING_BYTES = 128 << 20  # limit on the tokens in it


@dataclass(slots=True)
class _Buffer:
    """Answers and rewards that wait to be sent to one shard, and the task that sends them."""

    index: int
    answers: list[NewAnswer] = field(default_factory=list)
    rewards: list[NewReward] = field(default_factory=list)
    num_bytes: int = 0  # of the answers' tokens
    num_sends: int = 0
    sender: asyncio.Task[None] | None = None


class HistoryClient:
    """One process's access to the history. All methods must be called from one running event loop."""

    def __init__(self, settings: HistoryConfig, vocabulary: Vocabulary) -> None:
        self._settings = settings
        self._vocabulary = vocabulary
        self._name = secrets.token_hex(8)
        # By the clock of the file system, which may differ from this process's.
        self._started_at = 0.0 if settings.snapshot_dir is None else snapshot.newest_time(Path(settings.snapshot_dir))
        self._actors: dict[int, ray.actor.ActorHandle[Any]] = {}
        self._buffers = [_Buffer(index) for index in range(settings.shards)]
        self._silent: set[int] = set()  # shards that did not respond to the latest call
        self._log_once = LogOnce(logger)

    def add(self, prompt_key: int, answer_id: int, step: int, tokens: np.ndarray) -> None:
        """Send an answer (int32 [tokens]) in the background; it may replace one of the same id (`HistoryShard.add`)."""
        buffer = self._buffers[shard_of(prompt_key, self._settings.shards)]
        content = tokens.astype(np.int32).tobytes()
        self._put(buffer, buffer.answers, (prompt_key, answer_id, step, content), len(content))

    def set_reward(self, prompt_key: int, answer_id: int, reward: float) -> None:
        """Send the reward of an answer in the background."""
        buffer = self._buffers[shard_of(prompt_key, self._settings.shards)]
        self._put(buffer, buffer.rewards, (prompt_key, answer_id, reward))

    async def changes(self, wanted: Mapping[int, int]) -> tuple[list[AnswerBatch], set[int]]:
        """Fetch the answers that the caller does not have yet (prompt key -> last version received, 0: none).

        Returns:
            The answers, and the keys of the prompts whose actor did not respond.
        """
        questions: dict[int, dict[int, int]] = {}
        for prompt_key, since in wanted.items():
            questions.setdefault(shard_of(prompt_key, self._settings.shards), {})[prompt_key] = since
        asked = (self._ask(index, "changes", CALL_SECONDS, keys) for index, keys in questions.items())
        replies = await asyncio.gather(*asked)
        silent = [keys for keys, reply in zip(questions.values(), replies, strict=True) if reply is None]
        return [batch for reply in replies for batch in reply or ()], {key for keys in silent for key in keys}

    async def finish_step(self, step: int) -> None:
        """Ask every shard to save a snapshot if this step has a checkpoint. Does not wait for the disk."""
        await self.drain(DRAIN_SECONDS)
        await self._ask_all("finish_step", step)

    async def counters(self) -> StoreCounters | None:
        """Return the sums over all shards, or None if a shard does not respond."""
        shards = await self._ask_all("counters")
        return None if None in shards else StoreCounters(*map(sum, zip(*shards, strict=True)))

    async def drain(self, timeout_seconds: float) -> None:
        """Wait until everything is sent, for at most `timeout_seconds`."""
        senders = [buffer.sender for buffer in self._buffers if buffer.sender is not None]
        if senders:
            await asyncio.wait(senders, timeout=timeout_seconds)

    def _put(self, buffer: _Buffer, items: list[Any], item: tuple[Any, ...], num_bytes: int = 0) -> None:
        if len(items) >= MAX_WAITING or buffer.num_bytes + num_bytes > MAX_WAITING_BYTES:
            message = "the history does not keep up: answers and rewards beyond its buffer are dropped"
            self._log_once(logging.WARNING, message)
            return
        items.append(item)
        buffer.num_bytes += num_bytes
        if buffer.sender is None:
            buffer.sender = asyncio.get_running_loop().create_task(self._send(buffer))

    async def _send(self, buffer: _Buffer) -> None:
        try:
            while buffer.answers or buffer.rewards:
                await asyncio.sleep(BATCH_SECONDS)
                answers, rewards = buffer.answers, buffer.rewards
                buffer.answers, buffer.rewards, buffer.num_bytes = [], [], 0
                buffer.num_sends += 1
                send = (self._name, buffer.num_sends, answers, rewards)
                while await self._ask(buffer.index, "ingest", CALL_SECONDS, *send) is None:
                    if buffer.index not in self._silent:
                        break
                    await asyncio.sleep(RETRY_SECONDS)
        finally:
            buffer.sender = None

    async def _ask_all(self, method: str, *arguments: Any) -> list[Any]:
        """Call all actors during a weight update, which must not wait for silent ones in every step."""
        shards = range(self._settings.shards)
        limits = [SILENT_SECONDS if index in self._silent else STEP_SECONDS for index in shards]
        return await asyncio.gather(*(self._ask(index, method, limits[index], *arguments) for index in shards))

    async def _ask(self, index: int, method: str, timeout_seconds: float, *arguments: Any) -> Any:
        """Call an actor. Returns None if it fails or does not respond."""
        actor = self._actors.get(index)
        try:
            if actor is None:
                actor = self._actors[index] = open_actor(index, self._settings, self._vocabulary, self._started_at)
            answer = await asyncio.wait_for(getattr(actor, method).remote(*arguments), timeout_seconds)
        except RayTaskError as error:  # a fault in the actor's code: a retry would fail again
            self._log_once(logging.ERROR, f"the history failed in {method}: %s", error)
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
