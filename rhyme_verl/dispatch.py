"""verl's dispatch module, replaced: prompts go out as verl sends them, and finished trajectories are reported.

Named in `actor_rollout_ref.rollout.agent.agent_loop_manager_class`. A trajectory is reported when its reward is known
and before verl's trainer can see it, so that at the end of a job, when Ray kills the workers, nothing is outstanding.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections import Counter
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import numpy as np
import pyarrow as pa
import ray
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ, AgentLoopWorkerTQ

from rhyme_verl._core import prompt_key
from rhyme_verl.config import load_config, rhyme_settings
from rhyme_verl.trace import TraceWriter, Trajectory

logger = logging.getLogger(__name__)

_VerlWorker = AgentLoopWorkerTQ.__ray_metadata__.modified_class  # type: ignore[attr-defined]


@dataclass
class PromptGroup:
    """A prompt's trajectories in this worker, from dispatch to the end of the last one."""

    epoch: int
    validate: bool
    started: bool = False
    unscored: set[int] = field(default_factory=set)  # session ids

    @property
    def is_unfinished(self) -> bool:
        return not self.started or bool(self.unscored)


class RhymeAgentLoopWorker(_VerlWorker):  # type: ignore[misc, valid-type]
    """verl's agent loop worker that records its trajectories."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        rhyme = load_config(rhyme_settings(self.config.actor_rollout_ref.rollout))
        self._epochs: dict[str, int] = {}
        self._groups: dict[str, PromptGroup] = {}
        self._trace: TraceWriter | None = None
        if rhyme.trace.path is not None:
            try:
                self._trace = TraceWriter(rhyme.trace.path, uuid4().hex[:12])
            except OSError as error:
                self._stop_trace(error)

    async def set_epochs(self, epochs: dict[str, int]) -> None:
        """Learn the epoch of prompts that are about to come, by uid."""
        self._epochs.update(epochs)

    async def _run_prompt(self, prompt: dict, sampling_params: dict, trajectory: dict, trace: bool = False) -> None:
        uid = prompt["uid"]
        self._groups[uid] = PromptGroup(self._epochs.pop(uid, 0), bool(trajectory["validate"]))
        try:
            await super()._run_prompt(prompt, sampling_params, trajectory, trace)
        finally:
            del self._groups[uid]
            await self._flush_if_idle()

    async def _run_agent_loop(self, sampling_params: dict[str, Any], trajectory: dict[str, Any], **kwargs: Any) -> Any:
        group, session_id = self._groups[kwargs["uid"]], kwargs["session_id"]
        group.started = True
        group.unscored.add(session_id)
        try:
            return await super()._run_agent_loop(sampling_params, trajectory, **kwargs)
        finally:
            group.unscored.discard(session_id)

    async def _compute_score(self, outputs: list[Any], kwargs: dict) -> None:
        await super()._compute_score(outputs, kwargs)
        group = self._groups[kwargs["uid"]]
        await self._report(outputs[-1], group, kwargs)
        group.unscored.discard(kwargs["session_id"])
        await self._flush_if_idle()

    async def _report(self, output: Any, group: PromptGroup, kwargs: dict) -> None:
        key = prompt_key(np.asarray(output.prompt_ids, dtype=np.int32))
        if self._trace is None:
            return
        version = output.extra_fields.get("max_global_steps")
        trajectory = Trajectory(
            step=int(kwargs["global_steps"]) - 1 if version is None else version,
            epoch=group.epoch,
            prompt_key=key,
            sample=kwargs["session_id"],
            prompt=output.prompt_ids,
            tokens=output.response_ids,
            reward=output.reward_score,
            validate=group.validate,
        )
        try:
            await asyncio.to_thread(self._trace.add, trajectory)
        except (OSError, pa.ArrowException) as error:
            self._stop_trace(error)

    async def _flush_if_idle(self) -> None:
        if self._trace is None or any(group.is_unfinished for group in self._groups.values()):
            return
        try:
            await asyncio.to_thread(self._trace.flush)
        except (OSError, pa.ArrowException) as error:
            self._stop_trace(error)

    def _stop_trace(self, error: Exception) -> None:
        self._trace = None
        logger.error("the trace cannot be written and ends here in this worker; rollouts go on: %s", error)


class RhymeAgentLoopManager(AgentLoopManagerTQ):
    """verl's agent loop manager with RhymeAgentLoopWorker; counts how often each training prompt went out."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.agent_loop_workers_class = ray.remote(RhymeAgentLoopWorker)
        self._records_epochs = load_config(rhyme_settings(self.rollout_config)).trace.path is not None
        self._num_rollouts: Counter[bytes] = Counter()

    def generate_sequences(self, prompts: Any) -> None:
        """Dispatch a batch as verl does; its prompts' epochs reach the workers first."""
        if self._records_epochs and not ("validate" in prompts and prompts["validate"]):
            epochs = {}
            for uid, raw_prompt in zip(list(prompts["uid"]), list(prompts["raw_prompt"]), strict=True):
                identity = _digest(raw_prompt)
                self._num_rollouts[identity] += 1
                epochs[uid] = self._num_rollouts[identity]
            ray.get([worker.set_epochs.remote(epochs) for worker in self.agent_loop_workers])
        super().generate_sequences(prompts)


def _digest(raw_prompt: Any) -> bytes:
    return hashlib.blake2b(json.dumps(list(raw_prompt), sort_keys=True, default=str).encode(), digest_size=16).digest()
