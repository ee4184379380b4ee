"""verl's dispatch module, replaced: it tells HistoPipe's router what is to come, and reports finished trajectories.

Named in `actor_rollout_ref.rollout.agent.agent_loop_manager_class`. A trajectory is reported when its reward is known
and before verl's trainer can see it, so that at the end of a job, when Ray kills the workers, nothing is outstanding.
Batches, uids, samples, validation, what is put into TransferQueue and failures are verl's own; finished prompts can be
kept back until those that are rolled out together with them are finished too (see `rhyme_verl.histopipe.intake`).
"""

from __future__ import annotations

import asyncio
import copy
import hashlib
import json
from collections import Counter
from collections.abc import Coroutine
from contextvars import ContextVar
from typing import Any

import numpy as np
import ray
import transfer_queue as tq
from ray.exceptions import RayActorError
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ, AgentLoopWorkerTQ

from rhyme_verl._core import prompt_key
from rhyme_verl.config import RhymeConfig, load_config, rhyme_settings
from rhyme_verl.histopipe.dispatcher import Group
from rhyme_verl.histopipe.intake import PipeMode
from rhyme_verl.histopipe.places import Finish, Places
from rhyme_verl.histopipe.request_id import Trajectory, tag, trajectory_of
from rhyme_verl.histopipe.router import RouterSettings
from rhyme_verl.history.client import HistoryClient
from rhyme_verl.history.vocabulary import vocabulary_of
from rhyme_verl.job import pairs_would_wait
from rhyme_verl.metrics import MetricsReporter
from rhyme_verl.recorder import TrajectoryRecorder

MODES: dict[str, PipeMode] = {"sync": "barrier", "colocate_async": "pairs", "separate_async": "stream"}
PREPARE_SECONDS = 1.0  # after which an answer is prepared without a place
MAX_DEATHS = 8  # of replicas that one request survives

_VerlWorker = AgentLoopWorkerTQ.__ray_metadata__.modified_class  # type: ignore[attr-defined]
_trajectory: ContextVar[Trajectory] = ContextVar("trajectory")


class _TaggingClient:
    """Mixed into verl's client of the servers: requests wait for their place, say which trajectory they belong to, and
    survive their replica.

    verl makes a fresh request id for every trajectory, without its uid, sends all requests at once, and lets a request
    fail with its replica.
    """

    _load_balancer: Any
    places: Places

    def _vllm_request_id(self, request_id: str) -> str:
        """Let the server know the trajectory, too."""
        trajectory = trajectory_of(request_id)
        plain = super()._vllm_request_id(request_id)  # type: ignore[misc]
        return plain if trajectory is None else tag(plain, *trajectory)

    def _release_server(self, server_id: str, request_id: str | None = None) -> None:
        self.places.release(server_id, request_id)

    async def generate(self, request_id: str, **kwargs: Any) -> Any:
        trajectory = _trajectory.get(None)
        tagged = request_id if trajectory is None else tag(request_id, *trajectory)
        if trajectory is not None:
            await self.places.wait_for_place(trajectory)
        for _ in range(MAX_DEATHS):
            try:
                return await super().generate(tagged, **kwargs)  # type: ignore[misc]
            except RayActorError:
                if trajectory is None or not await self._load_balancer.fail.remote(tagged):
                    raise
        return await super().generate(tagged, **kwargs)  # type: ignore[misc]


def _tagging(client: Any, places: Places) -> Any:
    """Return the client with `_TaggingClient` before its own class, whichever of verl's it is."""
    tagging = copy.copy(client)
    tagging.__class__ = type("Tagging" + type(client).__name__, (_TaggingClient, type(client)), {"places": places})
    return tagging


class _OpenPrompt:
    """A prompt whose answers are being generated."""

    def __init__(self, num_samples: int) -> None:
        self.left = num_samples
        self.published = asyncio.Event()
        self.reported: set[int] = set()  # samples whose end the router knows


