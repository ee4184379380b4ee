"""Extensions of the vLLM engine client in rhyme's server: two outputs per request, calls that reach every engine, and
an end that leaves no process behind.

vLLM hands a request's tokens to the server after every step, which costs more time there than everything else that verl
does with an answer. verl reads only the first output, which shows that the request runs, and the last one.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import psutil
from vllm import RequestOutput, SamplingParams
from vllm.sampling_params import RequestOutputKind

logger = logging.getLogger(__name__)

KILLED_SECONDS = 5.0  # for a killed process to be gone
END_SECONDS = 10.0  # for an engine's processes to end; vLLM kills those that it knows after 5 seconds
NEVER = 1 << 30  # stream interval in tokens that no request reaches
# vLLM before 0.25 has only one stream interval, for all requests of an engine.
HAS_REQUEST_INTERVAL = "stream_interval" in SamplingParams.__struct_fields__


class QuietEngine:
    """An AsyncLLM whose `generate` yields twice: when a request has its first tokens, and when it has ended.

    All other methods are the engine's. vLLM's HTTP server uses the engine directly, so its clients still get streams.

    Args:
        running: makes the context in which a request runs. verl's server lets requests wait before they get here.
        streams: yield all outputs.
    """

    def __init__(
        self,
        engine: Any,
        running: Callable[[], AbstractContextManager[None]] = nullcontext,
        *,
        streams: bool = False,
    ) -> None:
        self._engine = engine
        self._running = running
        self._streams = streams

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, **kwargs: Any
    ) -> AsyncIterator[RequestOutput]:
        """Yield a request's first output, and then its whole answer.

        Args:
            sampling_params: must have `n=1`; unless it streams, its output kind and stream interval are overwritten.
        """
        generate = self._engine.generate if self._streams else self._generate
        with self._running():
            async for output in generate(
                prompt=prompt, sampling_params=sampling_params, request_id=request_id, **kwargs
            ):
                yield output

    async def _generate(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, **kwargs: Any
    ) -> AsyncIterator[RequestOutput]:
        sampling_params.output_kind = RequestOutputKind.DELTA
        if HAS_REQUEST_INTERVAL:
            sampling_params.stream_interval = NEVER
        whole: RequestOutput | None = None
        async for output in self._engine.generate(
            prompt=prompt, sampling_params=sampling_params, request_id=request_id, **kwargs
        ):
            _drop_surplus_logprobs(output)
            if whole is not None:
                _prepend(whole, output)
            elif not HAS_REQUEST_INTERVAL and not output.finished:
                _stop_streaming(self._engine.output_processor, request_id)
            whole = output
            yield whole


def _drop_surplus_logprobs(output: RequestOutput) -> None:
    """Drop log-probs without tokens: vLLM repeats the whole answer's in an empty output, for example after an abort."""
    for part in output.outputs:
        if part.logprobs is not None:
            part.logprobs = part.logprobs[: len(part.token_ids)]


def _prepend(first: RequestOutput, last: RequestOutput) -> None:
    """Prepend the text, tokens and log-probs of `first` to `last`, which holds everything else."""
    if not last.prompt_logprobs:
        last.prompt_logprobs = first.prompt_logprobs
    for before, after in zip(first.outputs, last.outputs, strict=True):
        after.text = before.text + after.text
        after.token_ids = [*before.token_ids, *after.token_ids]
        if before.logprobs is not None:
            after.logprobs = [*before.logprobs, *(after.logprobs or [])]


def _stop_streaming(processor: Any, request_id: str) -> None:
    """Have the engine's output processor hold back a request's further output until the request ends."""
    for name in processor.external_req_ids.get(request_id, ()):
        state = processor.request_states[name]
        state.stream_interval = NEVER
        state.sent_tokens_offset = state.detokenizer.num_output_tokens()


async def call_all_engines(engine: Any, method: str, *arguments: Any) -> list[Any]:
    """Call a method of all workers of all data-parallel engines, and return all results.

    vLLM's own `collective_rpc` also calls all of them, but returns only the results of the first engine's workers.
    """
    client = engine.engine_core
    engines = getattr(client, "core_engines", ())
    if len(engines) < 2:
        return list(await engine.collective_rpc(method, args=arguments))
    answers = await asyncio.gather(
        *(client._call_utility_async("collective_rpc", method, None, arguments, None, engine=core) for core in engines)
    )
    return [answer for workers in answers for answer in workers]


def engine_processes() -> list[psutil.Process]:
    """Return the processes of this process's engines and all that they have started."""
    cores = [psutil.Process(child.pid) for child in multiprocessing.active_children()]
    return cores + [process for core in cores for process in core.children(recursive=True)]


async def end_engine(engine: Any, processes: Sequence[psutil.Process]) -> None:
    """Shut an engine down, and return when its `processes` have ended. Those that have not in time are killed.

    vLLM's own shutdown does not find the workers of a dead engine core, and returns at once if vLLM has begun another.
    """
    end = asyncio.get_running_loop().time() + END_SECONDS
    try:
        await asyncio.wait_for(asyncio.to_thread(engine.shutdown), END_SECONDS)
    except Exception:
        logger.exception("vLLM could not shut its engine down; its processes are killed")
    seconds = max(0.0, end - asyncio.get_running_loop().time())
    _, alive = await asyncio.to_thread(psutil.wait_procs, processes, timeout=seconds)
    for process in alive:
        logger.warning("process %d of the dead engine did not end, and is killed", process.pid)
        with suppress(psutil.NoSuchProcess):
            process.kill()
    await asyncio.to_thread(psutil.wait_procs, alive, timeout=KILLED_SECONDS)
