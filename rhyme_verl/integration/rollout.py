"""The rollout of `rollout.name=rhyme`: verl's vLLM rollout with HistoSpec in the engine.

Overrides hooks of verl 0.9 only. Around `generate`, the prompt's history is fetched for the engine, and the answer is
sent to the history. Per-token work that RL does not use is left out: streaming tokens to the server and detokenization.
Requests to the server's HTTP endpoints are drafted, but their answers are not remembered.
"""

from __future__ import annotations

import asyncio
import logging
import os
from functools import partial
from typing import Any

import numpy as np
import psutil
import ray
from ray.exceptions import RayError
from verl.plugin.platform import get_platform
from verl.workers.rollout.replica import RolloutMode, TokenOutput
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer, vLLMReplica
from verl.workers.rollout.vllm_rollout.vllm_rollout import ServerAdapter

from rhyme_verl.config import load_config, rhyme_settings
from rhyme_verl.history.server_history import ReplicaHistory, is_speaker
from rhyme_verl.history.vocabulary import vocabulary_of
from rhyme_verl.histospec.engine_arguments import admit_drafting, speculative_config, with_settings
from rhyme_verl.integration.engine_client import QuietEngine, call_all_engines, end_engine, engine_processes
from rhyme_verl.integration.preflight import check_engine_kwargs
from rhyme_verl.request_id import tag_of
from rhyme_verl.telemetry.logs import LogOnce
from rhyme_verl.telemetry.prometheus import ReplicaMetrics
from rhyme_verl.telemetry.rollout_stats import RolloutStats
from rhyme_verl.telemetry.step_metrics import MetricsReporter

logger = logging.getLogger(__name__)

ENGINE_CHECK_SECONDS = 1.0
MAX_CALLS = 1 << 16  # concurrent calls of a server: all requests that a router may send, and those that control it
ROUTER_SECONDS = 5.0  # time limit for saving the lengths of answers, which a weight update waits for


