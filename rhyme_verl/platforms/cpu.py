"""A verl platform without an accelerator, selected by `VERL_PLATFORM=cpu`. Trainer and engine stay unmodified.

Ray still needs a number of GPUs (`ray_kwargs.ray_init.num_gpus`), because verl places workers by them; here they are
only slots. The platform uses verl's PlatformRegistry and wraps one function (see `_gloo_once`).
"""

from __future__ import annotations

import resource
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from types import ModuleType
from typing import Any

import psutil
import torch
import wrapt
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry


def register() -> None:
    """Register CpuPlatform for `VERL_PLATFORM=cpu`. Idempotent."""
    if PlatformRegistry.get("cpu") is None:
        PlatformRegistry.register(platform="cpu")(CpuPlatform)
        wrapt.register_post_import_hook(_gloo_once, "verl.utils.distributed")


def _gloo_once(module: Any) -> None:
    """Make verl's process-group helper default to the backend string `cpu:gloo`.

    Its own default is `cpu:gloo,<device>:<backend>`. On this platform that names the device `cpu` twice, which torch
    rejects.
    """
    wrapped = module.initialize_global_process_group_ray
    module.initialize_global_process_group_ray = partial(wrapped, backend="cpu:gloo")


def _device_module() -> ModuleType:
    """Return `torch.cpu` with those functions of `torch.cuda` in addition that verl calls, for host memory."""
    process = psutil.Process()
    module = ModuleType("rhyme_verl.platforms.cpu_device")
    vars(module).update(
        {name: getattr(torch.cpu, name) for name in torch.cpu.__all__},
        current_device=lambda: torch.device("cpu"),
        get_device_name=lambda *args: "cpu",
        empty_cache=lambda: None,
        ipc_collect=lambda: None,
        reset_peak_memory_stats=lambda *args: None,
        set_per_process_memory_fraction=lambda *args: None,
        mem_get_info=lambda *args: (psutil.virtual_memory().available, psutil.virtual_memory().total),
        memory_allocated=lambda *args: process.memory_info().rss,
        memory_reserved=lambda *args: process.memory_info().rss,
        max_memory_allocated=lambda *args: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        max_memory_reserved=lambda *args: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        get_rng_state=lambda *args: torch.get_rng_state(),
        set_rng_state=lambda state, *args: torch.set_rng_state(state),
    )
    return module


def _always(answer: Any) -> Callable[..., Any]:
    """Return a method that returns `answer`, whatever it is called with."""
    return lambda self, *args, **kwargs: answer


class CpuPlatform(PlatformBase):
    """Implements verl's platform interface for a machine without an accelerator."""

    device_name = vendor_name = "cpu"
    device_module = _device_module()
    is_available = _always(True)
    device_count = _always(1)
    current_device = _always(torch.device("cpu"))  # verl passes it to torch, where a bare index would mean a GPU
    get_device_capability = _always((None, None))
    communication_backend_name = _always("gloo")
    visible_devices_envvar = _always("CUDA_VISIBLE_DEVICES")
    ray_resource_name = _always("GPU")
    ray_noset_envvars = _always([])
    is_ipc_supported = _always(False)
    nvtx_range = _always(nullcontext())
    set_device = synchronize = set_allocator_settings = empty_cache = _always(None)
    profiler_start = profiler_stop = cudart = _always(None)

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def rollout_env_vars(self) -> dict[str, str]:
        """Return the environment variables of an engine.

        The first limits it to one compute thread: the engine shares the cores with its server and the agent loops, and
        an engine step that waits for a preempted OpenMP thread takes many times as long. The second keeps a requested
        `uni` executor: by default vLLM's CPU platform turns `uni` into `mp`, whose two processes wait for each other by
        spinning. (An asynchronous server still has its own engine process.)
        """
        return {"OMP_NUM_THREADS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
