"""rhyme's server with a stopwatch: writes down every request that a replica serves and when it may serve any.

Loaded into a job's processes with VERL_USE_EXTERNAL_MODULES=benchmarks.recorded_server, so that it records the same
with any dispatch module and router. Writes JSON lines into the folder named by RHYME_BENCH_TIMES:
`requests-<replica>.jsonl` with one line a request, `gates-<replica>.jsonl` with one line each time that verl has closed
or opened the replica. Closing takes seconds where hundreds of answers are interrupted, and the trainer waits for it.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import wrapt
from rhyme_verl._core import prompt_key

import rhyme_verl.plugin  # noqa: F401  registers rhyme's rollout first; what is registered below replaces it

STEP = os.environ.get("RHYME_BENCH_STEP", "")  # emulate an accelerator's steps, see emulated_worker.py


def _load_replica() -> type:
    import ray
    from verl.workers.rollout.replica import TokenOutput

    from rhyme_verl.rollout import RhymeHttpServer, RhymeReplica

    class RecordedServer(RhymeHttpServer):
        def _post_init(self, cuda_visible_devices: str) -> None:
            super()._post_init(cuda_visible_devices)
            folder = Path(os.environ["RHYME_BENCH_TIMES"])
            folder.mkdir(parents=True, exist_ok=True)
            self._request_log = _open(folder / f"requests-{self.replica_rank}.jsonl")
            self._gate_log = _open(folder / f"gates-{self.replica_rank}.jsonl")

        def _get_worker_extension_cls(self) -> str:
            plain = super()._get_worker_extension_cls()
            return "benchmarks.emulated_worker.EmulatedWorkerExtension" if STEP else plain

        async def run_server(self, args: Any) -> None:
            await super().run_server(args)
            if STEP:
                costs = tuple(float(cost) for cost in STEP.split(","))
                await self.engine.collective_rpc("bench_emulate", args=costs)

        async def generate(
            self, prompt_ids: list[int], sampling_params: dict[str, Any], *args: Any, **kwargs: Any
        ) -> TokenOutput:
            start = time.time()
            budget = sampling_params.get("max_tokens")  # a resumed request has less than a new one
            resumed = 0 if budget is None else self.config.response_length - budget
            output = await super().generate(prompt_ids, sampling_params, *args, **kwargs)
            line = {
                "key": prompt_key(np.array(prompt_ids[: len(prompt_ids) - resumed], np.int32)),
                "start": start,
                "end": time.time(),
                "prompt": len(prompt_ids),
                "resumed": resumed,
                "cached": output.extra_fields.get("num_cached_tokens") or 0,
                "tokens": len(output.token_ids),
                "aborted": output.stop_reason == "aborted",
            }
            self._request_log.write(json.dumps(line) + "\n")
            return output

        async def abort_all_requests(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
            aborted = await super().abort_all_requests(*args, **kwargs)
            self._gate_log.write(json.dumps({"time": time.time(), "open": False}) + "\n")
            return aborted

        async def open_submission_gate(self) -> None:
            await super().open_submission_gate()
            self._gate_log.write(json.dumps({"time": time.time(), "open": True}) + "\n")

    class RecordedReplica(RhymeReplica):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.server_class = ray.remote(RecordedServer)

    return RecordedReplica


def _open(path: Path) -> Any:
    return open(path, "a", buffering=1, encoding="utf-8")


def _register(module: Any) -> None:
    module.RolloutReplicaRegistry.register(rhyme_verl.plugin.ROLLOUT_NAME, _load_replica)


wrapt.register_post_import_hook(_register, "verl.workers.rollout.replica")
