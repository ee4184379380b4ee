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
CHECK = "check_and_update_config"  # of vLLM's platform
_replaced: dict[tuple[Any, str], Any] = {}  # what `install` has replaced, by object and name


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
    from vllm.platforms import current_platform

    _replace(torch, "Event", event)
    _replace(torch.cuda, "Event", event)
    _replace(torch.cuda, "Stream", stream)
    _replace(torch.cuda, "current_stream", current or (lambda *args, **kwargs: stream()))
    _replace(torch.cuda, "stream", lambda chosen: contextlib.nullcontext())
    _replace(cpu_runner, "_torch_cuda_wrapper", contextlib.nullcontext)
    for name in INCOMPLETE:
        if name in vars(cpu_runner.CPUModelRunner):
            delattr(cpu_runner.CPUModelRunner, name)
    platform = type(current_platform)
    if (platform, CHECK) not in _replaced:
        _replace(platform, CHECK, wrapt.FunctionWrapper(vars(platform)[CHECK], _keep_async_scheduling))


def uninstall() -> None:
    """Undo `install`, for engines that are built later."""
    for (owner, name), original in _replaced.items():
        setattr(owner, name, original)
    _replaced.clear()


def _replace(owner: Any, name: str, replacement: Any) -> None:
    _replaced.setdefault((owner, name), vars(owner)[name])
    setattr(owner, name, replacement)


def _keep_async_scheduling(check: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Make the CPU platform leave `async_scheduling` as vLLM has decided it before."""
    scheduler = args[0].scheduler_config
    decided = scheduler.async_scheduling
    check(*args, **kwargs)
    scheduler.async_scheduling = decided
