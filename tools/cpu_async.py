"""Turns vLLM's async scheduling on in its CPU build, for tests and benchmarks.

vLLM switches it off on CPUs, where streams and events do nothing and copies between host and device end at once. The
scheduler, the model runner and the order of their calls are those of a GPU. Tests and benchmarks may bring events and
streams of their own, which model a device's time (benchmarks/engines/virtual_time.py) or its memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import wrapt

# Overrides of vLLM 0.24's CPU model runner that leave out what async scheduling needs; the GPU's versions run as well.
INCOMPLETE = (
    "_copy_draft_token_ids_to_cpu",
    "_get_draft_token_ids_cpu",
    "_copy_valid_sampled_token_count",
    "_get_valid_sampled_token_count",
)


class Event:
    """An event that has always happened."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record(self, *args: Any) -> None:
        pass

    def wait(self, *args: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


class Stream:
    """A stream whose work ends at once."""

    device = torch.device("cpu")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait_stream(self, *args: Any) -> None:
        pass

    def wait_event(self, *args: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass


def install(
    event: Callable[..., Any] = Event, stream: Callable[..., Any] = Stream, current: Callable[..., Any] | None = None
) -> None:
    """Let engines that this process builds schedule asynchronously. Idempotent; the last events and streams count.

    Args:
        event, stream: classes that replace torch's.
        current: returns the current stream; by default a new `stream`.
    """
    with contextlib.suppress(ImportError):
        import vllm.v1.worker.cpu.shm  # noqa: F401  replaces events and streams on import, so it comes first
    import vllm.v1.worker.cpu_model_runner as cpu_runner

    torch.cuda.Stream = stream  # type: ignore[assignment, misc]
    torch.cuda.Event = torch.Event = event  # type: ignore[assignment, misc]
    torch.cuda.current_stream = current or (lambda *args, **kwargs: stream())  # type: ignore[assignment]
    torch.cuda.stream = lambda chosen: contextlib.nullcontext()  # type: ignore[assignment]
    cpu_runner._torch_cuda_wrapper = contextlib.nullcontext
    for name in INCOMPLETE:
        if name in vars(cpu_runner.CPUModelRunner):
            delattr(cpu_runner.CPUModelRunner, name)
    _keep_async_scheduling()


def _keep_async_scheduling() -> None:
    """Make the CPU platform leave `async_scheduling` as vLLM has decided it before."""
    from vllm.platforms import current_platform

    platform = type(current_platform)
    if isinstance(vars(platform)["check_and_update_config"], wrapt.FunctionWrapper):
        return

    def check(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        scheduler = args[0].scheduler_config
        decided = scheduler.async_scheduling
        wrapped(*args, **kwargs)
        scheduler.async_scheduling = decided

    platform.check_and_update_config = wrapt.FunctionWrapper(vars(platform)["check_and_update_config"], check)
