"""Weight transfer from a trainer to separate rollout replicas without a GPU: a verl checkpoint engine over gloo.

verl's `separate_async` trainer needs a checkpoint engine other than `naive`, and those in verl move tensors between
accelerators. Select this one with

    actor_rollout_ref.rollout.checkpoint_engine.backend=cpu
    actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=benchmarks.jobs.cpu_checkpoint_engine

For each update, the trainer's rank 0 and all rollout workers form a gloo group, and rank 0 broadcasts the weights in
buckets. The group's key-value store describes the content of each bucket.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from datetime import timedelta
from typing import Any

import ray
import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore
from verl.checkpoint_engine.base import (
    CheckpointEngine,
    CheckpointEngineRegistry,
    TensorMeta,
    merge_weight_chunks,
    split_weight_chunks,
)

BACKEND = "cpu"
TIMEOUT = timedelta(minutes=30)  # receivers wait while a large model is gathered from its shards
ALIGNMENT = 16  # bytes; suffices for a tensor of any dtype


@CheckpointEngineRegistry.register(BACKEND)
class CpuCheckpointEngine(CheckpointEngine):
    """One end of the transfer, in a worker of the trainer or of a rollout, for all updates of a job.

    For each update, verl calls in every worker: `prepare`, `init_process_group`, `send_weights` or `receive_weights`,
    and `finalize`.
    """

    def __init__(self, bucket_size: int, is_master: bool = False) -> None:
        """
        Args:
            bucket_size: bytes per broadcast; larger tensors are sent in pieces.
            is_master: true for the trainer's rank 0, which sends.
        """
        self._bucket_size = bucket_size // ALIGNMENT * ALIGNMENT
        self._is_master = is_master
        self._store: Any = None
        self._group: Any = None

    def prepare(self) -> Any:
        """Open the group's store. Returns its host (str) and port (int) in the master, None elsewhere."""
        if not self._is_master:
            return None
        host = ray.util.get_node_ip_address()
        self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
        return host, self._store.port

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[Any]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Assign ranks: the trainer's rank 0 is rank 0, its other ranks stay outside, rollout workers follow."""
        world_size, address = 1 + rollout_world_size, metadata[0]

        def arguments(ranks: list[int]) -> dict[str, list[Any]]:
            return {"rank": ranks, "world_size": [world_size] * len(ranks), "address": [address] * len(ranks)}

        return arguments([0] + [-1] * (actor_wg_world_size - 1)), arguments(list(range(1, world_size)))

    def init_process_group(self, rank: int, world_size: int, address: tuple[str, int]) -> None:
        """Join the group. Returns when all members have joined."""
        if rank < 0:
            return
        if self._store is None:
            self._store = TCPStore(*address, is_master=False, timeout=TIMEOUT)
        self._group = ProcessGroupGloo(PrefixStore("group", self._store), rank, world_size, TIMEOUT)

    def finalize(self) -> None:
        """Leave the group."""
        self._group = None
        self._store = None

    async def send_weights(self, weights: Any, global_steps: int | None = None) -> None:
        """Broadcast all weights from the trainer's rank 0. Its other ranks only take part in gathering them.

        Args:
            weights: iterator over (name, tensor).
        """
        if self._group is None:
            for _ in weights:
                pass
            return
        bucket = torch.empty(self._bucket_size, dtype=torch.uint8)
        held: list[TensorMeta] = []
        used = num_sent = 0
        async for meta, chunk in split_weight_chunks(weights, self._bucket_size):
            if used + meta.chunk_size > self._bucket_size:
                self._broadcast(num_sent, bucket[:used], held, is_last=False)
                held, used, num_sent = [], 0, num_sent + 1
            meta.offset = used
            assert chunk is not None  # None only in senders without data
            bucket[used : used + meta.chunk_size] = chunk
            held.append(meta)
            used += -(-meta.chunk_size // ALIGNMENT) * ALIGNMENT
        self._broadcast(num_sent, bucket[:used], held, is_last=True)

    def _broadcast(self, index: int, bucket: torch.Tensor, held: list[TensorMeta], *, is_last: bool) -> None:
        metas = [{**vars(meta), "dtype": str(meta.dtype).removeprefix("torch.")} for meta in held]
        self._store.set(f"bucket/{index}", json.dumps([metas, bucket.nbytes, is_last]))
        self._group.broadcast(bucket, 0).wait()

    def receive_weights(self, global_steps: int | None = None) -> Any:
        """Return an async iterator over (name, tensor). Requesting the next tensor overwrites the last one."""
        chunks: Any = self._chunks()
        return merge_weight_chunks(chunks, self._bucket_size)

    async def _chunks(self) -> AsyncGenerator[tuple[TensorMeta, torch.Tensor], None]:
        assert self._store is not None and self._group is not None, "call init_process_group first"
        bucket = torch.empty(self._bucket_size, dtype=torch.uint8)
        index, is_last = 0, False
        while not is_last:
            metas, num_bytes, is_last = json.loads(self._store.get(f"bucket/{index}"))
            self._group.broadcast(bucket[:num_bytes], 0).wait()
            for fields in metas:
                dtype, shape = getattr(torch, fields["dtype"]), torch.Size(fields["shape"])
                meta = TensorMeta(**{**fields, "dtype": dtype, "shape": shape})
                yield meta, bucket[meta.offset : meta.offset + meta.chunk_size]
            index += 1
