"""A strict model of an accelerator's memory for vLLM's CPU build: copies between host and device end late.

The device works through one queue; the host knows how far it has come only from events that it has waited for.

- A copy to the host lands when an event that was recorded after it is synchronised. Until then its memory holds
  garbage.
- A copy to the device has to find its source unchanged until then, because the device may read it as late as that.
- A copy to the host on a stream that has not waited for the computing stream copies garbage, and so does one whose
  source is freed or overwritten before the copy lands.
- `query()` is true only if an event at the same or a later position of the queue has been synchronised, by anybody.

The arithmetic itself takes place when it is called. Checked are the copies of HistoSpec's DeviceBuffers, and those of
the numbers of sampled tokens, from which vLLM corrects its own state.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from rhyme_verl.histospec.device_buffers import DeviceBuffers
from tools import cpu_async

GARBAGE = (2_000_000_000, -2_000_000_000)  # in turns: an id that no model has, and none at all


class MemoryFault(AssertionError):
    """Memory was overwritten before the device or the host had read it."""


class HostMemory(torch.Tensor):
    """Pinned memory of the host. Non-blocking copies from and to it end late.

    Attributes:
        is_read: whether the host reads every copy to it.
    """

    is_read = True

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.copy_ and (kwargs or {}).get("non_blocking"):
            device.copy(args[0], args[1])
            return args[0]
        return super().__torch_function__(func, types, args, kwargs)


class UnreadHostMemory(HostMemory):
    is_read = False


@dataclass
class _Copy:
    """A copy in the device's queue; `contents` is what its source was when it was queued."""

    position: int
    target: np.ndarray
    contents: np.ndarray
    source: Any  # the memory on the host, or a weak reference to the tensor on the device


@dataclass
class Device:
    """The device's queue, and what is known about it.

    Attributes:
        position: of the newest operation in the queue.
        reached: position up to which the host knows that the device has come.
        launches: number of moments after which the computing stream may have been given new work.
        to_host, to_device: numbers of copies.
        faults: what was done wrong.
    """

    position: int = 0
    reached: int = 0
    launches: int = 0
    to_host: int = 0
    to_device: int = 0
    faults: list[str] = field(default_factory=list)
    _pending: list[_Copy] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.computing = self.current = Stream()

    def next_position(self) -> int:
        """Queue an operation."""
        self.position += 1
        self.launches += self.current is self.computing
        return self.position

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy between the host and the device."""
        if isinstance(target, HostMemory):
            self._copy_to_host(target, source)
        else:
            assert self.current is self.computing, "not modelled: copies to the device on a stream of their own"
            memory = source.numpy()
            target.copy_(torch.from_numpy(memory))
            self._pending.append(_Copy(self.next_position(), target.numpy(), memory.copy(), memory))
            self.to_device += 1

    def reach(self, position: int) -> None:
        """Note that the device has come to a position of its queue."""
        self.reached = max(self.reached, position)
        landed = [copy for copy in self._pending if copy.position <= self.reached]
        self._pending = [copy for copy in self._pending if copy.position > self.reached]
        for copy in landed:
            if isinstance(copy.source, np.ndarray):
                if not np.array_equal(copy.source, copy.contents):
                    self.faults.append("the source of a copy to the device was overwritten before it was read")
                continue
            source = copy.source()
            if source is not None and np.array_equal(source.numpy(), copy.contents):
                copy.target[...] = copy.contents

    def _copy_to_host(self, target: HostMemory, source: torch.Tensor) -> None:
        memory = target.numpy()
        if target.is_read and any(np.may_share_memory(memory, copy.target) for copy in self._pending):
            self.faults.append("a copy to the host overwrites one that nobody has waited for")
        memory.flat = GARBAGE
        has_waited = self.current is self.computing or self.current.waited == self.launches
        contents = source.numpy().copy() if has_waited else memory.copy()
        self._pending.append(_Copy(self.next_position(), memory, contents, weakref.ref(source)))
        self.to_host += 1


class Event(cpu_async.Event):
    """A position in the device's queue."""

    position = 0  # a new event has happened
    launches = 0

    def record(self, stream: Any = None) -> None:
        self.position = device.next_position()
        self.launches = device.launches

    def synchronize(self) -> None:
        device.reach(self.position)

    def query(self) -> bool:
        return self.position <= device.reached

    def wait(self, stream: Any = None) -> None:
        (stream or device.current).wait_event(self)


class Stream(cpu_async.Stream):
    """A stream of the device; `waited`: up to which launch of the computing stream it starts nothing."""

    waited = -1

    def wait_stream(self, stream: Any) -> None:
        self.waited = max(self.waited, device.launches if stream is device.computing else stream.waited)

    def wait_event(self, event: Event) -> None:
        self.waited = max(self.waited, event.launches)

    def synchronize(self) -> None:
        device.reach(device.position)


device = Device()


@contextmanager
def installed() -> Iterator[Device]:
    """Let the engines of a `with` block schedule asynchronously on a new device.

    Raises:
        MemoryFault: at the end, if memory was overwritten too soon.
    """
    global device
    device = Device()
    cpu_async.install(Event, Stream, lambda *args, **kwargs: device.current)
    torch.cuda.stream = _stream  # type: ignore[assignment]
    create = DeviceBuffers.__init__

    def create_watched(buffers: DeviceBuffers, *args: Any) -> None:
        with _pinned_memory_is_watched():
            create(buffers, *args)

    DeviceBuffers.__init__ = create_watched  # type: ignore[method-assign]
    try:
        yield device
    finally:
        DeviceBuffers.__init__ = create  # type: ignore[method-assign]
        cpu_async.uninstall()
    if device.faults:
        raise MemoryFault(f"{len(device.faults)} times, first: {device.faults[0]}")


@contextmanager
def _stream(chosen: Stream) -> Iterator[None]:
    """Queue operations of a `with` block in a stream."""
    before, device.current = device.current, chosen
    try:
        yield
    finally:
        device.current = before
        device.launches += before is device.computing


@contextmanager
def _pinned_memory_is_watched() -> Iterator[None]:
    """Make memory that is created with the argument `pin_memory` in a `with` block HostMemory."""
    functions = {name: getattr(torch, name) for name in ("empty", "zeros")}

    def watched(create: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> torch.Tensor:
            tensor: torch.Tensor = create(*args, **kwargs)
            return tensor.as_subclass(HostMemory) if "pin_memory" in kwargs else tensor

        return call

    for name, function in functions.items():
        setattr(torch, name, watched(function))
    try:
        yield
    finally:
        for name, function in functions.items():
            setattr(torch, name, function)