class RhymeAgentLoopWorker(_VerlWorker):  # type: ignore[misc, valid-type]
    """verl's agent loop worker that reports: ends to the router, rewards to the history, trajectories to the trace."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        rollout = self.config.actor_rollout_ref.rollout
        rhyme = load_config(rhyme_settings(rollout))
        self._epochs: dict[str, int] = {}
        self._recorder = None if rhyme.trace.path is None else TrajectoryRecorder(rhyme.trace.path)
        has_history = rollout.name == "rhyme" and rhyme.spec.enabled
        self._history: HistoryClient | None = None
        if has_history:
            self._history = HistoryClient(rhyme.history, vocabulary_of(self.tokenizer, self.model_config.hf_config))
        self._prompts: dict[str, _OpenPrompt] = {}
        self._places: Places | None = None
        self._turn = asyncio.Lock()
        self.llm_client: Any

    async def use_router(self) -> None:
        """From now on all prompts are announced to the router before they come."""
        self._places = Places(self.llm_client._load_balancer)
        self.llm_client = _tagging(self.llm_client, self._places)

    async def generate_sequences(self, batch: Any) -> None:
        if self._places is not None:
            await self._places.follow(list(batch["uid"]))
        await super().generate_sequences(batch)

    async def set_epochs(self, epochs: dict[str, int]) -> None:
        """Learn the epoch of prompts that are about to come, by uid."""
        self._epochs.update(epochs)

    async def _run_prompt(self, prompt: dict, sampling_params: dict, trajectory: dict, trace: bool = False) -> None:
        uid, validate = prompt["uid"], bool(trajectory["validate"])
        if self._places is not None:
            self._prompts[uid] = _OpenPrompt(_num_samples(self.rollout_config, prompt, validate))
        if self._recorder is not None:
            self._recorder.open_group(uid, self._epochs.pop(uid, 0), validate)
        try:
            await super()._run_prompt(prompt, sampling_params, trajectory, trace)
        finally:
            self._prompts.pop(uid, None)
            if self._recorder is not None:
                await self._recorder.close_group(uid)

    async def _run_agent_loop(self, sampling_params: dict[str, Any], trajectory: dict[str, Any], **kwargs: Any) -> Any:
        uid, sample = kwargs["uid"], kwargs["session_id"]
        _trajectory.set((uid, sample))  # of this task: verl makes one for each
        if self._recorder is not None:
            self._recorder.start(uid, sample)
        try:
            if self._places is not None:
                await self._wait_to_prepare(self._places.wait_for_place((uid, sample)))
            return await super()._run_agent_loop(sampling_params, trajectory, **kwargs)
        finally:
            if self._recorder is not None:
                self._recorder.stop(uid, sample)
            if self._places is not None:
                await self._end(self._places, uid, sample)

    async def _wait_to_prepare(self, place: Coroutine[Any, Any, None]) -> None:
        """Return when an answer has its place, or the worker has time to prepare it for one."""
        try:
            await asyncio.wait_for(place, PREPARE_SECONDS)
        except asyncio.TimeoutError:
            await self._pass_one_by_one()

    async def _pass_one_by_one(self) -> None:
        """Let the event loop do all else between two calls: what has its place starts meanwhile."""
        async with self._turn:
            await asyncio.sleep(0)

    async def _agent_loop_postprocess(self, output: Any, validate: bool, **kwargs: Any) -> None:
        if self._places is not None:
            outputs = output if isinstance(output, list) else [output]
            self._report_end(self._places, kwargs["uid"], kwargs["session_id"], outputs)
            await self._pass_one_by_one()
        await super()._agent_loop_postprocess(output, validate, **kwargs)

    def _report_end(self, places: Places, uid: str, sample: int, outputs: list[Any]) -> None:
        """Give the replica's place to another answer, before the reward is computed. Nothing is waited for."""
        self._prompts[uid].reported.add(sample)
        if not outputs:
            places.end(Finish((uid, sample), tokens=None))
            return
        last = outputs[-1]
        versions = tuple(last.extra_fields.get(f"{end}_global_steps") for end in ("min", "max"))
        places.end(
            Finish(
                (uid, sample),
                tokens=sum(sum(one.response_mask) for one in outputs),
                truncated=len(last.response_ids) >= self.rollout_config.response_length,
                prompt_tokens=len(outputs[0].prompt_ids),
                versions=None if None in versions else versions,
            )
        )

    async def _end(self, places: Places, uid: str, sample: int) -> None:
        """Return when the trainer may see the prompt, which verl marks as finished when all its samples return."""
        prompt = self._prompts[uid]
        if sample not in prompt.reported:
            self._report_end(places, uid, sample, [])
        prompt.left -= 1
        if prompt.left:
            await prompt.published.wait()
            return
        await places.wait_until_published(uid)
        prompt.published.set()

    async def _compute_score(self, outputs: list[Any], kwargs: dict) -> None:
        await super()._compute_score(outputs, kwargs)
        output = outputs[-1]
        key = prompt_key(np.asarray(output.prompt_ids, dtype=np.int32))
        if self._history is not None and output.reward_score is not None:
            self._history.set_reward(key, prompt_key(_up_to_last_generated(output)), float(output.reward_score))
        if self._recorder is not None:
            version = output.extra_fields.get("max_global_steps")
            await self._recorder.record(
                kwargs["uid"],
                kwargs["session_id"],
                step=int(kwargs["global_steps"]) - 1 if version is None else version,
                prompt_key=key,
                prompt=output.prompt_ids,
                tokens=output.response_ids,
                reward=output.reward_score,
            )


