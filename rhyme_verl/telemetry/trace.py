"""Trajectory traces: all trajectories of a run in Parquet, for replay and for benchmarks.

A trace is a folder of part files, one series per writer. Every part is complete, so a killed run leaves a readable
trace. Imports neither verl, vLLM nor Ray.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rhyme_verl.telemetry.files import replacing

FORMAT_KEY = b"rhyme_trace"
FORMAT_VERSION = b"1"
MAX_BUFFERED_ROWS = 4096
SCHEMA = pa.schema(
    [
        pa.field("step", pa.int32(), nullable=False),
        pa.field("epoch", pa.int32(), nullable=False),
        pa.field("prompt_key", pa.uint64(), nullable=False),
        pa.field("sample", pa.int32(), nullable=False),
        pa.field("prompt", pa.list_(pa.int32()), nullable=False),
        pa.field("tokens", pa.list_(pa.int32()), nullable=False),
        pa.field("reward", pa.float32()),
        pa.field("length", pa.int32(), nullable=False),
        pa.field("validate", pa.bool_(), nullable=False),
        # For each token of `tokens`, whether it was the policy's most probable one; null if not recorded.
        pa.field("greedy", pa.list_(pa.bool_())),
    ],
    metadata={FORMAT_KEY: FORMAT_VERSION},
)


@dataclass(frozen=True, kw_only=True)
class TraceRow:
    """One row of a trace.

    Attributes:
        step: version of the weights that finished the answer (0: the initial weights).
        epoch: how often this run has dispatched the prompt for training, this time included; 0 in validation.
        prompt_key: key of the prompt in the history.
        sample: index of the answer within its group.
        prompt: token ids of the first prompt.
        tokens: token ids of the answer: everything after the first prompt, tool outputs included.
        reward: None if it is computed elsewhere, for example by the trainer's reward model.
        validate: true for a validation rollout.
    """

    step: int
    epoch: int
    prompt_key: int
    sample: int
    prompt: Sequence[int]
    tokens: Sequence[int]
    reward: float | None
    validate: bool


class TraceWriter:
    """Buffers trajectories and writes them as part files of `folder`. Thread-safe.

    Args:
        folder: created if missing.
        writer_name: part of the file names; must be unique among the writers of a folder.
    """

    def __init__(self, folder: str | os.PathLike[str], writer_name: str) -> None:
        self._folder = Path(folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._writer_name = writer_name
        self._num_parts = 0
        self._rows: list[dict[str, Any]] = []
        self._lock = threading.Lock()

    def add(self, trajectory: TraceRow) -> None:
        """Add a trajectory. Writes a part when the buffer is full.

        Raises:
            OSError: a part could not be written.
        """
        row = {
            **vars(trajectory),
            "prompt": np.asarray(trajectory.prompt, dtype=np.int32),
            "tokens": np.asarray(trajectory.tokens, dtype=np.int32),
            "length": len(trajectory.tokens),
        }
        with self._lock:
            self._rows.append(row)
            if len(self._rows) >= MAX_BUFFERED_ROWS:
                self._write()

    def flush(self) -> None:
        """Write the buffered trajectories, if any.

        Raises:
            OSError: the part could not be written.
        """
        with self._lock:
            if self._rows:
                self._write()

    def _write(self) -> None:
        path = self._folder / f"part-{self._writer_name}-{self._num_parts:05d}.parquet"
        write_trace(path, pa.Table.from_pylist(self._rows, schema=SCHEMA))
        self._num_parts += 1
        self._rows = []


def write_trace(path: Path, table: pa.Table) -> None:
    """Write a table of SCHEMA as one file, which appears only when it is complete."""
    with replacing(path) as unfinished:
        pq.write_table(table, unfinished, compression="zstd")


def read_trace(path: str | os.PathLike[str]) -> pa.Table:
    """Return the trajectories of a file, or of all parts in a folder, sorted by step, prompt_key and sample.

    A nullable column that a trace lacks is filled with nulls.

    Raises:
        ValueError: there is no trace at `path`, it is malformed, or it has another format or version.
    """
    root = Path(path)
    parts = sorted(root.glob("*.parquet")) if root.is_dir() else [root] if root.is_file() else []
    if not parts:
        raise ValueError(f"{root}: no trace here: give a trace's Parquet file, or a folder with its parts")
    table = pa.concat_tables([_read_part(part) for part in parts])
    return table.sort_by([("step", "ascending"), ("prompt_key", "ascending"), ("sample", "ascending")])


def _read_part(part: Path) -> pa.Table:
    try:
        found = pq.read_schema(part)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{part}: damaged, or not a Parquet file: {_one_line(error)}") from None
    version = (found.metadata or {}).get(FORMAT_KEY)
    if version is None:
        raise ValueError(f"{part}: a Parquet file, but not a rhyme trace")
    if version != FORMAT_VERSION:
        raise ValueError(
            f"{part}: trace format {version.decode()}, this version of rhyme_verl reads {FORMAT_VERSION.decode()}: "
            "record it again"
        )
    for field in SCHEMA:
        if not field.nullable and field.name not in found.names:
            raise ValueError(f"{part}: malformed trace: no column {field.name!r}")
    try:
        table = pq.read_table(part, schema=SCHEMA)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{part}: malformed trace: {_one_line(error)}") from None
    for field in SCHEMA:
        column = table[field.name]
        nulls = 0 if field.nullable else column.null_count
        if pa.types.is_list(field.type):
            nulls += pc.list_flatten(column).null_count
        if nulls:
            raise ValueError(f"{part}: malformed trace: values are missing in column {field.name!r}")
    if pc.any(pc.not_equal(pc.list_value_length(table["greedy"]), pc.list_value_length(table["tokens"]))).as_py():
        raise ValueError(f"{part}: malformed trace: `greedy` and `tokens` differ in length")
    return table


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
