"""The remedy for vLLM's speculative sampling on its CPU build (vLLM issue 55005), and the check that it took effect.

The CPU stand-in for the kernel behind `expand_batch_to_tokens` writes into a temporary copy when its tensors are not
int64, so temperature, top_k and top_p of drafted rows come back uninitialised: no error, but wrong samples and NaN
log-probs at any temperature above 0. Everything that drafts on the CPU build (ngram, suffix, rhyme) needs the remedy.
vLLM loads `register` in every process (entry point group `vllm.general_plugins`), before a model runner is built;
HistoSpec's proposer calls `expand_kernel_is_exact` and does not draft without a yes. In vLLM 0.24 the stand-in for
another kernel lacks a keyword that it is called with, and every drafted step would stop with a TypeError; it is let in.
"""

from __future__ import annotations

from inspect import signature
from types import FunctionType
from typing import Any

import torch
import wrapt

# Launchers of vLLM 0.30's rejection sampler, and the CPU kernels it has for them but never hands to them.
LAUNCHERS = {
    "_rejection_greedy_sample": "rejection_greedy_sample_kernel",
    "_rejection_random_sample": "rejection_random_sample_kernel",
    "_sample_recovered_tokens": "sample_recovered_tokens_kernel",
}


def register() -> None:
    """Fix the CPU build's rejection sampler; does nothing on other platforms or where vLLM runs Triton on the CPU."""
    from vllm.platforms import current_platform
    from vllm.triton_utils import HAS_TRITON

    if current_platform.is_cpu() and not HAS_TRITON:
        wrapt.register_post_import_hook(_mend, "vllm.v1.sample.rejection_sampler")


def expand_kernel_is_exact() -> bool:
    """Expand a known batch as this process' rejection sampler would, and compare with the right answer.

    Also true with a Triton-CPU backend: vLLM then runs the Triton kernel, which has no fault.
    """
    from vllm.triton_utils import HAS_TRITON

    if HAS_TRITON:
        return True
    from vllm.v1.sample import rejection_sampler

    values, ends = torch.tensor([0.0, 1.0, 0.7]), torch.tensor([2, 2, 5], dtype=torch.int32)
    try:
        expanded = rejection_sampler.expand_batch_to_tokens(values, ends, 5, replace_from=0, replace_to=1)
    except TypeError:  # vLLM's own stand-ins cannot be called before its CPU model runner has put them in place
        return False
    return torch.equal(expanded, torch.tensor([1.0, 1.0, 0.7, 0.7, 0.7]))


def _mend(module: Any) -> None:
    module.expand_batch_to_tokens = expand_batch_to_tokens
    from vllm.utils import cpu_triton_utils

    if hasattr(cpu_triton_utils, "sample_recovered_tokens_kernel"):  # not in 0.32
        _accept_gumbel_precision(cpu_triton_utils.sample_recovered_tokens_kernel)
    for launcher_name, kernel_name in LAUNCHERS.items():
        launcher, kernel = getattr(module, launcher_name, None), getattr(cpu_triton_utils, kernel_name, None)
        if launcher is not None and kernel is not None and isinstance(launcher.kernel, FunctionType):
            launcher.kernel = kernel


def _accept_gumbel_precision(kernel: Any) -> None:
    """Let vLLM 0.24's stand-in for a kernel take the keyword that its sampler passes; later ones take it themselves."""
    if isinstance(kernel.func, wrapt.FunctionWrapper) or "USE_FP64_GUMBEL" in signature(kernel.func).parameters:
        return

    def sample_recovered_tokens(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if kwargs.pop("USE_FP64_GUMBEL", False):
            raise ValueError("this vLLM's CPU build does not sample with use_fp64_gumbel: set it to false")
        wrapped(*args, **kwargs)

    kernel.func = wrapt.FunctionWrapper(kernel.func, sample_recovered_tokens)


def expand_batch_to_tokens(
    x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
    """Return each request's value once per drafted token, with `replace_from` turned into `replace_to`.

    Args:
        x: one value a request, shape [batch_size].
        cu_num_tokens: inclusive cumulative number of drafted tokens, shape [batch_size].
        num_tokens: length of the result.
    """
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    values = torch.where(x == replace_from, torch.as_tensor(replace_to, dtype=x.dtype), x)
    return torch.repeat_interleave(values, counts, output_size=num_tokens)
