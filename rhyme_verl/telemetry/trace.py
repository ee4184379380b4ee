"""Trajectory traces: all trajectories of a run in Parquet, for replay and for benchmarks.

A trace is a folder of part files, one series per agent-loop worker. Every part is complete, so a killed run leaves a
readable trace. Imports neither verl, vLLM nor Ray.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
import uuid
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rhyme_verl.telemetry.files import replacing

logger = logging.getLogger(__name__)

FORMAT_KEY = b"rhyme_trace"
FORMAT_VERSION = b"1"
MAX_BUFFERED_ROWS = 4096
WRITE_SECONDS = 30.0
SCHEMA = pa.schema(
    [
        # Version of the weights that finished the answer (0: the initial weights).
        pa.field("step", pa.int32(), nullable=False),
        # How often this run has dispatched the prompt for training, this time included; 0 in validation.
        pa.field("epoch", pa.int32(), nullable=False),
        pa.field("prompt_key", pa.uint64(), nullable=False),  # key of the prompt in the history
        pa.field("sample", pa.int32(), nullable=False),  # index of the answer within its group
        pa.field("prompt", pa.list_(pa.int32()), nullable=False),  # token ids of the first prompt
        # Token ids of the answer: everything after the first prompt, tool outputs included.
        pa.field("tokens", pa.list_(pa.int32()), nullable=False),
        pa.field("reward", pa.float32()),  # null if it is computed elsewhere, for example by a reward model
        pa.field("length", pa.int32(), nullable=False),  # number of `tokens`
        pa.field("validate", pa.bool_(), nullable=False),  # true for a validation rollout
        # For each token of `tokens`, whether it was the policy's most probable one; null if not recorded.
        pa.field("greedy", pa.list_(pa.bool_())),
    ],
    metadata={FORMAT_KEY: FORMAT_VERSION},
)


class TrajectoryRecorder:
    """Records the trajectories of one agent-loop worker. All methods must be called from one event loop.

    At the end of a job Ray kills the worker without notice. Trajectories are therefore written to disk whenever none is
    running, before the trainer sees the last one, and every `WRITE_SECONDS` in trainer modes in which some always run.
    A failure is logged once, and rollouts continue.

    Args:
        folder: the trace's folder, created if missing.
    """

    def __init__(self, folder: str) -> None:
        self._groups: dict[str, tuple[int, bool]] = {}  # epoch and validate, by uid
        self._not_started: set[str] = set()  # groups
        self._running: set[tuple[str, int]] = set()  # group and sample
        self._rows: list[dict[str, Any]] = []
        self._written = time.monotonic()
        self._writing = asyncio.Lock()
        self._name = uuid.uuid4().hex[:12]
        self._num_parts = 0
        self._folder: Path | None = Path(folder)  # None after a failure
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            self._give_up(error)

    def open_group(self, uid: str, epoch: int, validate: bool) -> None:
        self._groups[uid] = (epoch, validate)
        self._not_started.add(uid)

    async def close_group(self, uid: str) -> None:
        del self._groups[uid]
        self._not_started.discard(uid)
        await self._write_if_due()

    def start(self, uid: str, sample: int) -> None:
        self._not_started.discard(uid)
        self._running.add((uid, sample))

    def stop(self, uid: str, sample: int) -> None:
        """Mark a sample as ended. Does nothing if it is already recorded."""
        self._running.discard((uid, sample))

    async def record(
        self, uid: str, sample: int, *, prompt: Sequence[int], tokens: Sequence[int], **columns: Any
    ) -> None:
        """Add a finished trajectory. If no other one is running, all are on disk when this returns.

        Args:
            columns: values of the other columns of SCHEMA, except those of `open_group`; `greedy` may be omitted.
        """
        epoch, validate = self._groups[uid]
        if self._folder is not None:
            row = {**columns, "sample": sample, "epoch": epoch, "validate": validate, "length": len(tokens)}
            row |= {"prompt": np.asarray(prompt, dtype=np.int32), "tokens": np.asarray(tokens, dtype=np.int32)}
            self._rows.append(row)
        self.stop(uid, sample)
        await self._write_if_due()

    async def _write_if_due(self) -> None:
        """Write a part if no trajectory is running, the buffer is full, or the latest part was written long ago."""
        is_idle = not self._running and not self._not_started
        now = time.monotonic()
        if not is_idle and len(self._rows) < MAX_BUFFERED_ROWS and now - self._written <= WRITE_SECONDS:
            return
        self._written = now
        async with self._writing:
            rows, self._rows = self._rows, []
            if not rows or self._folder is None:
                return
            path = self._folder / f"part-{self._name}-{self._num_parts:05d}.parquet"
            self._num_parts += 1
            try:
                await asyncio.to_thread(lambda: write_trace(path, pa.Table.from_pylist(rows, schema=SCHEMA)))
            except (OSError, pa.ArrowException) as error:
                self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self._folder = None
        self._rows = []
        logger.error("the trace cannot be written and stops here in this worker; rollouts continue: %s", error)


def write_trace(path: Path, table: pa.Table) -> None:
    """Write a table of SCHEMA as one file, which appears only when it is complete."""
    with replacing(path) as unfinished:
        pq.write_table(table, unfinished, compression="zstd")


def read_trace(path: str | os.PathLike[str], columns: Collection[str] | None = None) -> pa.Table:
    """Return the trajectories of a file, or of all parts in a folder, sorted by step, prompt_key and sample.

    A nullable column that a trace lacks is filled with nulls.

    Args:
        columns: names of the columns to read, unsorted; the tokens of a long run may not fit into memory. None: all.

    Raises:
        ValueError: there is no trace at `path`, it is malformed, or it has another format or version.
    """
    root = Path(path)
    parts = sorted(root.glob("*.parquet")) if root.is_dir() else [root] if root.is_file() else []
    if not parts:
        raise ValueError(f"{root}: no trace here: give a trace's Parquet file, or a folder with its parts")
    wanted = SCHEMA if columns is None else pa.schema([SCHEMA.field(name) for name in columns])
    table = pa.concat_tables(_read_part(part, wanted) for part in parts)
    if columns is not None:
        return table
    return table.sort_by([("step", "ascending"), ("prompt_key", "ascending"), ("sample", "ascending")])


def _read_part(part: Path, wanted: pa.Schema) -> pa.Table:
    try:
        found = pq.read_schema(part)
        version = (found.metadata or {}).get(FORMAT_KEY)
        if version is None:
            raise ValueError(f"{part}: a Parquet file, but not a rhyme trace")
        if version != FORMAT_VERSION:
            formats = f"trace format {version.decode()}, this version of rhyme_verl reads {FORMAT_VERSION.decode()}"
            raise ValueError(f"{part}: {formats}: record it again")
        for field in SCHEMA:
            if not field.nullable and field.name not in found.names:
                raise ValueError(f"{part}: malformed trace: no column {field.name!r}")
        table = pq.read_table(part, schema=wanted, columns=wanted.names)
    except (pa.ArrowException, OSError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{part}: damaged, malformed, or not a Parquet file: {reason}") from None
    for field in wanted:
        column = table[field.name]
        nulls = 0 if field.nullable else column.null_count
        if pa.types.is_list(field.type):
            nulls += pc.list_flatten(column).null_count
        if nulls:
            raise ValueError(f"{part}: malformed trace: values are missing in column {field.name!r}")
    lengths = [pc.list_value_length(table[name]) for name in ("greedy", "tokens") if name in wanted.names]
    if len(lengths) == 2 and pc.any(pc.not_equal(*lengths)).as_py():
        raise ValueError(f"{part}: malformed trace: `greedy` and `tokens` differ in length")
    return table
