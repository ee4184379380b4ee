"""verl's agent-loop manager and worker, extended for HistoPipe and traces.

`preflight` sets `actor_rollout_ref.rollout.agent.agent_loop_manager_class` to this manager. Batches, uids, samples,
validation, failure handling and the content of TransferQueue remain verl's. In addition, requests carry their answer's
identity, rewards are sent to the history, and trajectories are recorded when their reward is known. With HistoPipe, the
manager submits every batch to the router before verl dispatches it, an answer waits for its lane before it is prepared,
and a finished group waits for its publication before verl marks it (see `rhyme_verl.histopipe.units`).
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import ray
import transfer_queue as tq
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ, AgentLoopWorkerTQ

from rhyme_verl._core import prompt_key
from rhyme_verl.config import RhymeConfig, load_config, rhyme_settings
from rhyme_verl.histopipe.messages import Finished, Group
from rhyme_verl.histopipe.router import RouterSettings
from rhyme_verl.histopipe.scheduler import Job
from rhyme_verl.histopipe.units import default_shape
from rhyme_verl.histopipe.worker_lanes import WorkerLanes
from rhyme_verl.history.client import HistoryClient
from rhyme_verl.history.vocabulary import vocabulary_of
from rhyme_verl.integration.routed_client import RunningAnswer, running_answer, with_identity, with_lanes
from rhyme_verl.request_id import AnswerId, RequestTag
from rhyme_verl.sim.choose import simulate_at_low_priority
from rhyme_verl.telemetry.logs import LogOnce
from rhyme_verl.telemetry.step_metrics import MetricsReporter
from rhyme_verl.telemetry.trace_recorder import TrajectoryRecorder

logger = logging.getLogger(__name__)

EPOCH_BATCHES = 64  # batches dispatched lately, whose epochs a worker keeps
_VerlWorker = AgentLoopWorkerTQ.__ray_metadata__.modified_class  # type: ignore[attr-defined]
for _hook in ("_run_prompt", "_run_agent_loop", "_agent_loop_postprocess", "_compute_score"):
    if not hasattr(_VerlWorker, _hook):
        raise ImportError(f"verl's agent-loop worker has no {_hook}: install a verl that rhyme_verl supports")


class RhymeAgentLoopWorker(_VerlWorker):  # type: ignore[misc, valid-type]
    """verl's agent-loop worker; answers wait for lanes, their ends are reported, and trajectories are recorded."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        rollout = self.config.actor_rollout_ref.rollout
        rhyme = load_config(rhyme_settings(rollout))
        self._history: HistoryClient | None = None
        if rollout.name == "rhyme" and rhyme.spec.enabled:
            self._history = HistoryClient(rhyme.history, vocabulary_of(self.tokenizer, self.model_config.hf_config))
        self._epochs: deque[dict[str, int]] = deque(maxlen=EPOCH_BATCHES)
        self._recorder = None if rhyme.trace.path is None else TrajectoryRecorder(rhyme.trace.path)
        self._log_once = LogOnce(logger)
        self._lanes: WorkerLanes | None = None
        self.llm_client: Any
        if self._history is not None:
            self.llm_client = with_identity(self.llm_client)

    async def use_router(self, name: str) -> None:
        """Use the router, which knows this worker as `name`; groups are submitted to it before they arrive here."""
        self._lanes = WorkerLanes(self.llm_client._load_balancer, name)
        self.llm_client = with_lanes(self.llm_client, self._lanes)

    async def stay(self) -> None:
        """Never return, so that the caller notices when this worker dies."""
        await asyncio.Event().wait()

    async def generate_sequences(self, batch: Any, **named: Any) -> None:
        if self._lanes is not None:
            self._lanes.follow(list(batch["uid"]))
        await super().generate_sequences(batch, **named)

    async def set_epochs(self, epochs: dict[str, int]) -> None:
        """Receive the epochs of the next batch's groups, by uid."""
        self._epochs.append(epochs)

    async def _run_prompt(
        self, prompt: dict[str, Any], sampling_params: dict[str, Any], trajectory: dict[str, Any], **named: Any
    ) -> None:
        uid, validate = prompt["uid"], bool(trajectory["validate"])
        if self._lanes is not None:
            await self._lanes.open(uid, _num_samples(self.rollout_config, prompt, validate))
        if self._recorder is not None:
            epoch = next((epochs[uid] for epochs in reversed(self._epochs) if uid in epochs), 0)
            self._recorder.open_group(uid, epoch, validate)
        try:
            await super()._run_prompt(prompt, sampling_params, trajectory, **named)
        finally:
            if self._lanes is not None:
                self._lanes.close(uid)
            if self._recorder is not None:
                await self._recorder.close_group(uid)

    async def _run_agent_loop(self, sampling_params: dict[str, Any], trajectory: dict[str, Any], **kwargs: Any) -> Any:
        uid, sample = kwargs["uid"], kwargs["session_id"]
        running_answer.set(RunningAnswer((uid, sample)))  # verl starts one asyncio task per answer
        failed = True
        try:
            if self._lanes is not None:
                await self._lanes.lane((uid, sample))
            if self._recorder is not None:
                self._recorder.start(uid, sample)
            result = await super()._run_agent_loop(sampling_params, trajectory, **kwargs)
            failed = False
            return result
        finally:
            if self._recorder is not None:
                self._recorder.stop(uid, sample)
            if self._lanes is not None:  # verl marks a group as soon as all its samples have returned
                await self._lanes.end((uid, sample), failed)

    async def _agent_loop_postprocess(self, output: Any, validate: bool, **kwargs: Any) -> None:
        if self._lanes is not None:
            outputs = output if isinstance(output, list) else [output]
            self._lanes.finish(self._finished((kwargs["uid"], kwargs["session_id"]), outputs))
        await super()._agent_loop_postprocess(output, validate, **kwargs)

    def _finished(self, answer: AnswerId, outputs: list[Any]) -> Finished:
        """Describe an answer that has ended; it is reported before its reward is computed, so that its lane is free."""
        if not outputs:
            return Finished(answer, tokens=None)
        last = outputs[-1]
        versions = tuple(last.extra_fields.get(f"{end}_global_steps") for end in ("min", "max"))
        return Finished(
            answer,
            tokens=sum(sum(output.response_mask) for output in outputs),
            truncated=len(last.response_ids) >= self.rollout_config.response_length,
            prompt_tokens=len(outputs[0].prompt_ids),
            versions=None if None in versions else versions,
        )

    async def _compute_score(self, outputs: list[Any], kwargs: dict[str, Any], **named: Any) -> None:
        await super()._compute_score(outputs, kwargs, **named)
        output = outputs[-1]
        key = prompt_key(np.asarray(outputs[0].prompt_ids, dtype=np.int32))
        if self._history is not None and output.reward_score is not None:
            tag = RequestTag((kwargs["uid"], kwargs["session_id"]), len(outputs[0].prompt_ids))
            self._history.set_reward(key, tag.answer_key, float(output.reward_score))
        if self._recorder is not None:
            tokens = _tokens_of(outputs)
            if tokens is None:
                message = "the trace leaves out answers whose context was rewritten between two outputs, such as %s"
                self._log_once(logging.WARNING, message, f"{kwargs['uid']} ({kwargs['session_id']})")
                return
            version = output.extra_fields.get("max_global_steps")
            await self._recorder.record(
                kwargs["uid"],
                kwargs["session_id"],
                step=int(kwargs["global_steps"]) - 1 if version is None else version,
                prompt_key=key,
                prompt=outputs[0].prompt_ids,
                tokens=tokens,
                reward=output.reward_score,
            )


