"""Inspects, prunes and exports the snapshots of a run, for the `rhyme history` command."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rhyme_verl.history import snapshot
from rhyme_verl.history.answers import Answer
from rhyme_verl.history.snapshot import SnapshotError
from rhyme_verl.history.store import HistoryShard
from rhyme_verl.telemetry.files import replacing

UNBOUNDED = 1 << 62
EXPORT_SCHEMA = pa.schema([snapshot.SCHEMA.field(name) for name in ("prompt_key", "step", "reward", "tokens")])
ROW_GROUP = 1024  # answers that are in memory at once


def find(path: Path) -> list[Path]:
    """Return the snapshot folders at a path: a snapshot's, a checkpoint's, or those of all checkpoints in order.

    Raises:
        SnapshotError: there is no snapshot.
    """
    for folder in (path, path / snapshot.FOLDER):
        if folder.is_dir() and snapshot.shard_files(folder):
            return [folder]
    found = [folder for folder in snapshot.folders_of_run(path) if snapshot.shard_files(folder)]
    if not found:
        raise SnapshotError(
            f"{path}: no snapshot of rhyme_verl's history: give a checkpoint (global_step_N), or the folder of a run's "
            "checkpoints (trainer.default_local_dir)"
        )
    return found


def inspect(folder: Path) -> dict[str, Any]:
    """Read a whole snapshot and return its content in numbers; unknown ones are NaN.

    Raises:
        SnapshotError: a file is damaged.
    """
    files = snapshot.shard_files(folder)
    rows = [(key, answer.step, answer.num_tokens, answer.reward) for key, answer in _answers(files)]
    prompts, steps, tokens, rewards = zip(*rows, strict=True) if rows else ((),) * 4
    known = [reward for reward in rewards if not math.isnan(reward)]
    return {
        "shards": len(files),
        "prompts": len(set(prompts)),
        "answers": len(rows),
        "tokens": sum(tokens),
        "first_step": min(steps, default=math.nan),
        "last_step": max(steps, default=math.nan),
        "rewarded": len(known),
        "mean_reward": float(np.mean(known)) if known else math.nan,
        "disk_bytes": sum(file.stat().st_size for file in files),
    }


def prune(folder: Path, window_epochs: int | None, budget_bytes: int | None) -> tuple[int, int]:
    """Rewrite a snapshot with only the answers that a store with these bounds keeps. Replaces each file atomically.

    Args:
        window_epochs: number of latest rollouts whose answers are kept, per prompt; None: all.
        budget_bytes: memory limit of the whole store; None: no limit.

    Returns:
        The number of answers before and after.

    Raises:
        SnapshotError: a file is damaged; no file has been changed.
    """
    files = snapshot.shard_files(folder)
    before, shards = 0, []
    for file in files:
        budget = UNBOUNDED if budget_bytes is None else budget_bytes // len(files)
        shard = HistoryShard(window_epochs or UNBOUNDED, budget)
        for prompt_key, answer in snapshot.load(file):
            shard.add(prompt_key, answer)
            before += 1
        shards.append(shard)
    for file, shard in zip(files, shards, strict=True):
        snapshot.save(file, shard.answers(), snapshot.vocabulary_of_file(file))
    return before, sum(shard.counters().answers for shard in shards)


def export(folder: Path, target: Path) -> int:
    """Write a snapshot's answers to one Parquet or JSON-lines file, by its suffix. Returns their number.

    A row holds prompt_key (uint64; the history does not keep the prompts), step, reward (or null) and tokens.

    Raises:
        SnapshotError: a file is damaged, or the suffix is neither .parquet nor .jsonl.
    """
    if target.suffix not in (".parquet", ".jsonl"):
        raise SnapshotError(f"{target}: give a file that ends in .parquet or .jsonl")
    rows = map(_row, _answers(snapshot.shard_files(folder)))
    count = 0
    target.parent.mkdir(parents=True, exist_ok=True)
    with replacing(target) as unfinished, _writer(target.suffix, unfinished) as write:
        while group := list(itertools.islice(rows, ROW_GROUP)):
            write(group)
            count += len(group)
    return count


@contextmanager
def _writer(suffix: str, file: Path) -> Iterator[Callable[[list[dict[str, Any]]], None]]:
    if suffix == ".parquet":
        with pq.ParquetWriter(file, EXPORT_SCHEMA, compression="zstd") as parquet:
            yield lambda rows: parquet.write_table(pa.Table.from_pylist(rows, schema=EXPORT_SCHEMA))
    else:
        with open(file, "w", encoding="utf-8") as lines:
            yield lambda rows: lines.writelines(json.dumps(row) + "\n" for row in rows)


def _row(one: tuple[int, Answer]) -> dict[str, Any]:
    prompt_key, answer = one
    return {
        "prompt_key": prompt_key,
        "step": answer.step,
        "reward": None if math.isnan(answer.reward) else answer.reward,
        "tokens": np.frombuffer(answer.tokens, dtype=np.int32).tolist(),
    }


def _answers(files: list[Path]) -> Iterator[tuple[int, Answer]]:
    for file in files:
        yield from snapshot.load(file)
