"""verl's agent-loop manager, extended to time rollouts in the same way with and without rhyme.

Set it as `actor_rollout_ref.rollout.agent.agent_loop_manager_class`. It writes one JSON line per finished answer to the
folder that RHYME_BENCH_TIMES names.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import ray
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ, AgentLoopWorkerTQ

_Worker = AgentLoopWorkerTQ.__ray_metadata__.modified_class


class TimedWorker(_Worker):  # type: ignore[misc, valid-type]
    """Records when a step's prompts arrive and when each answer is complete, before its reward is computed."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._started: dict[int, float] = {}
        folder = Path(os.environ["RHYME_BENCH_TIMES"])
        folder.mkdir(parents=True, exist_ok=True)
        self._file = open(folder / f"{os.getpid()}.jsonl", "a", buffering=1, encoding="utf-8")

    async def generate_sequences(self, batch: Any) -> None:
        steps = batch["global_steps"]
        step = int(steps if not hasattr(steps, "__len__") else steps[0])
        self._started.setdefault(step, time.time())
        await super().generate_sequences(batch)

    async def _agent_loop_postprocess(self, output: Any, validate: bool, **kwargs: Any) -> None:
        outputs = output if isinstance(output, list) else [output]
        step = int(kwargs["global_steps"])
        line = {
            "step": step,
            "started": self._started[step],
            "finished": time.time(),
            "tokens": sum(len(part.response_ids) for part in outputs),
        }
        self._file.write(json.dumps(line) + "\n")
        await super()._agent_loop_postprocess(output, validate, **kwargs)


class TimedAgentLoopManager(AgentLoopManagerTQ):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.agent_loop_workers_class = ray.remote(TimedWorker)
