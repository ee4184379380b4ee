"""How many tokens may a step hold? Drafts must not starve other requests, nor take memory that nobody has set aside.

vLLM counts drafts in a step's `max_num_batched_tokens` and serves running requests in order, so the drafts of some can
leave others, and prompts that wait, without a token. And it sets memory aside for sampling as if a request had one
draft token: with log-probs on, its rejection sampler works on rows x (longest draft + 1) rows of logits, however few
rows have a draft.
"""

from __future__ import annotations

from vllm.config import CUDAGraphMode, VllmConfig

PREFILL_SHARE = 8  # one part in so many of a step is left to prompts that wait, of which a drafter knows nothing
SAMPLED_BYTES = 4 * 3  # for a token id of a sampled row: float32 logits, their log-softmax, and a copy to sort
MEMORY_SHARE = 0.5  # of what the engine leaves free; the rest is for the trainer's own remains


def max_step_tokens(vllm_config: VllmConfig, setting: int | None, device_bytes: int) -> int:
    """Return the bound on a step's scheduled tokens, and on rows x (longest draft + 1).

    Args:
        setting: the user's bound (`spec.max_step_tokens`); None: as many as have memory and a CUDA graph.
        device_bytes: memory of the device.
    """
    scheduler = vllm_config.scheduler_config
    budget = scheduler.max_num_scheduled_tokens or scheduler.max_num_batched_tokens
    bounds = [budget - budget // PREFILL_SHARE]
    if setting is not None:
        return min(*bounds, setting)
    left_free = (1.0 - vllm_config.cache_config.gpu_memory_utilization) * device_bytes
    bounds.append(int(MEMORY_SHARE * left_free / (SAMPLED_BYTES * vllm_config.model_config.get_vocab_size())))
    compilation = vllm_config.compilation_config
    if compilation.cudagraph_mode != CUDAGraphMode.NONE and compilation.cudagraph_capture_sizes:
        bounds.append(max(compilation.cudagraph_capture_sizes))
    return min(bounds)
