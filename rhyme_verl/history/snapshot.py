"""Snapshots of the history on disk, next to verl's checkpoints, so that a resumed job drafts as well as before.

Parquet files with checksums, written under a temporary name and then renamed. Loading executes no code from them, and
rejects a damaged or foreign file as a whole. This module does not use Ray.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rhyme_verl.history.answers import UNKNOWN_REWARD, Answer
from rhyme_verl.history.vocabulary import Vocabulary
from rhyme_verl.telemetry.files import replacing

FOLDER = "rhyme_history"  # in a checkpoint's folder
MODEL_FOLDER = "actor"  # of verl, in a checkpoint's folder
FORMAT_KEY = b"rhyme_history"
FORMAT_VERSION = b"3"
SIZE_KEY = b"vocabulary_size"
FINGERPRINT_KEY = b"tokenizer_fingerprint"
SCHEMA = pa.schema(
    [
        pa.field("prompt_key", pa.uint64(), nullable=False),
        pa.field("answer_id", pa.uint64(), nullable=False),
        pa.field("step", pa.int64(), nullable=False),
        pa.field("reward", pa.float32()),  # null: unknown
        pa.field("tokens", pa.large_list(pa.int32()), nullable=False),
    ]
)
ROW_GROUP_TOKENS = 1 << 22


class SnapshotError(ValueError):
    """A snapshot cannot be used; the message is one line with the file and the reason."""


def save(path: Path, answers: Iterable[tuple[int, Answer]], vocabulary: Vocabulary) -> None:
    """Write answers with their prompt keys to `path`, which appears only when it is complete.

    Raises:
        OSError: the file could not be written.
    """
    size, fingerprint = str(vocabulary.size).encode(), vocabulary.fingerprint.encode()
    metadata = {FORMAT_KEY: FORMAT_VERSION, SIZE_KEY: size, FINGERPRINT_KEY: fingerprint}
    schema = SCHEMA.with_metadata(metadata)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as unfinished, open(unfinished, "wb") as file:
        with pq.ParquetWriter(file, schema, compression="zstd", write_page_checksum=True) as writer:
            for table in _row_groups(answers):
                writer.write_table(table.cast(schema))
        file.flush()
        os.fsync(file.fileno())
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def load(path: Path, expected: Vocabulary | None = None) -> Iterator[tuple[int, Answer]]:
    """Read the answers of a snapshot with their prompt keys, in the order in which the store held them.

    Args:
        expected: required vocabulary of the answers; None: any.

    Raises:
        SnapshotError: the file is damaged, is not a snapshot of this format version, or has another vocabulary. If
            this is raised after some answers, discard them.
    """
    with _opened(path) as (file, vocabulary):
        if expected not in (None, vocabulary):
            raise SnapshotError(
                f"{path}: its answers are from another model ({vocabulary}; this job: {expected}): resume from a "
                "checkpoint of this model, or remove the folder"
            )
        for index in range(file.num_row_groups):
            for batch in file.read_row_group(index).to_batches():
                yield from _answers(path, batch, vocabulary.size)


def vocabulary_of_file(path: Path) -> Vocabulary:
    """Return the vocabulary of a snapshot's answers.

    Raises:
        SnapshotError: the file is damaged, or is not a snapshot of this format version.
    """
    with _opened(path) as (_, vocabulary):
        return vocabulary


@contextmanager
def _opened(path: Path) -> Iterator[tuple[pq.ParquetFile, Vocabulary]]:
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            yield file, _vocabulary(path, file.schema_arrow)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:  # the last one: names of columns
        raise SnapshotError(f"{path}: cannot be read: {str(error).splitlines()[0]}") from None


def shard_file(folder: Path, index: int, num_shards: int) -> Path:
    return folder / f"shard-{index}-of-{num_shards}.parquet"


def newest_time(checkpoints: Path) -> float:
    """Return the time of the newest file of these checkpoints and their snapshots, by its file system's clock; 0: none.

    What is newer belongs to the run that begins now.
    """
    files = [file for folder in folders_of_run(checkpoints) for file in shard_files(folder)]
    saved = (saved_time(checkpoint) for checkpoint in checkpoints.glob("global_step_*"))
    return max([*map(_modified, files), *saved], default=0.0)


def saved_time(checkpoint: Path) -> float:
    """Return when verl has saved a checkpoint, by its file system's clock; 0: never.

    A run that begins anew in the folder of an earlier one meets that one's checkpoints, which are not its own.
    """
    entries = (entry for entry in checkpoint.glob("*") if entry.name != FOLDER)
    return max(map(_modified, entries), default=0.0)


def _modified(file: Path) -> float:
    """Return when a file was last written; 0: verl has just removed it with an old checkpoint, or it cannot be read."""
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0


def newest_files(folders: Sequence[Path], index: int, num_shards: int, written_after: float = 0.0) -> list[Path]:
    """Return the files that hold a shard's answers, from the last of these folders that has all of them.

    These are the shard's own file, or a file for each shard of another number of shards. Another folder may lack them,
    because a job or an actor ended while it saved.

    Args:
        written_after: Unix time; older files do not count.
    """
    for folder in reversed(folders):
        names = {file.name for file in shard_files(folder) if _modified(file) > written_after}
        own = shard_file(folder, index, num_shards)
        if own.name in names:
            return [own]
        for count in range(1, len(names) + 1):
            files = [shard_file(folder, shard, count) for shard in range(count)]
            if all(file.name in names for file in files):
                return files
    return []


def folders_up_to(newest: Path) -> list[Path]:
    """Return `newest` as the last one of the snapshot folders of its own and earlier checkpoints, by step."""
    step = step_of(newest)
    earlier = folders_of_run(newest.parents[1]) if step >= 0 else []
    return [folder for folder in earlier if step_of(folder) < step] + [newest]


def folders_of_run(checkpoints: Path) -> list[Path]:
    """Return the snapshot folders of all checkpoints, by step; some may be empty."""
    steps = {folder: step_of(folder) for folder in checkpoints.glob(f"global_step_*/{FOLDER}")}
    return sorted((folder for folder in steps if steps[folder] >= 0), key=lambda folder: steps[folder])


def step_of(folder: Path) -> int:
    """Return the step of a snapshot's checkpoint; -1 if its name does not tell."""
    step = folder.parent.name.removeprefix("global_step_")
    return int(step) if step.isdecimal() else -1


