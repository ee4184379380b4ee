"""vLLM's CPU worker in a verl job: how it receives weights, and which core it runs on.

Weight updates differ from those on a GPU in two ways. The received tensors are views of a shared-memory segment that is
closed right after, so they are copied. vLLM repacks linear layers for its CPU kernels after loading, so new weights go
through the runner's `reload_weights`. This skips embeddings: with tied embeddings, the packed LM head would keep
sampling from the old weights, so embeddings are processed again.

A worker has one compute thread (see `CpuPlatform.rollout_env_vars`) and is pinned to a core, which it shares only if
there are more workers than cores, so that replicas do not slow each other down.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import Any

import torch
from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension


class CpuWorkerExtension(vLLMColocateWorkerExtension):
    """verl's worker extension, pinned to a core, with a weight update that works on vLLM's CPU build.

    For verl's own `rollout.name=vllm` on the CPU platform, set it as
    `actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls`.
    """

    model_runner: Any

    def __new__(cls, **kwargs: Any) -> CpuWorkerExtension:
        parallel = kwargs["vllm_config"].parallel_config
        replica = int(os.environ.get("VERL_REPLICA_RANK", "0"))  # set by verl's server
        engine = replica * parallel.data_parallel_size + parallel.data_parallel_rank
        core = core_of_worker(os.sched_getaffinity(0), engine * parallel.world_size + kwargs["rank"])
        os.sched_setaffinity(0, {core})
        return super().__new__(cls, **kwargs)  # type: ignore[no-any-return, no-untyped-call]

    def update_weights_from_ipc(
        self, peft_config: dict[str, Any] | None = None, base_sync_done: bool = False, use_shm: bool = False
    ) -> None:
        from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

        if peft_config:
            raise ValueError("LoRA is not supported on the CPU platform: set actor_rollout_ref.model.lora_rank=0")
        weights: list[tuple[str, torch.Tensor]] = []

        def keep(bucket: list[tuple[str, torch.Tensor]], is_last: bool) -> None:
            weights.extend((name, tensor.clone()) for name, tensor in bucket)

        receiver = BucketedWeightReceiver(self._get_zmq_handle(), torch.device("cpu"), use_shm=use_shm)
        receiver.receive_weights(on_bucket_received=keep)
        self.model_runner.reload_weights(iter(weights))
        for module in self.model_runner.model.modules():
            if isinstance(module, VocabParallelEmbedding):
                module.quant_method.process_weights_after_loading(module)


def core_of_worker(cores: Collection[int], worker: int) -> int:
    """Return the core of a worker. Workers are numbered over all replicas and take the cores in turn."""
    return sorted(cores)[worker % len(cores)]
