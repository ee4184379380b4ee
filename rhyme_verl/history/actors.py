"""Ray actors that hold the history of the whole job, sharded by prompt.

Ray restarts an actor that dies; the new one loads the newest snapshot of this run. Imports neither verl nor vLLM.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rhyme_verl.config import GIB, HistoryConfig
from rhyme_verl.history import snapshot
from rhyme_verl.history.answers import Answer, AnswerBatch, NewAnswer, NewReward
from rhyme_verl.history.store import HistoryShard, StoreCounters
from rhyme_verl.history.vocabulary import Vocabulary
from rhyme_verl.telemetry import logs
from rhyme_verl.telemetry.files import unfinished_file

logger = logging.getLogger(__name__)

ACTOR_PREFIX = "rhyme_history_"
HEAD_RESOURCE = "node:__internal_head__"
NO_FULL_COLLECTION = 10_000, 10, 10**9  # of garbage, which would walk all answers: a second for 2 million


def shard_of(prompt_key: int, num_shards: int) -> int:
    """Return the shard of a prompt, from the upper half of its key: the lowest bits encode the prompt's length."""
    return (prompt_key >> 32) % num_shards


def open_actor(index: int, settings: HistoryConfig, vocabulary: Vocabulary, started_at: float) -> Any:
    """Return the job's actor for shard `index` of a vocabulary. The first caller starts it.

    Args:
        started_at: `snapshot.newest_time` when this run began; newer files belong to this run.
    """
    name = f"{ACTOR_PREFIX}{vocabulary.fingerprint}_{vocabulary.size}_{index}_of_{settings.shards}"
    return HistoryActor.options(  # type: ignore[attr-defined]
        name=name, get_if_exists=True, scheduling_strategy=_place(index)
    ).remote(index, settings, vocabulary, started_at)


def _place(index: int) -> NodeAffinitySchedulingStrategy:
    """Return where shard `index` starts, if that node lives: one on each node in turn, Ray's head last."""
    alive = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
    nodes = sorted((HEAD_RESOURCE in node["Resources"], node["NodeID"]) for node in alive)
    return NodeAffinitySchedulingStrategy(nodes[index % len(nodes)][1], soft=True)


def wait_for_snapshots(timeout_seconds: float) -> None:
    """Wait at most `timeout_seconds` until this job's actors have written their snapshots. Raises nothing."""
    try:
        actors = [ray.get_actor(name) for name in ray.util.list_named_actors() if name.startswith(ACTOR_PREFIX)]
        if actors:
            saving: list[Any] = [actor.finish_saving.remote() for actor in actors]
            ray.wait(saving, num_returns=len(actors), timeout=timeout_seconds)
    except (RayError, OSError, RuntimeError, ValueError) as error:
        logger.warning("the last snapshot of the history may be missing: %s", error)


