"""The vLLM servers of a verl job, extended to record every request and when the replica was open for requests.

VERL_USE_EXTERNAL_MODULES=benchmarks.jobs.recorded_server loads this module into a job's processes. It adds the same
recording to the servers of `rollout.name=vllm` (verl's own) and `rollout.name=rhyme`, so all cases are timed at the
same point. The servers write JSON lines to the folder RHYME_BENCH_TIMES:

- `requests-<replica>.jsonl`: one line per request;
- `gates-<replica>.jsonl`: one line each time verl has closed or opened the replica. Closing takes seconds if hundreds
  of answers are interrupted, and the trainer waits for it;
- `answers-<replica>.jsonl` if RHYME_BENCH_GREEDY is set: token ids, and whether each was the most probable one.

RHYME_BENCH_STEP emulates an accelerator's step times (emulated_worker.py). With it, rhyme's drafting engines schedule
asynchronously as on a GPU, which vLLM's CPU build does not.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import numpy as np
import wrapt
from rhyme_verl._core import prompt_key

import rhyme_verl.integration.plugin  # noqa: F401  registers rhyme's rollout, which is replaced below

STEP = os.environ.get("RHYME_BENCH_STEP", "")  # "<model>,<dilation>"
GREEDY = bool(os.environ.get("RHYME_BENCH_GREEDY"))


class _Recorded:
    """Mixin for verl's server classes that records requests, gates and answers."""

    def _post_init(self, cuda_visible_devices: str) -> None:
        super()._post_init(cuda_visible_devices)  # type: ignore[misc]
        self._requests_file = _open(f"requests-{self.replica_rank}.jsonl")
        self._gates_file = _open(f"gates-{self.replica_rank}.jsonl")
        self._answers_file = _open(f"answers-{self.replica_rank}.jsonl") if GREEDY else None
        self._last_outputs: dict[str, Any] = {}  # by request id

    def _get_worker_extension_cls(self) -> str:
        plain = super()._get_worker_extension_cls()  # type: ignore[misc]
        return "benchmarks.jobs.emulated_worker.EmulatedWorkerExtension" if STEP else plain

    async def run_server(self, args: Any) -> None:
        await super().run_server(args)  # type: ignore[misc]
        if STEP:
            await self.engine.collective_rpc("bench_emulate")
        if GREEDY:
            self._keep_last_outputs()

    async def generate(
        self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str, *args: Any, **kwargs: Any
    ) -> Any:
        start = time.time()
        budget = sampling_params.get("max_tokens")  # smaller for a resumed request than for a new one
        resumed = 0 if budget is None else self.config.response_length - budget
        output = await super().generate(prompt_ids, sampling_params, request_id, *args, **kwargs)  # type: ignore[misc]
        key = prompt_key(np.array(prompt_ids[: len(prompt_ids) - resumed], np.int32))
        line = {
            "key": key,
            "start": start,
            "end": time.time(),
            "prompt": len(prompt_ids),
            "resumed": resumed,
            "cached": output.extra_fields.get("num_cached_tokens") or 0,
            "tokens": len(output.token_ids),
            "aborted": output.stop_reason == "aborted",
        }
        self._requests_file.write(json.dumps(line) + "\n")
        if self._answers_file is not None:
            version = output.extra_fields["global_steps"]
            answer = {"step": version, "key": key, "tokens": list(output.token_ids), "greedy": self._greedy(request_id)}
            self._answers_file.write(json.dumps(answer) + "\n")
        return output

    async def abort_all_requests(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        aborted = await super().abort_all_requests(*args, **kwargs)  # type: ignore[misc]
        self._gates_file.write(json.dumps({"time": time.time(), "open": False}) + "\n")
        return aborted

    async def open_submission_gate(self) -> None:
        await super().open_submission_gate()  # type: ignore[misc]
        self._gates_file.write(json.dumps({"time": time.time(), "open": True}) + "\n")

    def _keep_last_outputs(self) -> None:
        generate = self.engine.generate

        async def kept(*args: Any, request_id: str, **kwargs: Any) -> AsyncGenerator[Any, None]:
            async for output in generate(*args, request_id=request_id, **kwargs):
                self._last_outputs[request_id] = output
                yield output

        self.engine.generate = kept

    def _greedy(self, request_id: str) -> list[bool]:
        """Return whether each token of the answer has the highest log-prob, from vLLM's rank of the sampled token."""
        answer = self._last_outputs.pop(request_id).outputs[0]
        return [step[token].rank == 1 for token, step in zip(answer.token_ids, answer.logprobs, strict=True)]


def _load_rhyme() -> type:
    import ray

    from rhyme_verl.integration.rollout import RhymeHttpServer, RhymeReplica
    from tools import cpu_async

    class RecordedRhymeServer(_Recorded, RhymeHttpServer):
        def _preprocess_engine_kwargs(self, engine_kwargs: dict[str, Any]) -> None:
            super()._preprocess_engine_kwargs(engine_kwargs)
            if STEP and self._rhyme.spec.enabled:
                cpu_async.install()  # before vLLM's config is made; in the engine, the emulated worker does this

    class RecordedRhymeReplica(RhymeReplica):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.server_class = ray.remote(RecordedRhymeServer)

    return RecordedRhymeReplica


def _load_stock() -> type:
    import ray
    from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer, vLLMReplica

    class RecordedServer(_Recorded, vLLMHttpServer):
        pass

    class RecordedReplica(vLLMReplica):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.server_class = ray.remote(RecordedServer)

    return RecordedReplica


def _open(name: str) -> Any:
    folder = Path(os.environ["RHYME_BENCH_TIMES"])
    folder.mkdir(parents=True, exist_ok=True)
    return open(folder / name, "a", buffering=1, encoding="utf-8")


def _register(module: Any) -> None:
    module.RolloutReplicaRegistry.register(rhyme_verl.integration.plugin.ROLLOUT_NAME, _load_rhyme)
    module.RolloutReplicaRegistry.register("vllm", _load_stock)


wrapt.register_post_import_hook(_register, "verl.workers.rollout.replica")
