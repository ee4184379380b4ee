"""Inspects, prunes and exports the snapshots of a run, for the `rhyme history` command."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rhyme_verl.history import snapshot
from rhyme_verl.history.answers import Answer
from rhyme_verl.history.snapshot import SnapshotError
from rhyme_verl.history.store import HistoryShard

UNBOUNDED = 1 << 62
EXPORT_SCHEMA = pa.schema(
    [
        pa.field("prompt_key", pa.uint64(), nullable=False),
        pa.field("step", pa.int64(), nullable=False),
        pa.field("reward", pa.float32()),
        pa.field("tokens", pa.list_(pa.int32()), nullable=False),
    ]
)


@dataclass(frozen=True, kw_only=True)
class SnapshotInfo:
    """The content of one snapshot, in numbers.

    Attributes:
        shards: number of shards; each has one file in `folder`.
        first_step, last_step: lowest and highest step of its answers; 0 in an empty snapshot.
        rewarded: number of answers whose reward is known.
        mean_reward: mean of the known rewards; NaN if there are none.
        disk_bytes: total size of the files.
    """

    folder: Path
    shards: int
    prompts: int
    answers: int
    tokens: int
    first_step: int
    last_step: int
    rewarded: int
    mean_reward: float
    disk_bytes: int


def find(path: Path) -> list[Path]:
    """Return the snapshot folders at a path: of a snapshot, a checkpoint, or all checkpoints of a run in order.

    Raises:
        SnapshotError: there is no snapshot.
    """
    for folder in (path, path / snapshot.FOLDER):
        if folder.is_dir() and snapshot.shard_files(folder):
            return [folder]
    found = [folder for folder in path.glob(f"global_step_*/{snapshot.FOLDER}") if snapshot.shard_files(folder)]
    if not found:
        raise SnapshotError(
            f"{path}: no snapshot of rhyme_verl's history: give a checkpoint (global_step_N), or the folder of a run's "
            "checkpoints (trainer.default_local_dir)"
        )
    return sorted(found, key=_step)


def inspect(folder: Path) -> SnapshotInfo:
    """Read a whole snapshot and summarize it.

    Raises:
        SnapshotError: a file is damaged.
    """
    files = snapshot.shard_files(folder)
    prompts: set[int] = set()
    steps: list[int] = []
    rewards: list[float] = []
    tokens = 0
    for prompt_key, answer in _answers(files):
        prompts.add(prompt_key)
        steps.append(answer.step)
        rewards.append(answer.reward)
        tokens += answer.num_tokens
    known = [reward for reward in rewards if reward == reward]
    return SnapshotInfo(
        folder=folder,
        shards=len(files),
        prompts=len(prompts),
        answers=len(steps),
        tokens=tokens,
        first_step=min(steps, default=0),
        last_step=max(steps, default=0),
        rewarded=len(known),
        mean_reward=float(np.mean(known)) if known else float("nan"),
        disk_bytes=sum(file.stat().st_size for file in files),
    )


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
            shard.restore(prompt_key, answer)
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
    rows = [
        {
            "prompt_key": prompt_key,
            "step": answer.step,
            "reward": answer.reward if answer.reward == answer.reward else None,
            "tokens": np.frombuffer(answer.tokens, dtype=np.int32).tolist(),
        }
        for prompt_key, answer in _answers(snapshot.shard_files(folder))
    ]
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows, schema=EXPORT_SCHEMA), target, compression="zstd")
    else:
        target.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return len(rows)


def _answers(files: list[Path]) -> Iterator[tuple[int, Answer]]:
    for file in files:
        yield from snapshot.load(file)


def _step(folder: Path) -> int:
    match = re.fullmatch(r"global_step_(\d+)", folder.parent.name)
    return int(match[1]) if match else -1
