"""What vLLM has chosen for an engine: a function that `Engine.worker` runs in the engine's worker."""

from __future__ import annotations

from typing import Any


def engine_facts(worker: Any) -> dict[str, Any]:
    """Return the model runner, scheduling, CUDA graphs and attention backends."""
    config = worker.vllm_config
    layers = config.compilation_config.static_forward_context.values()
    attention = {layer.get_attn_backend().get_name() for layer in layers if hasattr(layer, "get_attn_backend")}
    return {
        "runner": "V2" if "worker.gpu.model_runner" in type(worker.model_runner).__module__ else "V1",
        "asynchronous": bool(config.scheduler_config.async_scheduling),
        "cudagraph_mode": config.compilation_config.cudagraph_mode.name,
        "largest_graph": max(config.compilation_config.cudagraph_capture_sizes or [0]),
        "attention": sorted(attention),
    }
