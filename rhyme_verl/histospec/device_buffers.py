"""The memory through which the asynchronous proposer and the accelerator exchange tokens.

A copy from the device is valid once its event has happened, and the memory of a copy to the device may be written
again once the copy has been made. Tokens are therefore read through `HostTokens.wait`, and drafts are written only
after the tokens of the step before have been waited for, which the device copies after that step's drafts.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch

NO_TOKEN = -1  # in place of a token id
STEPS_IN_FLIGHT = 3  # sampled steps whose tokens may not have been taken in: one runs, and vLLM plans one ahead


class HostTokens:
    """Sampled tokens on their way to the host.

    Args:
        source: int32 [rows, columns] on the device; kept until the copy has been made.
        host: where they are copied to, of the same shape.
        event: recorded after the copy.
    """

    def __init__(self, source: torch.Tensor, host: torch.Tensor, event: Any) -> None:
        self._source: torch.Tensor | None = source
        self._host = host
        self._event = event

    def have_come(self) -> bool:
        """Return whether `wait` returns at once."""
        return bool(self._event.query())

    def wait(self) -> np.ndarray:
        """Return the tokens, int32 [rows, columns], when they have come; valid until STEPS_IN_FLIGHT steps later."""
        self._event.synchronize()
        self._source = None
        return self._host.numpy()


class DeviceBuffers:
    """Pinned host memory, its counterpart on the device, and the stream that copies to the host.

    Attributes:
        drafts: int32 [rows, K] on the device.
        drafts_on_host: int32 [rows, K]; `send_drafts` copies it to `drafts`.
        num_drafts: int32 [rows], on the host only.
    """

    def __init__(self, max_rows: int, max_drafted: int, device: torch.device) -> None:
        pin = device.type != "cpu"
        self.drafts = torch.zeros((max_rows, max_drafted), dtype=torch.int32, device=device)
        self._pinned_drafts = torch.zeros((max_rows, max_drafted), dtype=torch.int32, pin_memory=pin)
        self.drafts_on_host: np.ndarray = self._pinned_drafts.numpy()
        self.num_drafts = np.zeros(max_rows, np.int32)
        self._stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        tokens = max_rows * (max_drafted + 1)
        self._ring = itertools.cycle(
            [
                (torch.empty(tokens, dtype=torch.int32, pin_memory=pin), torch.cuda.Event())  # type: ignore[no-untyped-call]
                for _ in range(STEPS_IN_FLIGHT)
            ]
        )

    def receive(self, tokens: torch.Tensor) -> HostTokens:
        """Start to copy sampled tokens, int32 [rows, columns], to the host."""
        memory, event = next(self._ring)
        host = memory[: tokens.numel()].view(tokens.shape)  # contiguous, so that the copy needs no help of the host
        computing = torch.cuda.current_stream()
        with torch.cuda.stream(self._stream):
            self._stream.wait_stream(computing)
            host.copy_(tokens, non_blocking=True)
            event.record()
        return HostTokens(tokens, host, event)

    def send_drafts(self, num_rows: int) -> None:
        """Copy the drafts of the first rows to the device, before the work that is launched next."""
        self.drafts[:num_rows].copy_(self._pinned_drafts[:num_rows], non_blocking=True)
