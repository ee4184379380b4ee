"""verl's agent-loop manager, extended for HistoPipe and traces.

`preflight` sets `actor_rollout_ref.rollout.agent.agent_loop_manager_class` to this manager. Batches, uids, samples,
validation, failure handling and the content of TransferQueue remain verl's. In addition, the workers are those of
`agent_loop_worker`, and with HistoPipe, every batch is submitted to the router before verl dispatches it.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import Counter
from typing import Any

import numpy as np
import ray
import torch
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ

from rhyme_verl.config import load_config, rhyme_settings
from rhyme_verl.histopipe.messages import Group
from rhyme_verl.integration.agent_loop_worker import EPOCH, RhymeAgentLoopWorker, num_samples
from rhyme_verl.integration.router_settings import TransferQueueTable, router_settings
from rhyme_verl.telemetry.step_metrics import MetricsReporter

SAMPLED_BYTES = 1 << 16  # of an image, about


class RhymeAgentLoopManager(AgentLoopManagerTQ):
    """verl's agent-loop manager with RhymeAgentLoopWorker; submits every batch to the router before dispatching it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[no-untyped-call]
        self.agent_loop_workers_class = ray.remote(RhymeAgentLoopWorker)
        self._rhyme = load_config(rhyme_settings(self.rollout_config))
        self._num_rollouts: Counter[int] = Counter()
        self._metrics = MetricsReporter()
        self._reported_step: int | None = None
        self._router: Any = None

    async def _init_agent_loop_workers(self) -> None:
        await super()._init_agent_loop_workers()  # type: ignore[no-untyped-call]
        router = self.llm_client._load_balancer
        if not self._rhyme.pipe.enabled or not hasattr(router, "configure"):
            return  # the load balancer is verl's or the user's own
        workers = {f"agent_loop_worker_{index}": worker for index, worker in enumerate(self.agent_loop_workers)}
        await router.configure.remote(router_settings(self.config, self._rhyme), workers, TransferQueueTable())
        await asyncio.gather(*(worker.use_router.remote(name) for name, worker in workers.items()))
        self._router = router

    def generate_sequences(self, prompts: Any, **named: Any) -> None:
        """Dispatch a batch as verl does, after submitting it to the router, with epochs for the trace."""
        validate = bool("validate" in prompts and prompts["validate"])
        records_epochs = self._rhyme.trace.path is not None
        if self._router is not None or records_epochs:
            uids = list(prompts["uid"])
            identities = [digest_of(raw_prompt) for raw_prompt in prompts["raw_prompt"]]
            if records_epochs and not validate:
                self._num_rollouts.update(identities)
                prompts[EPOCH] = torch.tensor([self._num_rollouts[identity] for identity in identities])
            if self._router is not None and not self._submit(prompts, uids, identities, validate):
                self._router = None
        super().generate_sequences(prompts, **named)

    def _submit(self, prompts: Any, uids: list[str], identities: list[int], validate: bool) -> bool:
        """Submit a batch to the router; return False if HistoPipe has ended, which the router or a worker logs."""
        step = int(prompts["global_steps"])
        samples = list(prompts["__rollout_n__"]) if "__rollout_n__" in prompts else [None] * len(uids)
        groups = [
            Group(uid, identity, num_samples(self.rollout_config, {"__rollout_n__": num}, validate), step)
            for uid, identity, num in zip(uids, identities, samples, strict=True)
        ]
        is_scheduled: bool = ray.get(self._router.submit.remote(groups, validate=validate))
        if is_scheduled and not validate and step != self._reported_step:  # not for groups that replace filtered ones
            self._reported_step = step
            for line in ray.get(self._router.metrics.remote()) or ():
                self._metrics.report({f"pipe/{name}": value for name, value in line.items() if name != "step"})
        return is_scheduled


def digest_of(raw_prompt: Any) -> int:
    """Return a uint64 that identifies a prompt in all epochs: verl gives each rollout of it a new uid."""
    try:
        text = json.dumps(list(raw_prompt), sort_keys=True, default=_content)
    except TypeError:  # keys that JSON does not support, or that do not sort
        text = repr(raw_prompt)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _content(value: Any) -> Any:
    """Represent a value that JSON does not support (image, array, bytes) by its content, equal in every epoch.

    Of large ones, bytes at equal distances count: the trainer waits while it identifies a batch.
    """
    if isinstance(value, np.ndarray) and value.dtype.hasobject:
        return value.tolist()
    data = value.tobytes() if hasattr(value, "tobytes") else value
    if not isinstance(data, bytes):
        return str(data)
    form = [getattr(value, name, None) for name in ("mode", "size", "shape", "dtype")]
    sample = data[:: len(data) // SAMPLED_BYTES | 1]  # odd, so that all columns of a picture are hit
    return f"{type(value).__name__} {form} {hashlib.blake2b(sample, digest_size=16).hexdigest()}"