class RhymeAgentLoopManager(AgentLoopManagerTQ):
    """verl's agent loop manager with RhymeAgentLoopWorker: tells the router of every batch before it goes out."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.agent_loop_workers_class = ray.remote(RhymeAgentLoopWorker)
        self._rhyme = load_config(rhyme_settings(self.rollout_config))
        self._records_epochs = self._rhyme.trace.path is not None
        self._num_rollouts: Counter[int] = Counter()
        self._metrics = MetricsReporter()
        self._router: Any = None

    async def _init_agent_loop_workers(self) -> None:
        await super()._init_agent_loop_workers()
        router = self.llm_client._load_balancer
        if not self._rhyme.pipe.enabled or not hasattr(router, "configure"):
            return  # verl's own load balancer, or another one
        await router.configure.remote(router_settings(self.config, self._rhyme))
        await asyncio.gather(*(worker.use_router.remote() for worker in self.agent_loop_workers))
        self._router = router

    def generate_sequences(self, prompts: Any) -> None:
        """Dispatch a batch as verl does; what the router and the workers have to know of it reaches them first."""
        validate = bool("validate" in prompts and prompts["validate"])
        if self._router is not None or self._records_epochs:
            uids = list(prompts["uid"])
            identities = [_digest(raw_prompt) for raw_prompt in prompts["raw_prompt"]]
            if self._records_epochs and not validate:
                self._num_rollouts.update(identities)
                epochs = {uid: self._num_rollouts[one] for uid, one in zip(uids, identities, strict=True)}
                ray.get([worker.set_epochs.remote(epochs) for worker in self.agent_loop_workers])
            if self._router is not None:
                self._announce(prompts, uids, identities, validate)
        super().generate_sequences(prompts)

    def _announce(self, prompts: Any, uids: list[str], identities: list[int], validate: bool) -> None:
        step = int(prompts["global_steps"])
        samples = list(prompts["__rollout_n__"]) if "__rollout_n__" in prompts else [None] * len(uids)
        groups = [
            Group(uid, identity, _num_samples(self.rollout_config, {"__rollout_n__": num}, validate), step)
            for uid, identity, num in zip(uids, identities, samples, strict=True)
        ]
        available = 0 if validate else _num_finished()
        ray.get(self._router.submit.remote(groups, validate=validate, available=available))
        if not validate:
            for line in ray.get(self._router.metrics.remote()):
                self._metrics.report({f"pipe/{name}": value for name, value in line.items() if name != "step"})


def router_settings(config: Any, rhyme: RhymeConfig) -> RouterSettings:
    """Return what HistoPipe's router has to know of a verl job (its whole config)."""
    rollout = config.actor_rollout_ref.rollout
    trainer_mode = config.trainer.v1.trainer_mode
    asynchronous = config.trainer.v1.get(trainer_mode, None) or {}
    forced = rhyme.pipe.mode != "auto"
    mode: PipeMode = rhyme.pipe.mode if forced else MODES.get(trainer_mode, "stream")  # type: ignore[assignment]
    prefetched = asynchronous.get("num_warmup_batches", 0)
    if mode == "pairs" and not forced and (prefetched < 1 or pairs_would_wait(config)):
        mode = "stream" if prefetched else "barrier"
    lanes = rollout.max_num_seqs * rollout.get("data_parallel_size", 1)
    return RouterSettings(
        mode=mode,
        forced=forced,
        batch_size=config.data.train_batch_size,
        prefetched=prefetched,
        max_running=rhyme.pipe.max_running or lanes,
        max_tokens=rollout.response_length,
        step_cost_path=rhyme.pipe.step_cost_path,
        migrate=rhyme.pipe.migrate and trainer_mode != "sync",  # whose client does not resume
        log_folder=rhyme.stats_path,
        checkpoints=rhyme.history.snapshot_dir,
        resume_from=rhyme.history.resume_from,
    )


def _num_samples(rollout: Any, prompt: dict[str, Any], validate: bool) -> int:
    """Return how many answers verl's worker generates to a prompt."""
    num = prompt.get("__rollout_n__")
    return int(num if num is not None else rollout.val_kwargs.n if validate else rollout.n)


def _num_finished() -> int:
    """Return how many training prompts are finished and wait for the trainer, as verl's replay buffer counts them."""
    tags = (tq.kv_list("train") or {}).get("train", {}).values()
    return sum(tag.get("is_prompt", False) and tag.get("status") == "finished" for tag in tags)


def _up_to_last_generated(output: Any) -> np.ndarray:
    """The response (int32 [tokens]) as the server knew it last: without a tool's words after the policy's last one."""
    num_tokens = len(np.trim_zeros(np.asarray(output.response_mask), "b"))
    return np.asarray(output.response_ids[:num_tokens], dtype=np.int32)


def _digest(raw_prompt: Any) -> int:
    """Name a prompt in all epochs, as a uint64."""
    text = json.dumps(list(raw_prompt), sort_keys=True, default=_content)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _content(value: Any) -> str:
    """Stand for what JSON does not know (images, arrays, bytes) by its content, which is the same in every epoch."""
    data = value.tobytes() if hasattr(value, "tobytes") else value
    if not isinstance(data, bytes):
        return str(data)
    form = [getattr(value, name, None) for name in ("mode", "size", "shape", "dtype")]
    return f"{type(value).__name__} {form} {hashlib.blake2b(data, digest_size=16).hexdigest()}"
