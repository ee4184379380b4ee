"""What HistoPipe's router needs of verl: settings from a job's whole config, and the trainer's table of groups."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any

import transfer_queue as tq

from rhyme_verl.config import RhymeConfig
from rhyme_verl.histopipe.scheduler import Job
from rhyme_verl.histopipe.units import default_shape


def router_settings(config: Any, rhyme: RhymeConfig) -> Job:
    """Return the settings of HistoPipe's router, given a verl job's whole config."""
    rollout = config.actor_rollout_ref.rollout
    mode = config.trainer.v1.trainer_mode
    batch_size, max_age = config.data.train_batch_size, rhyme.pipe.max_age
    warmup = (config.trainer.v1.get(mode, None) or {}).get("num_warmup_batches", 0)
    max_age = min(max_age, int(warmup)) if mode == "colocate_async" else 0
    return Job(
        batch_size=batch_size,
        max_running=_max_num_seqs(rollout) * rollout.get("data_parallel_size", 1),
        max_tokens=rollout.response_length,
        max_age=max_age,
        shape=default_shape(max_age, batch_size) if mode == "colocate_async" else None,
        overlaps=mode == "separate_async",
        shares_prompts=bool(rollout.get("enable_prefix_caching", True)),
        total_steps=_total_steps(config),
        log_folder=rhyme.stats_path,
        checkpoints=rhyme.history.snapshot_dir,
        resume_from=rhyme.history.resume_from,
    )


def _max_num_seqs(rollout: Any) -> int:
    """Return the engine's maximum number of running sequences; verl lets `engine_kwargs` override its own key."""
    engine_kwargs = (rollout.get("engine_kwargs", None) or {}).get("vllm", None) or {}
    return int(engine_kwargs.get("max_num_seqs") or rollout.max_num_seqs)


def _total_steps(config: Any) -> int | None:
    """Return the job's number of training steps, which verl's trainer writes into the optimizer's config."""
    optim = config.actor_rollout_ref.actor.get("optim", None) or {}
    steps = config.trainer.get("total_training_steps", None) or optim.get("total_training_steps", None)
    return int(steps) if steps and steps > 0 else None


class TransferQueueTable:
    """The router's access to it: a `rhyme_verl.histopipe.messages.GroupTable`."""

    def available(self, published: Set[str]) -> set[str]:
        """Return the training groups that the trainer has not taken: it removes those that it takes or filters."""
        tq.init()
        tags = (tq.kv_list("train") or {}).get("train", {})
        finished = {uid for uid, tag in tags.items() if tag.get("is_prompt", False) and tag.get("status") == "finished"}
        return finished | {uid for uid in published if tags.get(uid, {}).get("status", "failure") != "failure"}

    def mark_failed(self, uids: Sequence[str]) -> None:
        """Mark groups as failed, as verl's worker does; the trainer replaces them or continues without them."""
        tq.init()
        for partition, tags in (tq.kv_list() or {}).items():
            known = [uid for uid in uids if uid in tags]
            if known:
                tq.kv_batch_put(keys=known, partition_id=partition, tags=[{"status": "failure"} for _ in known])