# One byte of memory, because Ray ignores the wanted node of an actor that needs nothing.
@ray.remote(num_cpus=0, memory=1, max_restarts=-1)
class HistoryActor:
    """One shard and its snapshots. Calls run one at a time, and only `finish_saving` waits for the disk."""

    def __init__(self, index: int, settings: HistoryConfig, vocabulary: Vocabulary, started_at: float) -> None:
        logs.show()
        gc.set_threshold(*NO_FULL_COLLECTION)
        self._index = index
        self._settings = settings
        self._vocabulary = vocabulary
        self._snapshots = None if settings.snapshot_dir is None else Path(settings.snapshot_dir)
        self._started_at = started_at
        self._saved_step = -1
        self._sends: dict[str, int] = {}  # by sender, number of its latest send
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rhyme-snapshot")
        self._shard = self._empty_shard()
        self._resume()

    def ingest(self, sender: str, number: int, answers: Sequence[NewAnswer], rewards: Sequence[NewReward]) -> int:
        """Store a client's answers, then rewards. Returns the number of answers.

        Its sends have ascending numbers, so that a repeated one has no effect.
        """
        if number <= self._sends.get(sender, 0):
            return 0
        self._sends[sender] = number
        for prompt_key, answer_id, step, tokens in answers:
            self._shard.add(prompt_key, Answer(answer_id, step, tokens))
        for prompt_key, answer_id, reward in rewards:
            self._shard.set_reward(prompt_key, answer_id, reward)
        return len(answers)

    def changes(self, wanted: Mapping[int, int]) -> list[AnswerBatch]:
        """Return the answers that the caller does not have yet (prompt key -> last version received)."""
        return [batch for key, since in wanted.items() if (batch := self._shard.changes(key, since)) is not None]

    def counters(self) -> StoreCounters:
        return self._shard.counters()

    def finish_step(self, step: int) -> None:
        """Save a snapshot if this run has saved a checkpoint of this step. Repeated calls for the same step do nothing.

        A background thread writes the current content of the shard.
        """
        if self._snapshots is None or step <= self._saved_step or not self._shard.counters().answers:
            return
        checkpoint = self._snapshots / f"global_step_{step}"
        if snapshot.saved_time(checkpoint) <= self._started_at:
            return
        self._saved_step = step
        answers = list(self._shard.answers())  # token bytes are immutable, so the thread can share them
        self._writer.submit(self._save, checkpoint, step, answers)

    def finish_saving(self) -> None:
        """Wait until all pending snapshots are written."""
        self._writer.submit(int).result()  # the thread writes them in order

    def _save(self, checkpoint: Path, step: int, answers: list[tuple[int, Answer]]) -> None:
        folder, num_shards = checkpoint / snapshot.FOLDER, self._settings.shards
        try:
            snapshot.save(snapshot.shard_file(folder, self._index, num_shards), answers, self._vocabulary)
            for stale in snapshot.shard_files(folder):
                if not stale.stem.endswith(f"-of-{num_shards}"):
                    stale.unlink(missing_ok=True)
        except Exception as error:  # for example full disk, full memory, Arrow's own errors
            logger.error("the history of step %d is not saved; training continues without it: %s", step, error)
            return  # and the one before stays, even without its model
        try:
            for expired in snapshot.expired_checkpoints(checkpoint):
                file = snapshot.shard_file(expired / snapshot.FOLDER, self._index, num_shards)
                for one in (file, unfinished_file(file)):  # a killed job leaves an unfinished one
                    one.unlink(missing_ok=True)
        except OSError as error:
            logger.warning("a snapshot without its model cannot be removed: %s", error)

    def _empty_shard(self) -> HistoryShard:
        settings = self._settings
        budget_bytes = int(settings.budget_gib * GIB / settings.shards)
        return HistoryShard(
            settings.window_epochs,
            budget_bytes,
            first_version=time.time_ns(),
            max_prompt_tokens=settings.max_tokens_per_prompt,
        )

    def _resume(self) -> None:
        """Load this run's newest snapshot (then this actor is a restart), else the one to resume from, if any.

        If that one is incomplete, an earlier one is loaded: drafts need not be of the model's age. This shard takes its
        share of all files, or nothing if one of them cannot be read.
        """
        own = () if self._snapshots is None else snapshot.folders_of_run(self._snapshots)
        files = self._files_of(own, self._started_at)
        if not files:
            if self._settings.resume_from is None:
                return
            chosen = Path(self._settings.resume_from) / snapshot.FOLDER
            files = self._files_of(snapshot.folders_up_to(chosen))
            if not files:
                logger.warning("there is no history to resume in %s; rollouts start without it", chosen)
                return
        folder = files[0].parent
        try:
            for path in files:
                for prompt_key, answer in snapshot.load(path, self._vocabulary):
                    if shard_of(prompt_key, self._settings.shards) == self._index:
                        self._shard.add(prompt_key, answer)
        except snapshot.SnapshotError as error:
            logger.error("the history is not resumed; rollouts start without it: %s", error)
            self._shard = self._empty_shard()
            return
        if folder.parents[1] == self._snapshots:
            self._saved_step = snapshot.step_of(folder)
        counters = self._shard.counters()
        logger.info("history resumed from %s: %d answers, %d tokens", folder, counters.answers, counters.tokens)

    def _files_of(self, folders: Sequence[Path], written_after: float = 0.0) -> list[Path]:
        return snapshot.newest_files(folders, self._index, self._settings.shards, written_after)
