"""verl's replay buffers with a shorter polling interval, which record when the trainer waits for a batch.

Set as `trainer.v1.sampler.custom_sampler`. Appends one JSON line per training batch to `samples.jsonl` in the folder
RHYME_BENCH_TIMES.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync

POLL_SECONDS = 0.2


class _Recorded:
    def __init__(self, **arguments: Any) -> None:
        metric = (arguments.get("sampler_kwargs") or {}).get("filter_groups_metric")  # not passed directly
        super().__init__(**{**arguments, "poll_interval": POLL_SECONDS, "filter_groups_metric": metric})
        self._samples = Path(os.environ["RHYME_BENCH_TIMES"]) / "samples.jsonl"
        self._samples.parent.mkdir(parents=True, exist_ok=True)

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[KVBatchMeta, dict]:
        asked = time.time()
        batch, metrics = super().sample(  # type: ignore[misc]
            global_steps=global_steps, partition_id=partition_id, batch_size=batch_size
        )
        if partition_id == "train":
            versions = [(tag["min_global_steps"], tag["max_global_steps"]) for tag in batch.tags]
            groups = sorted({key.partition("_")[0] for key in batch.keys})
            line = {"step": global_steps, "asked": asked, "got": time.time(), "versions": versions, "groups": groups}
            with open(self._samples, "a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        return batch, metrics


class RecordedReplayBuffer(_Recorded, ReplayBuffer):
    """The replay buffer of the trainer mode `sync`."""


class RecordedReplayBufferAsync(_Recorded, ReplayBufferAsync):
    """The replay buffer of the asynchronous trainer modes."""
