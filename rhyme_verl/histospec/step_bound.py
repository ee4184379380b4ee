"""Bounds the tokens of an engine step, so that drafts neither starve other requests nor exceed reserved memory.

vLLM counts drafts in a step's `max_num_batched_tokens` and serves running requests in order, so the drafts of some
requests can leave no tokens for others and for waiting prompts. It reserves sampling memory as if each request had one
draft token. With log-probs on, its rejection sampler works on rows x (longest draft + 1) rows of logits, however few
rows have a draft.
"""

from __future__ import annotations

from typing import NamedTuple

from vllm.config import CUDAGraphMode, VllmConfig

PREFILL_SHARE = 8  # 1/8 of a step's tokens is left to waiting prompts, which the proposer does not see
SAMPLED_BYTES = 4 * 3  # per token id and sampled row: float32 logits, their log-softmax, and a copy to sort
MEMORY_SHARE = 0.5  # share of the memory that the engine leaves free; the trainer may hold the rest


class StepBound(NamedTuple):
    """Limits of an engine step with drafts.

    Attributes:
        scheduled: on its tokens, one per row plus the drafts; the model computes them.
        sampled: on the rows of logits from which it samples.
    """

    scheduled: int
    sampled: int


def step_bound(vllm_config: VllmConfig, setting: int | None, device_bytes: int) -> StepBound:
    """Return the limits of an engine's steps.

    Args:
        setting: the user's limit (`spec.max_step_tokens`); None: as many as memory and the largest CUDA graph allow.
        device_bytes: total memory of the device.
    """
    scheduler = vllm_config.scheduler_config
    budget = scheduler.max_num_scheduled_tokens or scheduler.max_num_batched_tokens
    scheduled = budget - budget // PREFILL_SHARE
    if setting is not None:
        return StepBound(min(scheduled, setting), setting)
    compilation = vllm_config.compilation_config
    if compilation.cudagraph_mode != CUDAGraphMode.NONE and compilation.cudagraph_capture_sizes:
        scheduled = min(scheduled, max(compilation.cudagraph_capture_sizes))
    left_free = (1.0 - vllm_config.cache_config.gpu_memory_utilization) * device_bytes
    rows = MEMORY_SHARE * left_free / (SAMPLED_BYTES * vllm_config.model_config.get_vocab_size())
    return StepBound(scheduled, max(1, int(rows)))
