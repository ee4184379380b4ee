"""The remedy for vLLM's speculative sampling on its CPU build (vLLM issue 55005), and the check that it took effect.

The CPU stand-in for the kernel behind `expand_batch_to_tokens` writes into a temporary copy when its tensors are not
int64, so temperature, top_k and top_p of drafted rows come back uninitialised: no error, but wrong samples and NaN
log-probs at any temperature above 0. Everything that drafts on the CPU build (ngram, suffix, rhyme) needs the remedy.
vLLM loads `register` in every process (entry point group `vllm.general_plugins`), before a model runner is built;
HistoSpec's proposer calls `expand_kernel_is_exact` and does not draft without a yes.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

logger = logging.getLogger(__name__)


def register() -> None:
    """Replace the CPU build's expand kernel; nothing on other platforms or where vLLM runs Triton on the CPU."""
    from vllm.platforms import current_platform
    from vllm.triton_utils import HAS_TRITON

    if not current_platform.is_cpu() or HAS_TRITON:
        return
    try:
        from vllm.utils.cpu_triton_utils import expand_kernel
    except ImportError:
        logger.warning("this vLLM CPU build has no cpu_triton_utils.expand_kernel to mend; rhyme_verl will not draft")
        return
    expand_kernel.func = _expand


def expand_kernel_is_exact() -> bool:
    """Expand a known batch with the kernel this process would use, and compare with the right answer.

    Also true with a Triton-CPU backend: vLLM then runs the Triton kernel, which has no fault.
    """
    from vllm.triton_utils import HAS_TRITON

    if HAS_TRITON:
        return True
    try:
        from vllm.utils.cpu_triton_utils import expand_kernel
    except ImportError:
        return False
    expanded = torch.full((5,), float("nan"))
    values = torch.tensor([0.0, 1.0, 0.7])
    expand_kernel[(3,)](expanded, values, torch.tensor([2, 2, 5], dtype=torch.int32), 0, 1, MAX_NUM_TOKENS=128)
    return torch.equal(expanded, torch.tensor([1.0, 1.0, 0.7, 0.7, 0.7]))


def _expand(
    output: torch.Tensor,
    input_val: torch.Tensor,
    cu_num_tokens: torch.Tensor,
    replace_from: Any,
    replace_to: Any,
    MAX_NUM_TOKENS: int | None = None,  # noqa: N803  vLLM calls it by this name
) -> None:
    """Write each request's value once per drafted token, with `replace_from` turned into `replace_to`.

    Args:
        output: float or int tensor of shape [num_tokens], filled in place.
        input_val: one value a request, shape [batch_size].
        cu_num_tokens: inclusive cumulative number of drafted tokens, shape [batch_size].
    """
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    values = torch.where(input_val == replace_from, torch.as_tensor(replace_to, dtype=input_val.dtype), input_val)
    output.copy_(torch.repeat_interleave(values, counts))
