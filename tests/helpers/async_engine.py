"""A real engine in processes of its own, as verl's server has it."""

import contextlib

from vllm import AsyncEngineArgs, SamplingParams, TokensPrompt
from vllm.v1.engine.async_llm import AsyncLLM

from examples.quickstart.policy import SHIPPED_POLICY

SAMPLING = {"temperature": 1.0, "max_tokens": 64, "ignore_eos": True, "logprobs": 0, "detokenize": False}


@contextlib.asynccontextmanager
async def async_engine(**arguments):
    """A real engine in processes of its own, as verl's server has it."""
    arguments = {
        "model": str(SHIPPED_POLICY),
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 256,
        "max_num_seqs": 16,
        "gpu_memory_utilization": 0.1,
        "enable_log_requests": False,
        "disable_log_stats": True,
        **arguments,
    }
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
    try:
        yield llm
    finally:
        llm.shutdown()


async def outputs_of(engine, prompt, name, on_first=None, **changes):
    """All outputs of a request; `on_first` is awaited after the first one."""
    outputs = []
    params = SamplingParams(**{**SAMPLING, **changes})
    async for output in engine.generate(
        prompt=TokensPrompt(prompt_token_ids=list(prompt)), sampling_params=params, request_id=name
    ):
        outputs.append(output)
        if len(outputs) == 1 and on_first is not None:
            await on_first()
    return outputs
