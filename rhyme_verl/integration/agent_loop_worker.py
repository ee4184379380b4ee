"""verl's agent-loop worker, extended for HistoPipe and traces.

Requests carry their answer's identity, rewards are sent to the history, and trajectories are recorded when their reward
is known. With HistoPipe, an answer waits for its lane before it is prepared, and a finished group waits for its
publication before verl marks it (see `rhyme_verl.histopipe.units`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ

from rhyme_verl._core import prompt_key
from rhyme_verl.config import load_config, rhyme_settings
from rhyme_verl.histopipe.messages import Finished
from rhyme_verl.histopipe.worker_lanes import WorkerLanes
from rhyme_verl.history.client import HistoryClient
from rhyme_verl.history.vocabulary import vocabulary_of
from rhyme_verl.integration.routed_client import RunningAnswer, routed, running_answer
from rhyme_verl.request_id import AnswerId, RequestTag
from rhyme_verl.telemetry.logs import LogOnce
from rhyme_verl.telemetry.trace import TrajectoryRecorder

logger = logging.getLogger(__name__)

EPOCH = "rhyme_epoch"  # of a batch, int64 [prompts]: how often the run has dispatched the prompt for training
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
        self._recorder = None if rhyme.trace.path is None else TrajectoryRecorder(rhyme.trace.path)
        self._log_once = LogOnce(logger)
        self._lanes: WorkerLanes | None = None
        self.llm_client: Any
        if self._history is not None:
            self.llm_client = routed(self.llm_client)

    async def use_router(self, name: str) -> None:
        """Use the router, which knows this worker as `name`; groups are submitted to it before they arrive here."""
        self._lanes = WorkerLanes(self.llm_client._load_balancer, name)
        self.llm_client = routed(self.llm_client, self._lanes)

    async def stay(self) -> None:
        """Never return, so that the caller notices when this worker dies."""
        await asyncio.Event().wait()

    async def generate_sequences(self, batch: Any, **named: Any) -> None:
        if self._lanes is not None:
            self._lanes.follow(list(batch["uid"]))
        await super().generate_sequences(batch, **named)

    async def _run_prompt(
        self, prompt: dict[str, Any], sampling_params: dict[str, Any], trajectory: dict[str, Any], **named: Any
    ) -> None:
        uid, epoch, validate = prompt["uid"], int(prompt.pop(EPOCH, 0)), bool(trajectory["validate"])
        if self._lanes is not None:
            await self._lanes.open(uid, num_samples(self.rollout_config, prompt, validate))
        if self._recorder is not None:
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
                self._lanes.begin(uid)
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
        outputs = output if isinstance(output, list) else [output]
        if self._lanes is not None:
            self._lanes.finish(self._finished((kwargs["uid"], kwargs["session_id"]), outputs))
        is_routed = self._lanes is not None or self._history is not None
        if is_routed and running_answer.get().prompt is None and any(sum(one.response_mask) for one in outputs):
            message = "an agent loop's requests come without their answer's context, so they are neither scheduled nor "
            message += "remembered: send them from the loop's own task, a task that it creates, or asyncio.to_thread"
            self._log_once(logging.WARNING, message)
        await super()._agent_loop_postprocess(output, validate, **kwargs)

    def _finished(self, answer: AnswerId, outputs: list[Any]) -> Finished:
        """Describe an answer that has ended; it is reported before its reward is computed, so that its lane is free."""
        if not outputs:
            return Finished(answer, tokens=None)
        last, tokens = outputs[-1], sum(sum(output.response_mask) for output in outputs)
        versions = tuple(last.extra_fields.get(f"{end}_global_steps") for end in ("min", "max"))
        return Finished(
            answer,
            tokens=tokens,
            truncated=len(last.response_ids) >= self.rollout_config.response_length,
            prompt_tokens=len(outputs[0].prompt_ids),
            tool_tokens=max(0, len(last.prompt_ids) - len(outputs[0].prompt_ids) + len(last.response_ids) - tokens),
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


def num_samples(rollout: Any, prompt: dict[str, Any], validate: bool) -> int:
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
