"""Bounds the tokens of an engine step, so that drafts neither starve other requests nor exceed the free memory.

vLLM counts drafts in a step's `max_num_batched_tokens` and serves running requests in order, so the drafts of some
requests can leave no tokens for others and for waiting prompts. It reserves sampling memory as if each request had one
draft token. With log-probs on, its rejection sampler works on rows x (longest draft + 1) rows of logits, however few
rows have a draft; that includes prompts that join in the step in which the drafts are verified.
"""

from __future__ import annotations

import logging
from typing import NamedTuple

import psutil
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.platforms import current_platform

from rhyme_verl.config import GIB

logger = logging.getLogger(__name__)

PREFILL_SHARE = 8  # 1/8 of a step's tokens is left to waiting prompts, which the proposer does not see
RESERVED_SHARE = 4  # 1/4 of the free memory is left to the rest of the step, and to blocks that torch cannot reuse
# Bytes per id of the vocabulary at the peak of vLLM's rejection sampler (0.24 to 0.32), when it computes log-probs.
TOKEN_BYTES = 2 + 3 * 4  # per computed token: the model's logits; in float32 the sampler's, a copy, and those to score
ROW_BYTES = 2 * 4  # per row of the padded batch: its logits in float32, and their log-softmax


class StepBound(NamedTuple):
    """Limits of an engine step with drafts.

    Attributes:
        scheduled: on the tokens of rows that decode, one per row plus the drafts.
        sampled: on rows x (longest draft + 1), if sampling pads rows; else 0, which stands for no limit.
    """

    scheduled: int
    sampled: int


class FreeMemory(NamedTuple):
    """Memory of the device, in bytes.

    Attributes:
        free: what nobody has allocated.
        cached: what torch keeps and does not use, which includes the pools of CUDA graphs.
    """

    free: int
    cached: int


def device_memory() -> FreeMemory:
    """Return the memory that is free now; on a CPU, that of the machine."""
    if current_platform.is_cpu():
        return FreeMemory(psutil.virtual_memory().available, 0)
    platform = current_platform  # passes these calls on to the device's module of torch
    return FreeMemory(platform.mem_get_info()[0], platform.memory_reserved() - platform.memory_allocated())


class StepLimit:
    """Computes the bounds of an engine's steps. Without `setting`, it allows no drafts before `measure` is called.

    Args:
        setting: the user's limit (`spec.max_step_tokens`), instead of what memory and the largest CUDA graph allow.
        may_join: whether requests that the caller of `bound` does not count may be in the step. They are as many as
            `max_num_seqs` allows: a single step admits hundreds of answers to prompts that are cached.

    Attributes:
        full_step: vLLM's limit on the tokens of a step.
    """

    def __init__(self, vllm_config: VllmConfig, setting: int | None, *, may_join: bool) -> None:
        scheduler, speculative = vllm_config.scheduler_config, vllm_config.speculative_config
        assert speculative is not None
        self.full_step: int = scheduler.max_num_scheduled_tokens or scheduler.max_num_batched_tokens
        self._most = self.full_step - self.full_step // PREFILL_SHARE
        self._setting = setting
        self._least_rows = scheduler.max_num_seqs if may_join else 1  # whose sampling needs memory
        self._longest_draft: int = speculative.num_speculative_tokens
        self._vocabulary = vllm_config.model_config.get_vocab_size()
        self._compilation = vllm_config.compilation_config
        self._unusable: int | None = None  # cached by torch for something else: graphs, what loading the model has left
        self._bytes_per_id = 0
        self._largest_graph = 0
        self._has_warned = False

    def measure(self) -> None:
        """Measure the memory for sampling.

        Called when a request comes and none is running: the engine is awake, its graphs are captured, and a trainer on
        the same device holds what it will hold while the engine generates.
        """
        compilation = self._compilation
        has_graphs = compilation.cudagraph_mode != CUDAGraphMode.NONE
        self._largest_graph = max(compilation.cudagraph_capture_sizes or [0]) if has_graphs else 0
        if self._setting is not None:
            return
        memory = device_memory()
        self._unusable = memory.cached if self._unusable is None else min(memory.cached, self._unusable)
        available = memory.free + memory.cached - self._unusable
        self._bytes_per_id = (available - available // RESERVED_SHARE) // self._vocabulary
        longest = self.bound(1, pads_rows=True).sampled - 1
        if longest < self._longest_draft and not self._has_warned:
            logger.warning(
                "HistoSpec: with %.1f GiB free, drafts have at most %d tokens, because memory has to suffice for "
                "max_num_seqs=%d requests; a lower rollout.max_num_seqs or gpu_memory_utilization allows longer ones",
                available / GIB,
                longest,
                self._least_rows,
            )
            self._has_warned = True

    def bound(self, num_rows: int, pads_rows: bool, other_tokens: int = 0) -> StepBound:
        """Return the bounds of a step.

        Args:
            num_rows: requests in the step, as far as known.
            pads_rows: whether sampling pads rows to the longest draft: log-probs are on.
            other_tokens: tokens of prompts in the step, as far as known, except for one per request.
        """
        if self._setting is not None:
            return StepBound(min(self._most, self._setting) - other_tokens, self._setting if pads_rows else 0)
        scheduled = self._most
        if num_rows + other_tokens <= self._largest_graph:  # a larger step runs without graphs, drafted or not
            scheduled = min(scheduled, self._largest_graph)
        scheduled -= other_tokens
        all_rows = max(num_rows, self._least_rows)
        joining = all_rows - num_rows
        if not pads_rows:
            return StepBound(min(scheduled, self._bytes_per_id // TOKEN_BYTES - joining), 0)
        scheduled = min(scheduled, self._bytes_per_id // (TOKEN_BYTES + ROW_BYTES))
        computed = max(scheduled, num_rows) + joining
        padded = (self._bytes_per_id - computed * TOKEN_BYTES) // ROW_BYTES
        return StepBound(scheduled, num_rows * max(1, padded // all_rows))