class _GroupTable:
    """The router's access to verl's table of groups in TransferQueue."""

    def count_available(self) -> int:
        """Return the number of finished training groups that the trainer has not taken, as in verl's replay buffer."""
        tq.init()
        tags = (tq.kv_list("train") or {}).get("train", {}).values()
        return sum(tag.get("is_prompt", False) and tag.get("status") == "finished" for tag in tags)

    def mark_failed(self, uids: Sequence[str]) -> None:
        """Mark groups as failed, as verl's worker does; the trainer replaces them or continues without them."""
        tq.init()
        for partition, tags in (tq.kv_list() or {}).items():
            known = [uid for uid in uids if uid in tags]
            if known:
                tq.kv_batch_put(keys=known, partition_id=partition, tags=[{"status": "failure"} for _ in known])


class RhymeAgentLoopManager(AgentLoopManagerTQ):
    """verl's agent-loop manager with RhymeAgentLoopWorker; submits every batch to the router before dispatching it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[no-untyped-call]
        self.agent_loop_workers_class = ray.remote(RhymeAgentLoopWorker)
        self._rhyme = load_config(rhyme_settings(self.rollout_config))
        self._records_epochs = self._rhyme.trace.path is not None
        self._num_rollouts: Counter[int] = Counter()
        self._metrics = MetricsReporter()
        self._router: Any = None

    async def _init_agent_loop_workers(self) -> None:
        await super()._init_agent_loop_workers()  # type: ignore[no-untyped-call]
        router = self.llm_client._load_balancer
        if not self._rhyme.pipe.enabled or not hasattr(router, "configure"):
            return  # the load balancer is verl's or the user's own
        workers = {f"agent_loop_worker_{index}": worker for index, worker in enumerate(self.agent_loop_workers)}
        await router.configure.remote(router_settings(self.config, self._rhyme), workers, _GroupTable())
        await asyncio.gather(*(worker.use_router.remote(name) for name, worker in workers.items()))
        self._router = router

    def generate_sequences(self, prompts: Any, **named: Any) -> None:
        """Dispatch a batch as verl does, after notifying the router and the workers of it."""
        validate = bool("validate" in prompts and prompts["validate"])
        if self._router is not None or self._records_epochs:
            uids = list(prompts["uid"])
            identities = [_digest(raw_prompt) for raw_prompt in prompts["raw_prompt"]]
            if self._records_epochs and not validate:
                self._num_rollouts.update(identities)
                epochs = {uid: self._num_rollouts[identity] for uid, identity in zip(uids, identities, strict=True)}
                ray.get([worker.set_epochs.remote(epochs) for worker in self.agent_loop_workers])  # type: ignore[union-attr]
            if self._router is not None and not self._submit(prompts, uids, identities, validate):
                self._router = None
        super().generate_sequences(prompts, **named)

    def _submit(self, prompts: Any, uids: list[str], identities: list[int], validate: bool) -> bool:
        """Submit a batch to the router; return False if HistoPipe has ended, which the router or a worker logs."""
        step = int(prompts["global_steps"])
        samples = list(prompts["__rollout_n__"]) if "__rollout_n__" in prompts else [None] * len(uids)
        groups = [
            Group(uid, identity, _num_samples(self.rollout_config, {"__rollout_n__": num}, validate), step)
            for uid, identity, num in zip(uids, identities, samples, strict=True)
        ]
        is_scheduled: bool = ray.get(self._router.submit.remote(groups, validate=validate))
        if is_scheduled and not validate:
            for line in ray.get(self._router.metrics.remote()) or ():
                self._metrics.report({f"pipe/{name}": value for name, value in line.items() if name != "step"})
        return is_scheduled


def router_settings(config: Any, rhyme: RhymeConfig) -> RouterSettings:
    """Return the settings of HistoPipe's router, given a verl job's whole config."""
    rollout = config.actor_rollout_ref.rollout
    mode = config.trainer.v1.trainer_mode
    batch_size, max_age = config.data.train_batch_size, rhyme.pipe.max_age
    warmup = (config.trainer.v1.get(mode, None) or {}).get("num_warmup_batches", 0)
    max_age = min(max_age, int(warmup)) if mode == "colocate_async" else 0
    return RouterSettings(
        job=Job(
            batch_size=batch_size,
            max_running=_max_num_seqs(rollout) * rollout.get("data_parallel_size", 1),
            max_tokens=rollout.response_length,
            max_age=max_age,
            shape=default_shape(max_age, batch_size) if mode == "colocate_async" else None,
            overlaps=mode == "separate_async",
            shares_prompts=bool(rollout.get("enable_prefix_caching", True)),
            total_steps=_total_steps(config),
        ),
        warmup_batches=warmup,
        samples=rollout.n,
        simulate=simulate_at_low_priority,
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


def _num_samples(rollout: Any, prompt: dict[str, Any], validate: bool) -> int:
    """Return the number of answers that verl's worker generates for a prompt."""
    num = prompt.get("__rollout_n__")
    return int(num if num is not None else rollout.val_kwargs.n if validate else rollout.n)


def _tokens_of(outputs: Sequence[Any]) -> list[int] | None:
    """Return an answer's tokens after its first prompt, with the tools' outputs; None if its context was rewritten.

    An agent loop may return several outputs, for example one per turn. Each has its whole context as its prompt.
    """
    text = prompt = list(outputs[0].prompt_ids)
    for output in outputs:
        if list(output.prompt_ids[: len(text)]) != text:
            return None
        text = [*output.prompt_ids, *output.response_ids]
    return text[len(prompt) :]


def _digest(raw_prompt: Any) -> int:
    """Return a uint64 that identifies a prompt in all epochs."""
    text = json.dumps(list(raw_prompt), sort_keys=True, default=_content)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _content(value: Any) -> str:
    """Represent a value that JSON does not support (image, array, bytes) by its content, equal in every epoch."""
    data = value.tobytes() if hasattr(value, "tobytes") else value
    if not isinstance(data, bytes):
        return str(data)
    form = [getattr(value, name, None) for name in ("mode", "size", "shape", "dtype")]
    return f"{type(value).__name__} {form} {hashlib.blake2b(data, digest_size=16).hexdigest()}"
