"""Ray actors that hold the history of the whole job, sharded by prompt.

An actor that dies is started again by Ray and takes up the newest snapshot of this run. Knows nothing of verl or vLLM.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import ray

from rhyme_verl import logs
from rhyme_verl.config import HistoryConfig
from rhyme_verl.history import snapshot
from rhyme_verl.history.answers import AnswerBatch
from rhyme_verl.history.store import HistoryShard, StoreCounters

logger = logging.getLogger(__name__)

GIB = 1 << 30

NewAnswer = tuple[int, int, int, bytes]  # prompt key, answer id, step, int32 token ids
NewReward = tuple[int, int, float]  # prompt key, hash of the answer's tokens, reward


def shard_of(prompt_key: int, num_shards: int) -> int:
    """The shard that holds a prompt. By the upper half of its key: the lowest bits say how long the prompt is."""
    return (prompt_key >> 32) % num_shards


def open_actor(index: int, settings: HistoryConfig, started_at: float) -> ray.actor.ActorHandle:
    """Return the job's actor of shard `index`; the first to ask starts it.

    Args:
        started_at: Unix time; snapshots written later are this run's own.
    """
    return HistoryActor.options(  # type: ignore[attr-defined]
        name=f"rhyme_history_{index}_of_{settings.shards}", get_if_exists=True, scheduling_strategy="SPREAD"
    ).remote(index, settings, started_at)


@ray.remote(num_cpus=0, max_restarts=-1)
class HistoryActor:
    """One shard, its snapshots, and nothing else: calls are answered one after another."""

    def __init__(self, index: int, settings: HistoryConfig, started_at: float) -> None:
        logs.show()
        self._index = index
        self._settings = settings
        self._snapshots = None if settings.snapshot_dir is None else Path(settings.snapshot_dir)
        self._saved_step = -1
        self._shard = self._empty_shard()
        folder = self._folder_to_load(started_at)
        if folder is not None:
            self._load(folder)

    def ingest(self, answers: Sequence[NewAnswer], rewards: Sequence[NewReward]) -> int:
        """File answers, then rewards; returns how many answers."""
        for prompt_key, answer_id, step, tokens in answers:
            self._shard.add(prompt_key, answer_id, step, np.frombuffer(tokens, dtype=np.int32))
        for prompt_key, content_hash, reward in rewards:
            self._shard.set_reward(prompt_key, content_hash, reward)
        return len(answers)

    def changes(self, wanted: Mapping[int, int]) -> list[AnswerBatch]:
        """Return what is new of the wanted prompts, given as prompt key -> version seen last."""
        batches = (self._shard.changes(prompt_key, since) for prompt_key, since in wanted.items())
        return [batch for batch in batches if batch is not None]

    def counters(self) -> StoreCounters:
        return self._shard.counters()

    def finish_step(self, step: int) -> None:
        """Write a snapshot if verl has saved a checkpoint of this step; asked again for the same step, do nothing."""
        if self._snapshots is None or step <= self._saved_step or not self._shard.counters().answers:
            return
        checkpoint = self._snapshots / f"global_step_{step}"
        if not checkpoint.is_dir():
            return
        folder, num_shards = checkpoint / snapshot.FOLDER, self._settings.shards
        try:
            snapshot.save(snapshot.shard_file(folder, self._index, num_shards), self._shard)
            for stale in snapshot.shard_files(folder):
                if not stale.stem.endswith(f"-of-{num_shards}"):
                    stale.unlink(missing_ok=True)
        except OSError as error:
            logger.error("the history of step %d was not saved and training goes on without: %s", step, error)
            return
        self._saved_step = step

    def _empty_shard(self) -> HistoryShard:
        budget_bytes = int(self._settings.budget_gib * GIB / self._settings.shards)
        return HistoryShard(self._settings.window_epochs, budget_bytes, first_version=time.time_ns())

    def _folder_to_load(self, started_at: float) -> Path | None:
        """The newest snapshot of this run, if it has any: then this actor replaces one that died."""
        if self._snapshots is not None:
            own = snapshot.newest_folder(self._snapshots, written_after=started_at)
            if own is not None:
                return own
        return None if self._settings.resume_from is None else Path(self._settings.resume_from) / snapshot.FOLDER

    def _load(self, folder: Path) -> None:
        """Take this shard's share of all files, or nothing at all if one of them cannot be read."""
        num_shards = self._settings.shards
        try:
            for path in snapshot.shard_files(folder):
                for prompt_key, answer in snapshot.load(path):
                    if shard_of(prompt_key, num_shards) == self._index:
                        self._shard.restore(prompt_key, answer)
        except snapshot.SnapshotError as error:
            logger.error("the history is not resumed, and rollouts start undrafted: %s", error)
            self._shard = self._empty_shard()
            return
        self._saved_step = int(folder.parent.name.rpartition("_")[2])
        counters = self._shard.counters()
        logger.info("history resumed from %s: %d answers, %d tokens", folder, counters.answers, counters.tokens)
