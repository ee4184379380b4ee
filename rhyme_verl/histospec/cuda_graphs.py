"""Gives an engine that drafts the CUDA graphs of one that does not, and full graphs for drafts where that is possible.

For vLLM, the usual step of an engine with a drafter has a full draft in every row, which hardly ever happens here. Its
default, FULL_AND_PIECEWISE, has full graphs for such steps only, and sizes of full graphs are rounded up to multiples
of the rows' length. With rows of length 1, undrafted steps have the graphs of stock vLLM, and no size is rounded. Steps
with drafts have the graphs of steps with prompts: attention runs outside them.

FULL uses a full graph for any step, but needs an attention backend that takes rows of unequal lengths in a graph, with
kernels that are as fast for undrafted steps there: FlashAttention 3. (Triton's kernel that divides long contexts is in
no graph of several tokens.) In which backend the layers run is known only in the worker, once the model is loaded.
"""

from __future__ import annotations

import logging
from typing import Any

import wrapt
from vllm.compilation.breakable_cudagraph import is_breakable_cudagraph_enabled
from vllm.config import CUDAGraphMode, VllmConfig, get_layers_from_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import AttentionCGSupport

logger = logging.getLogger(__name__)

RESOLVE = "_check_and_update_cudagraph_mode"  # of vLLM's model runner, called before it captures graphs
ROW_LENGTH = "uniform_decode_query_len"  # of the model runner and its dispatcher of graphs
REMEDY = "install a vLLM that rhyme_verl supports, or set spec.enabled=false"


def choose_graphs(vllm_config: VllmConfig) -> None:
    """Replace FULL_AND_PIECEWISE by FULL, in place, with FlashAttention for rows of unequal lengths.

    Other modes stay, and those of pipeline stages, of which only the last one has the drafter. Called after the model's
    layers have been created and before it is wrapped for graphs: vLLM calls a drafter's `load_model` there.
    """
    compilation = vllm_config.compilation_config
    if vllm_config.parallel_config.pipeline_parallel_size > 1 or is_breakable_cudagraph_enabled():
        return
    if compilation.cudagraph_mode is CUDAGraphMode.FULL_AND_PIECEWISE and takes_unequal_rows(vllm_config):
        compilation.cudagraph_mode = CUDAGraphMode.FULL
        logger.info("HistoSpec: CUDA graphs are FULL instead of FULL_AND_PIECEWISE")


def takes_unequal_rows(vllm_config: VllmConfig) -> bool:
    """Return whether all layers have FlashAttention that takes rows of unequal lengths in a full CUDA graph."""
    layers = get_layers_from_vllm_config(vllm_config, AttentionLayerBase).values()  # type: ignore[type-abstract]
    supports = []
    for layer in layers:
        spec = layer.get_kv_cache_spec(vllm_config)
        if spec is not None:  # it has a KV cache or a state of its own
            backend: Any = layer.get_attn_backend()
            if backend.get_name() != "FLASH_ATTN":
                return False
            supports.append(backend.get_builder_cls().get_cudagraph_support(vllm_config, spec))
    return bool(supports) and all(support is AttentionCGSupport.ALWAYS for support in supports)


def capture_undrafted_steps(drafter: type) -> None:
    """Let this process's model runners with a drafter of this class capture graphs for rows of length 1. Idempotent.

    Pipeline stages, of which only the last one has the drafter, have to agree on sizes and are left as they are.

    Raises:
        RuntimeError: vLLM's model runner has no such step.
    """
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    if not hasattr(GPUModelRunner, RESOLVE):
        raise RuntimeError(f"vLLM's model runner has no {RESOLVE}: {REMEDY}")

    def resolve(wrapped: Any, model_runner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if isinstance(getattr(model_runner, "drafter", None), drafter) and _is_one_stage(model_runner):
            for holder in (model_runner, model_runner.cudagraph_dispatcher):
                if not hasattr(holder, ROW_LENGTH):
                    raise RuntimeError(f"vLLM's {type(holder).__name__} has no {ROW_LENGTH}: {REMEDY}")
                setattr(holder, ROW_LENGTH, 1)
        wrapped(*args, **kwargs)

    if not isinstance(vars(GPUModelRunner)[RESOLVE], wrapt.FunctionWrapper):
        wrapt.wrap_function_wrapper(GPUModelRunner, RESOLVE, resolve)


def check_captured(model_runner: Any) -> None:
    """Raise RuntimeError unless a model runner with HistoSpec has graphs for rows of length 1."""
    if _is_one_stage(model_runner) and getattr(model_runner, ROW_LENGTH) != 1:
        raise RuntimeError(f"CUDA graphs for undrafted steps did not take effect in vLLM's model runner: {REMEDY}")


def _is_one_stage(model_runner: Any) -> bool:
    return bool(model_runner.vllm_config.parallel_config.pipeline_parallel_size == 1)
