"""verl's rollout worker, replaced: `rollout.name=rhyme` is verl's vLLM rollout with HistoSpec in the engine.

Extends verl 0.9's hooks only. What is added around `generate`: what a prompt's history has is fetched for the engine,
answers are sent to the history, and per-token work that RL never reads (streaming every token to the server,
detokenizing) is switched off.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import numpy as np
import ray
from verl.plugin.platform import get_platform
from verl.workers.rollout.replica import TokenOutput
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer, vLLMReplica
from verl.workers.rollout.vllm_rollout.vllm_rollout import ServerAdapter

from rhyme_verl.config import load_config, rhyme_settings
from rhyme_verl.histopipe.request_id import Trajectory, trajectory_of
from rhyme_verl.history.replica import ReplicaHistory
from rhyme_verl.histospec.proposer import ADDITIONAL_CONFIG_KEY
from rhyme_verl.job import check_engine_kwargs
from rhyme_verl.metrics import MetricsReporter
from rhyme_verl.prometheus import ReplicaMetrics
from rhyme_verl.stats import RolloutStats

logger = logging.getLogger(__name__)

PROPOSER = "rhyme_verl.histospec.proposer.RhymeProposer"
NEVER_STREAM = 1 << 30  # tokens between partial outputs: the first one and the finished answer are all verl reads


class RhymeServerAdapter(ServerAdapter):
    """The trainer's client of a rhyme server; verl derives the server's name from `rollout.name`."""


class RhymeHttpServer(vLLMHttpServer):
    """verl's vLLM server with HistoSpec: drafts from the history of all answers to its prompts, whoever gave them."""

    def _validate_configs(self) -> None:
        super()._validate_configs()
        self._rhyme = load_config(rhyme_settings(self.config))
        check_engine_kwargs(self.config, self._rhyme)

    def _post_init(self, cuda_visible_devices: str) -> None:
        super()._post_init(cuda_visible_devices)
        self._history: ReplicaHistory | None = None
        self._stats = RolloutStats(self._rhyme.stats_path, self.replica_rank)
        self._requests: dict[Trajectory, str] = {}  # that run, by what the router knows them by
        self._metrics = MetricsReporter()
        self._prometheus = ReplicaMetrics(self.replica_rank)

    def _get_worker_extension_cls(self) -> str:
        name = "RhymeCpuWorkerExtension" if get_platform().device_name == "cpu" else "RhymeWorkerExtension"
        return f"rhyme_verl.worker_extension.{name}"

    def _preprocess_engine_kwargs(self, engine_kwargs: dict) -> None:
        super()._preprocess_engine_kwargs(engine_kwargs)
        engine_kwargs.setdefault("stream_interval", NEVER_STREAM)
        if self.replica_world_size == 1:
            # verl asks for a worker process of its own; for one device that is a message hop, and a busy-waiting
            # process, in every step.
            engine_kwargs.setdefault("distributed_executor_backend", "uni")
        spec = self._rhyme.spec
        if not spec.enabled:
            return
        engine_kwargs["speculative_config"] = {
            "method": "custom_class",
            "model": PROPOSER,
            "num_speculative_tokens": spec.max_draft_tokens,
        }
        additional = dict(engine_kwargs.get("additional_config") or {})
        additional[ADDITIONAL_CONFIG_KEY] = dataclasses.asdict(self._rhyme)
        engine_kwargs["additional_config"] = additional
        # As soon as one request comes within a draft of the model length, vLLM drafts zeros for the whole batch; with
        # room for one more draft that never happens. Answers do not get longer: verl caps them on its own.
        limit = self.model_config.hf_config.max_position_embeddings
        engine_kwargs.setdefault("max_model_len", min(limit, self.config.max_model_len + spec.max_draft_tokens + 1))

    async def run_server(self, args: Any) -> None:
        await super().run_server(args)
        if not self._rhyme.spec.enabled:
            return
        self._history = ReplicaHistory(self._rhyme.history)
        bound = await self.engine.collective_rpc("rhyme_bind", args=(self._history.endpoint,))
        if not any(bound):
            raise RuntimeError(f"no worker of replica {self.replica_rank} took HistoSpec's proposer: {bound}")
        logger.info(
            "HistoSpec drafts up to %d tokens on replica %d", self._rhyme.spec.max_draft_tokens, self.replica_rank
        )

    async def generate(
        self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str, *args: Any, **kwargs: Any
    ) -> TokenOutput:
        """Generate as verl's server does (same arguments and result), drafting from history and adding to it."""
        if not sampling_params.get("stop"):
            sampling_params.setdefault("detokenize", False)
        if self._history is None:
            return await self._generate(prompt_ids, sampling_params, request_id, *args, **kwargs)
        prompt = np.asarray(prompt_ids, dtype=np.int32)
        trajectory = self._history.begin(prompt, self.global_steps or 0)
        output = await self._generate(prompt_ids, sampling_params, request_id, *args, **kwargs)
        if output.token_ids:
            answer = np.asarray(output.token_ids, dtype=np.int32)
            self._history.end(trajectory, prompt, answer, self.global_steps or 0)
        return output

    async def _generate(
        self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str, *args: Any, **kwargs: Any
    ) -> TokenOutput:
        trajectory = trajectory_of(request_id)
        if trajectory is not None:
            self._requests[trajectory] = request_id
        try:
            with self._stats.running():
                output = await super().generate(prompt_ids, sampling_params, request_id, *args, **kwargs)
        finally:
            if trajectory is not None:
                self._requests.pop(trajectory, None)
        self._stats.add_answer(len(output.token_ids))
        return output

    async def rhyme_running(self) -> int:
        """Return how many requests are here."""
        return self._stats.num_running

    async def rhyme_cache_tokens(self) -> int:
        """Return how many tokens the engine's cache holds; 0 if that is not known."""
        cache = self.engine.vllm_config.cache_config
        return (cache.num_gpu_blocks or 0) * cache.block_size

    async def rhyme_abort(self, trajectory: Trajectory) -> bool:
        """Abort the request of a trajectory, whose client resumes it; returns whether there was one."""
        request_id = self._requests.get(trajectory)
        if request_id is None:
            return False
        await self.engine.abort(request_id)
        return True

    async def set_global_steps(self, global_steps: int) -> None:
        """Take the version of new weights; verl has saved its checkpoint of this step, if any, just before.

        In `sync` mode the rollout done with the previous weights is complete.
        """
        await self._flush_stats()
        if self._history is not None:
            await self._history.finish_step(global_steps)
        await super().set_global_steps(global_steps)

    async def _flush_stats(self) -> None:
        totals: dict[str, float] = {}
        if self._history is not None:
            for worker in await self.engine.collective_rpc("rhyme_stats"):
                for name, value in worker.items():  # several draft if the engine is data-parallel
                    totals[name] = totals.get(name, 0) + value
            store = await self._history.counters()
            if store is not None:
                totals.update(
                    history_store_tokens=store.tokens,
                    history_store_bytes=store.bytes,
                    history_store_evicted_tokens=store.evicted_tokens,
                )
        counts = self._stats.flush(self.global_steps, totals)
        if counts:
            self._prometheus.add(counts)
            await self._metrics.add_rollout(self.replica_rank, counts)


class RhymeReplica(vLLMReplica):
    """verl's vLLM replica that starts RhymeHttpServer."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.server_class = ray.remote(RhymeHttpServer)

    def _get_server_name_prefix(self) -> str:
        return "rhyme_"