class RhymeServerAdapter(ServerAdapter):
    """The trainer's client for a rhyme server; verl derives the server's name from `rollout.name`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        job_id = ray.get_runtime_context().get_job_id()
        if job_id not in self.zmq_handle:
            raise RuntimeError(f"verl's weights socket {self.zmq_handle} lacks the job's id: install a supported verl")
        self.zmq_handle = self.zmq_handle.replace(job_id, _weights_socket_id())

    async def update_weights(self, *args: Any, **kwargs: Any) -> None:
        """Update the weights as verl does, but raise if the server is dead; verl would wait for it forever."""
        if self._ensure_server_handle():
            await self.server_handle.rhyme_check.remote()
        await super().update_weights(*args, **kwargs)


class RhymeHttpServer(vLLMHttpServer):
    """verl's vLLM server with HistoSpec, which drafts from earlier answers to a prompt, from any replica."""

    def _validate_configs(self, *args: Any, **kwargs: Any) -> None:
        super()._validate_configs(*args, **kwargs)
        self._rhyme = load_config(rhyme_settings(self.config))
        check_engine_kwargs(self.config, self._rhyme)
        if self._rhyme.spec.enabled and (changed := admit_drafting(os.environ)):
            logger.info("HistoSpec needs other variables, which are now %s", changed)

    def _post_init(self, *args: Any, **kwargs: Any) -> None:
        super()._post_init(*args, **kwargs)
        os.environ["VERL_RAY_JOB_ID"] = _weights_socket_id()
        self._history: ReplicaHistory | None = None
        self._router: Any = None
        self._log_once = LogOnce(logger)
        self._stats = RolloutStats(self._rhyme.stats_path, self.replica_rank)
        self._metrics = MetricsReporter()
        self._metrics.start()
        self._prometheus = ReplicaMetrics(self.replica_rank)

    def _get_worker_extension_cls(self, *args: Any, **kwargs: Any) -> str:
        name = "RhymeCpuWorkerExtension" if get_platform().device_name == "cpu" else "RhymeWorkerExtension"
        return f"rhyme_verl.integration.worker_extension.{name}"

    def _preprocess_engine_kwargs(self, engine_kwargs: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        super()._preprocess_engine_kwargs(engine_kwargs, *args, **kwargs)
        if self.replica_world_size == 1:
            # verl asks for a separate worker process. With a single device, it only adds a message hop per step and a
            # busy-waiting process.
            engine_kwargs.setdefault("distributed_executor_backend", "uni")
        spec = self._rhyme.spec
        if not spec.enabled:
            return
        engine_kwargs["speculative_config"] = speculative_config(spec.max_draft_tokens)
        engine_kwargs["additional_config"] = with_settings(engine_kwargs.get("additional_config"), self._rhyme)

    async def run_server(self, *args: Any, **kwargs: Any) -> None:
        await super().run_server(*args, **kwargs)
        self._watcher = asyncio.create_task(self._end_with_engine(engine_processes()))
        streams = self.config.enable_rollout_routing_replay  # vLLM returns the routing with the last of many outputs
        self.engine: Any = QuietEngine(self.engine, self._stats.running, streams=streams)
        if not self._rhyme.spec.enabled or self.engine.vllm_config.speculative_config is None:  # or has been taken out
            return
        address = self._server_address if self.nnodes > 1 else None
        vocabulary = vocabulary_of(self.model_config.tokenizer, self.model_config.hf_config)
        self._history = ReplicaHistory(self._rhyme.history, vocabulary, address)
        answers = await self._history.bind(partial(call_all_engines, self.engine))
        num_engines = self.config.data_parallel_size
        if sum(answers) != num_engines:
            raise RuntimeError(
                f"{sum(answers)} of {num_engines} engines of replica {self.replica_rank} loaded HistoSpec's proposer: "
                f"{answers}"
            )
        logger.info(
            "HistoSpec drafts up to %d tokens on replica %d", self._rhyme.spec.max_draft_tokens, self.replica_rank
        )

    async def generate(
        self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str, *args: Any, **kwargs: Any
    ) -> TokenOutput:
        """Generate as verl's server does, with the same arguments and result; draft from the history and add to it."""
        if not sampling_params.get("stop"):
            sampling_params.setdefault("detokenize", False)
        elif self._rhyme.spec.enabled:
            message = "requests with stop strings get no drafts, because vLLM would keep tokens after the stop: %s"
            self._log_once(logging.WARNING, message, "name stop_token_ids instead, if possible")
        tag = tag_of(request_id)
        root_len = len(prompt_ids) if tag is None else tag.prompt_tokens
        # A context that the agent loop has rewritten holds sampled text, so it hardly ever comes again.
        history = self._history if tag is None or tag.prompt_tokens else None
        if history is not None:
            prompt = np.asarray(prompt_ids, dtype=np.int32)
            trajectory = history.begin(prompt, self.global_steps or 0, tag)
            if tag is None:
                root_len = trajectory.root_len
        tokens: list[int] = []
        try:
            output = await super().generate(prompt_ids, sampling_params, request_id, *args, **kwargs)
            tokens = output.token_ids
        finally:
            if history is not None:
                answer = np.asarray(tokens, dtype=np.int32)
                history.end(trajectory, prompt, answer, self.global_steps or 0)
        if tokens:  # an answer is counted with its first tokens, which follow its first prompt
            self._stats.add_tokens(len(tokens), is_new_answer=len(prompt_ids) == root_len)
        return output

    async def _end_with_engine(self, processes: list[psutil.Process]) -> None:
        """End this process when its engine has died: verl and the router notice only dead servers."""
        while not self.engine.errored:
            await asyncio.sleep(ENGINE_CHECK_SECONDS)
        logger.error("the engine of replica %d is dead, and its server ends", self.replica_rank)
        try:
            await end_engine(self.engine, processes)
        finally:
            os._exit(1)

    async def rhyme_check(self) -> None:
        """Return if the engine is alive.

        Raises:
            vllm.v1.engine.exceptions.EngineDeadError: it is not.
        """
        await self.engine.check_health()

    async def rhyme_stay(self) -> None:
        """Never return, so that the caller notices when this server dies."""
        await asyncio.Event().wait()

    async def rhyme_set_router(self, router: Any) -> None:
        """Tell this router, HistoPipe's, from now on of every step that is finished."""
        self._router = router

    async def rhyme_cache_tokens(self) -> int:
        """Return the capacity of the engines' KV caches in tokens; 0 if it is unknown."""
        cache = self.engine.vllm_config.cache_config
        return int((cache.kv_cache_size_tokens or 0) * self.config.data_parallel_size)

    async def set_global_steps(self, global_steps: int, *args: Any, **kwargs: Any) -> None:
        """Set the version of the new weights; verl saves the step's checkpoint, if any, just before this call.

        In `sync` mode, the rollout with the previous weights is complete.
        """
        num_standalone = 0
        if self.rollout_mode is RolloutMode.STANDALONE:
            num_standalone = self.config.n_gpus_per_node * self.config.nnodes // self.replica_world_size
        speaks = is_speaker(self.replica_rank, num_standalone)
        await self._flush_stats(speaks)
        if self._history is not None:
            await self._history.finish_step(global_steps, tells_store=speaks)
        if self._router is not None and speaks:
            try:
                await asyncio.wait_for(self._router.finish_step.remote(global_steps), ROUTER_SECONDS)
            except (RayError, TimeoutError, asyncio.TimeoutError) as error:
                reason = str(error).partition("\n")[0] or type(error).__name__
                self._log_once(logging.WARNING, "the lengths of answers may be missing in checkpoints: %s", reason)
        await super().set_global_steps(global_steps, *args, **kwargs)

    async def _flush_stats(self, with_store: bool) -> None:
        totals: dict[str, float] = {}
        if self._history is not None:
            for worker in await call_all_engines(self.engine, "rhyme_stats"):
                for name, value in worker.items():
                    totals[name] = totals.get(name, 0) + value
            store = await self._history.counters() if with_store else None
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


def _weights_socket_id() -> str:
    """Return this job's id in the name of its weights' socket. verl's id is the same in all Ray clusters of a machine,
    so jobs in two clusters would receive each other's weights.
    """
    context = ray.get_runtime_context()
    return f"{context.get_job_id()}-{context.gcs_address.rpartition(':')[2]}"


class RhymeReplica(vLLMReplica):
    """verl's vLLM replica that starts RhymeHttpServer."""

    # verl's limit is `max_num_seqs` and a few. Requests beyond it, which wait in `generate` for a weight update, would
    # keep that update's own calls from running.
    max_concurrency = MAX_CALLS

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.server_class = ray.remote(RhymeHttpServer)

    def _get_server_name_prefix(self, *args: Any, **kwargs: Any) -> str:
        return "rhyme_"