def expired_checkpoints(newest: Path) -> list[Path]:
    """Return the checkpoints next to `newest` whose models verl has removed (`max_actor_ckpt_to_keep`)."""
    if not (newest / MODEL_FOLDER).is_dir():  # not stored as verl does
        return []
    return [folder for folder in newest.parent.glob("global_step_*") if not (folder / MODEL_FOLDER).exists()]


def shard_files(folder: Path) -> list[Path]:
    """Return the files of all shards in a snapshot's folder, for any number of shards."""
    return sorted(path for path in folder.glob("shard-*.parquet") if re.fullmatch(r"shard-\d+-of-\d+", path.stem))


def _row_groups(answers: Iterable[tuple[int, Answer]]) -> Iterator[pa.Table]:
    rows: list[tuple[int, Answer]] = []
    num_tokens = 0
    for row in answers:
        rows.append(row)
        num_tokens += row[1].num_tokens
        if num_tokens >= ROW_GROUP_TOKENS:
            yield _table(rows)
            rows, num_tokens = [], 0
    if rows:
        yield _table(rows)


def _table(rows: list[tuple[int, Answer]]) -> pa.Table:
    ends = np.cumsum([0, *(answer.num_tokens for _, answer in rows)], dtype=np.int64)
    tokens = np.frombuffer(b"".join(answer.tokens for _, answer in rows), dtype=np.int32)
    return pa.Table.from_arrays(
        [
            pa.array([key for key, _ in rows], pa.uint64()),
            pa.array([answer.answer_id for _, answer in rows], pa.uint64()),
            pa.array([answer.step for _, answer in rows], pa.int64()),
            pa.array([answer.reward for _, answer in rows], pa.float32(), from_pandas=True),
            pa.LargeListArray.from_arrays(ends, tokens),
        ],
        schema=SCHEMA,
    )


def _answers(path: Path, batch: pa.RecordBatch, vocabulary_size: int) -> Iterator[tuple[int, Answer]]:
    keys, ids, steps, rewards, tokens = batch.columns
    numbers = zip(keys.to_pylist(), ids.to_pylist(), steps.to_pylist(), rewards.to_pylist(), strict=True)
    for (key, answer_id, step, reward), scalar in zip(numbers, tokens, strict=True):
        ids_of_tokens = scalar.values.to_numpy()
        if len(ids_of_tokens) and not 0 <= ids_of_tokens.min() <= ids_of_tokens.max() < vocabulary_size:
            raise SnapshotError(f"{path}: damaged: it has token ids outside its vocabulary")
        yield key, Answer(answer_id, step, ids_of_tokens.tobytes(), UNKNOWN_REWARD if reward is None else reward)


def _vocabulary(path: Path, schema: pa.Schema) -> Vocabulary:
    metadata = schema.metadata or {}
    version = metadata.get(FORMAT_KEY)
    if version is None:
        raise SnapshotError(f"{path}: a Parquet file, but not a snapshot of rhyme_verl's history")
    if version != FORMAT_VERSION:
        found, known = version.decode(errors="replace"), FORMAT_VERSION.decode()
        raise SnapshotError(f"{path}: format {found}, this version of rhyme_verl reads {known}")
    if not schema.equals(SCHEMA) or not {SIZE_KEY, FINGERPRINT_KEY} <= metadata.keys():
        raise SnapshotError(f"{path}: its columns are not those of a snapshot")
    try:
        return Vocabulary(int(metadata[SIZE_KEY]), metadata[FINGERPRINT_KEY].decode())
    except ValueError as error:
        raise SnapshotError(f"{path}: damaged: {error}") from error
