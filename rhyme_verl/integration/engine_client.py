"""What rhyme's server adds to its client of vLLM's engine: two outputs a request, and calls that reach every engine.

vLLM hands a request's tokens to the server after every step, which costs more time there than all else verl does with
an answer; verl reads the first output (the request runs) and the last one only.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from vllm import RequestOutput, SamplingParams
from vllm.sampling_params import RequestOutputKind

NEVER = 1 << 30  # tokens between two outputs of a request
# vLLM before 0.25 has one interval for all requests of an engine only.
HAS_REQUEST_INTERVAL = "stream_interval" in SamplingParams.__struct_fields__


class QuietEngine:
    """An AsyncLLM whose `generate` yields twice: when a request has its first tokens, and when it has ended.

    All else is the engine's own. vLLM's HTTP application keeps the engine itself, so its clients still stream.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, **kwargs: Any
    ) -> AsyncIterator[RequestOutput]:
        """Yield what a request says first, and then its whole answer.

        Args:
            sampling_params: with `n=1`; how it wants its output is overwritten.
        """
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
    """vLLM puts the log-probs of the whole answer into a part without tokens, such as the end of an aborted request."""
    for part in output.outputs:
        if part.logprobs is not None:
            part.logprobs = part.logprobs[: len(part.token_ids)]


def _prepend(first: RequestOutput, last: RequestOutput) -> None:
    """Put what came before into `last`, which has all else that is known at the end."""
    if not last.prompt_logprobs:
        last.prompt_logprobs = first.prompt_logprobs
    for before, after in zip(first.outputs, last.outputs, strict=True):
        after.text = before.text + after.text
        after.token_ids = [*before.token_ids, *after.token_ids]
        if before.logprobs is not None:
            after.logprobs = [*before.logprobs, *(after.logprobs or [])]


def _stop_streaming(processor: Any, request_id: str) -> None:
    """Have the engine's output processor keep what a request says from now on until it has ended."""
    for name in processor.external_req_ids.get(request_id, ()):
        state = processor.request_states[name]
        state.stream_interval = NEVER
        state.sent_tokens_offset = state.detokenizer.num_output_tokens()


async def call_all_engines(engine: Any, method: str, *arguments: Any) -> list[Any]:
    """Call a method of all workers of all data-parallel engines, and return what each answered.

    vLLM's own `collective_rpc` calls them all, too, but returns what the first engine's workers answered.
    """
    client = engine.engine_core
    engines = getattr(client, "core_engines", ())
    if len(engines) < 2:
        return list(await engine.collective_rpc(method, args=arguments))
    answers = await asyncio.gather(
        *(client._call_utility_async("collective_rpc", method, None, arguments, None, engine=one) for one in engines)
    )
    return [answer for workers in answers for answer in workers]
