"""Records the trajectories of one agent-loop worker in a trace.

At the end of a job Ray kills the worker without notice. Trajectories are therefore written to disk whenever none is
running, before the trainer sees the last one, and every `WRITE_SECONDS` in trainer modes in which some always run. A
failure is logged once, and rollouts continue. Imports neither verl, vLLM nor Ray.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from rhyme_verl.telemetry.trace import TraceWriter

logger = logging.getLogger(__name__)

WRITE_SECONDS = 30.0


@dataclass
class _RecordedGroup:
    """The answers of a group, from its dispatch to the end of the last one."""

    epoch: int
    validate: bool
    has_started: bool = False
    running: set[int] = field(default_factory=set)  # samples


class TrajectoryRecorder:
    """Tracks groups by uid, and their samples. All methods must be called from one event loop.

    Args:
        folder: the trace's folder, created if missing.
    """

    def __init__(self, folder: str) -> None:
        self._groups: dict[str, _RecordedGroup] = {}
        self._written = time.monotonic()
        self._writer: TraceWriter | None = None
        try:
            self._writer = TraceWriter(folder, uuid.uuid4().hex[:12])
        except OSError as error:
            self._give_up(error)

    def open_group(self, uid: str, epoch: int, validate: bool) -> None:
        self._groups[uid] = _RecordedGroup(epoch, validate)

    async def close_group(self, uid: str) -> None:
        del self._groups[uid]
        await self._flush_if_idle()

    def start(self, uid: str, sample: int) -> None:
        group = self._groups[uid]
        group.has_started = True
        group.running.add(sample)

    def stop(self, uid: str, sample: int) -> None:
        """Mark a sample as ended. Does nothing if it is already recorded."""
        self._groups[uid].running.discard(sample)

    async def record(self, uid: str, sample: int, **columns: Any) -> None:
        """Add a finished trajectory. If no other one is running, all are on disk when this returns.

        Args:
            columns: arguments of `TraceWriter.add`, except `sample` and those of `open_group`.
        """
        group = self._groups[uid]
        columns |= {"epoch": group.epoch, "validate": group.validate, "sample": sample}
        if self._writer is not None:
            try:
                await asyncio.to_thread(self._writer.add, **columns)
            except (OSError, pa.ArrowException) as error:
                self._give_up(error)
        self.stop(uid, sample)
        await self._flush_if_idle()

    async def _flush_if_idle(self) -> None:
        is_idle = all(group.has_started and not group.running for group in self._groups.values())
        now = time.monotonic()
        if self._writer is None or not (is_idle or now - self._written > WRITE_SECONDS):
            return
        self._written = now
        try:
            await asyncio.to_thread(self._writer.flush)
        except (OSError, pa.ArrowException) as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self._writer = None
        logger.error("the trace cannot be written and stops here in this worker; rollouts continue: %s", error)
