"""Fixes speculative sampling in vLLM's CPU build (vLLM issue 55005), and checks that the fix is active.

The CPU version of the kernel behind `expand_batch_to_tokens` writes into a temporary copy if its tensors are not int64,
so temperature, top_k and top_p of drafted rows stay uninitialised. Above temperature 0 samples are then wrong and
log-probs NaN, without an error. Every drafter on the CPU build (ngram, suffix, rhyme) needs the fix.
vLLM calls `register` in every process (entry point group `vllm.general_plugins`) before it creates a model runner.
HistoSpec's proposer refuses to start unless `expand_kernel_is_exact` returns true. In vLLM 0.24 the CPU version of
another kernel lacks a keyword that its caller passes, which fails every drafted step; the fix makes it accept that.
"""

from __future__ import annotations

from inspect import signature
from types import FunctionType
from typing import Any

import torch
import wrapt

# Of vLLM 0.30's rejection sampler: `_<name>` launches a kernel, and vLLM has `<name>_kernel` for the CPU but does not
# assign it.
LAUNCHED = ("rejection_greedy_sample", "rejection_random_sample", "sample_recovered_tokens")


def register() -> None:
    """Fix the CPU build's rejection sampler. Does nothing on other platforms or if vLLM runs Triton on the CPU."""
    from vllm.platforms import current_platform
    from vllm.triton_utils import HAS_TRITON

    if current_platform.is_cpu() and not HAS_TRITON:
        wrapt.register_post_import_hook(_fix, "vllm.v1.sample.rejection_sampler")


def expand_kernel_is_exact() -> bool:
    """Return whether this process's rejection sampler expands a known batch correctly.

    Also true with a Triton-CPU backend, because vLLM then runs the Triton kernel, which is correct.
    """
    from vllm.triton_utils import HAS_TRITON

    if HAS_TRITON:
        return True
    from vllm.v1.sample import rejection_sampler

    values, ends = torch.tensor([0.0, 1.0, 0.7]), torch.tensor([2, 2, 5], dtype=torch.int32)
    try:
        expanded = rejection_sampler.expand_batch_to_tokens(values, ends, 5, replace_from=0, replace_to=1)
    except TypeError:  # without the fix, vLLM's kernels cannot be called before its CPU model runner exists
        return False
    return torch.equal(expanded, torch.tensor([1.0, 1.0, 0.7, 0.7, 0.7]))


def _fix(module: Any) -> None:
    module.expand_batch_to_tokens = expand_batch_to_tokens
    from vllm.utils import cpu_triton_utils

    if hasattr(cpu_triton_utils, "sample_recovered_tokens_kernel"):  # absent in vLLM 0.32
        _accept_gumbel_precision(cpu_triton_utils.sample_recovered_tokens_kernel)
    for name in LAUNCHED:
        launcher, kernel = getattr(module, f"_{name}", None), getattr(cpu_triton_utils, f"{name}_kernel", None)
        if launcher is not None and kernel is not None and isinstance(launcher.kernel, FunctionType):
            launcher.kernel = kernel


def _accept_gumbel_precision(kernel: Any) -> None:
    """Make vLLM 0.24's CPU kernel accept the keyword that its sampler passes. Later kernels accept it themselves."""
    original = kernel.func
    if "USE_FP64_GUMBEL" in signature(original).parameters:
        return

    def sample_recovered_tokens(*args: Any, USE_FP64_GUMBEL: bool = False, **kwargs: Any) -> None:
        if USE_FP64_GUMBEL:
            raise ValueError("this vLLM's CPU build does not support use_fp64_gumbel: set it to false")
        original(*args, **kwargs)

    kernel.func = sample_recovered_tokens


def expand_batch_to_tokens(
    x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
    """Return each request's value once per drafted token, with `replace_from` replaced by `replace_to`.

    Args:
        x: one value per request, shape [batch_size].
        cu_num_tokens: inclusive cumulative number of drafted tokens, shape [batch_size].
        num_tokens: length of the result.
    """
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    values = torch.where(x == replace_from, torch.as_tensor(replace_to, dtype=x.dtype), x)
    return torch.repeat_interleave(values, counts, output_size=num_tokens)
