"""Snapshots of the history: whole, refused when damaged or foreign, and split anew for another number of shards."""

import os

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rhyme_verl.history import snapshot
from rhyme_verl.history.snapshot import SnapshotError
from rhyme_verl.history.store import HistoryShard


def filled(num_prompts=20, length=50):
    rng = np.random.default_rng(1)
    shard = HistoryShard(3, 1 << 40)
    for prompt in range(num_prompts):
        for sample in range(4):
            text = rng.integers(0, 1000, length + sample).astype(np.int32)
            shard.add(2**64 - 1 - prompt, prompt * 4 + sample, sample % 3, text)
            if sample == 2:
                shard.set_reward(2**64 - 1 - prompt, next(reversed(list(shard.answers())))[1].content_hash, 0.25)
    shard.add(5, 2**64 - 1, 0, np.zeros(0, np.int32))
    return shard


def content(rows):
    return [(key, a.answer_id, a.step, a.tokens, a.content_hash, str(a.reward)) for key, a in rows]


def test_a_snapshot_holds_everything_in_order(tmp_path, monkeypatch):
    monkeypatch.setattr(snapshot, "ROW_GROUP_TOKENS", 1000)  # several row groups
    shard, path = filled(), tmp_path / "new/shard-0-of-1.parquet"
    snapshot.save(path, shard)
    assert pq.ParquetFile(path).num_row_groups > 3
    assert content(snapshot.load(path)) == content(shard.answers())
    assert os.listdir(path.parent) == [path.name]


def test_saving_again_replaces_the_file_and_an_unfinished_one_is_never_read(tmp_path):
    path = snapshot.shard_file(tmp_path, 0, 1)
    snapshot.save(path, filled(num_prompts=2))
    (tmp_path / ".shard-0-of-1.parquet.unfinished").write_bytes(b"half")
    snapshot.save(path, filled(num_prompts=1))
    assert snapshot.shard_files(tmp_path) == [path]
    assert len(list(snapshot.load(path))) == 5


@pytest.mark.parametrize("damage", ["truncated", "flipped", "emptied", "missing"])
def test_a_damaged_snapshot_is_refused_with_its_name(tmp_path, damage):
    path = tmp_path / "shard-0-of-1.parquet"
    snapshot.save(path, filled(num_prompts=200))
    data = bytearray(path.read_bytes())
    if damage == "truncated":
        path.write_bytes(data[: len(data) // 2])
    elif damage == "flipped":
        data[len(data) // 2] ^= 1  # one bit of a page
        path.write_bytes(data)
    elif damage == "emptied":
        path.write_bytes(b"")
    else:
        path.unlink()
    with pytest.raises(SnapshotError, match="shard-0-of-1.parquet: cannot be read") as error:
        list(snapshot.load(path))
    assert "\n" not in str(error.value)


def test_foreign_files_and_other_versions_are_refused(tmp_path):
    path = tmp_path / "shard-0-of-1.parquet"
    pq.write_table(pa.table({"prompt_key": [1]}), path)
    with pytest.raises(SnapshotError, match="not a snapshot of rhyme_verl's history"):
        list(snapshot.load(path))
    pq.write_table(pa.table({"a": [1]}).replace_schema_metadata({snapshot.FORMAT_KEY: b"9"}), path)
    with pytest.raises(SnapshotError, match="format 9, this version of rhyme_verl reads 1"):
        list(snapshot.load(path))
    pq.write_table(pa.table({"a": [1]}).replace_schema_metadata({snapshot.FORMAT_KEY: b"1"}), path)
    with pytest.raises(SnapshotError, match="columns"):
        list(snapshot.load(path))


def test_the_newest_folder_is_the_latest_checkpoint_that_was_written_late_enough(tmp_path):
    assert snapshot.newest_folder(tmp_path, written_after=0) is None
    for step in (9, 10, 200):
        folder = tmp_path / f"global_step_{step}" / snapshot.FOLDER
        snapshot.save(snapshot.shard_file(folder, 0, 1), filled(1))
        os.utime(snapshot.shard_file(folder, 0, 1), (step, step))
    (tmp_path / "global_step_300").mkdir()  # a checkpoint without history
    assert snapshot.newest_folder(tmp_path, written_after=0).parent.name == "global_step_200"
    os.utime(snapshot.shard_file(tmp_path / "global_step_200" / snapshot.FOLDER, 0, 1), (1, 1))
    assert snapshot.newest_folder(tmp_path, written_after=5).parent.name == "global_step_10"
    assert snapshot.newest_folder(tmp_path, written_after=11) is None
