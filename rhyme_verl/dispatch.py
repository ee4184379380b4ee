"""verl's dispatch module, replaced: prompts go out as verl sends them, and finished trajectories are reported.

Named in `actor_rollout_ref.rollout.agent.agent_loop_manager_class`. A trajectory is reported when its reward is known
and before verl's trainer can see it, so that at the end of a job, when Ray kills the workers, nothing is outstanding.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from typing import Any

import numpy as np
import ray
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ, AgentLoopWorkerTQ

from rhyme_verl._core import prompt_key
from rhyme_verl.config import load_config, rhyme_settings
from rhyme_verl.history.client import HistoryClient
from rhyme_verl.recorder import TrajectoryRecorder

_VerlWorker = AgentLoopWorkerTQ.__ray_metadata__.modified_class  # type: ignore[attr-defined]


class RhymeAgentLoopWorker(_VerlWorker):  # type: ignore[misc, valid-type]
    """verl's agent loop worker that reports its trajectories: rewards to the history, all of them to the trace."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        rollout = self.config.actor_rollout_ref.rollout
        rhyme = load_config(rhyme_settings(rollout))
        self._epochs: dict[str, int] = {}
        self._recorder = None if rhyme.trace.path is None else TrajectoryRecorder(rhyme.trace.path)
        has_history = rollout.name == "rhyme" and rhyme.spec.enabled
        self._history = HistoryClient(rhyme.history) if has_history else None

    async def set_epochs(self, epochs: dict[str, int]) -> None:
        """Learn the epoch of prompts that are about to come, by uid."""
        self._epochs.update(epochs)

    async def _run_prompt(self, prompt: dict, sampling_params: dict, trajectory: dict, trace: bool = False) -> None:
        if self._recorder is None:
            return await super()._run_prompt(prompt, sampling_params, trajectory, trace)
        uid = prompt["uid"]
        self._recorder.open_group(uid, self._epochs.pop(uid, 0), bool(trajectory["validate"]))
        try:
            await super()._run_prompt(prompt, sampling_params, trajectory, trace)
        finally:
            await self._recorder.close_group(uid)

    async def _run_agent_loop(self, sampling_params: dict[str, Any], trajectory: dict[str, Any], **kwargs: Any) -> Any:
        if self._recorder is None:
            return await super()._run_agent_loop(sampling_params, trajectory, **kwargs)
        self._recorder.start(kwargs["uid"], kwargs["session_id"])
        try:
            return await super()._run_agent_loop(sampling_params, trajectory, **kwargs)
        finally:
            self._recorder.stop(kwargs["uid"], kwargs["session_id"])

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


def _up_to_last_generated(output: Any) -> np.ndarray:
    """The response (int32 [tokens]) as the server knew it last: without a tool's words after the policy's last one."""
    num_tokens = len(np.trim_zeros(np.asarray(output.response_mask), "b"))
    return np.asarray(output.response_ids[:num_tokens], dtype=np.int32)


def _digest(raw_prompt: Any) -> bytes:
    return hashlib.blake2b(json.dumps(list(raw_prompt), sort_keys=True, default=str).encode(), digest_size=16).digest()
