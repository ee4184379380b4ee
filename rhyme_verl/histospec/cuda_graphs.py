"""Chooses CUDA graphs that drafts of different lengths can use.

vLLM's default, FULL_AND_PIECEWISE, uses a full graph for a step in which every row has the same number of tokens, a
full draft and one more. That never happens here, and these graphs take memory and start-up time. FULL uses one for any
step, but needs an attention backend that takes rows of unequal lengths in a graph; PIECEWISE runs attention outside its
graphs, with any backend. In which backend the layers run is known only in the worker, once the model is loaded.
"""

from __future__ import annotations

import logging
from typing import Any

from vllm.compilation.breakable_cudagraph import is_breakable_cudagraph_enabled
from vllm.config import CUDAGraphMode, VllmConfig, get_layers_from_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import AttentionCGSupport

logger = logging.getLogger(__name__)

FULL, PIECEWISE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE


def choose_graphs(vllm_config: VllmConfig) -> None:
    """Replace FULL_AND_PIECEWISE by FULL or PIECEWISE, in place, and FULL by PIECEWISE where FULL is not supported.

    Other modes stay, and those of pipeline stages, of which only the last one has the drafter. Called after the model's
    layers have been created and before it is wrapped for graphs: vLLM calls a drafter's `load_model` there.
    """
    compilation = vllm_config.compilation_config
    given = compilation.cudagraph_mode
    if vllm_config.parallel_config.pipeline_parallel_size > 1:
        return
    if given not in (CUDAGraphMode.FULL_AND_PIECEWISE, FULL) or is_breakable_cudagraph_enabled():
        return
    if takes_unequal_rows(vllm_config):
        chosen = FULL
    elif compilation.is_attention_compiled_piecewise():
        chosen = PIECEWISE
    else:
        return  # vLLM finds a mode that needs no piecewise compilation
    compilation.cudagraph_mode = chosen
    if chosen is not given:
        logger.info("HistoSpec: CUDA graphs are %s instead of %s", chosen.name, given.name)


def takes_unequal_rows(vllm_config: VllmConfig) -> bool:
    """Return whether all attention layers take rows of unequal lengths in a full CUDA graph."""
    layers = get_layers_from_vllm_config(vllm_config, AttentionLayerBase).values()  # type: ignore[type-abstract]
    supports = []
    for layer in layers:
        spec = layer.get_kv_cache_spec(vllm_config)
        if spec is not None:  # it has a KV cache or a state of its own
            builder: Any = layer.get_attn_backend().get_builder_cls()  # type: ignore[no-untyped-call]
            supports.append(builder.get_cudagraph_support(vllm_config, spec))
    return bool(supports) and all(support is AttentionCGSupport.ALWAYS for support in supports)
