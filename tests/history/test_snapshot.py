"""Snapshots of the history: whole, refused when damaged or foreign, and split anew for another number of shards."""

import os

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rhyme_verl.history import snapshot, snapshot_tools
from rhyme_verl.history.snapshot import SnapshotError
from rhyme_verl.history.store import HistoryShard
from rhyme_verl.history.vocabulary import Vocabulary, vocabulary_of
from tests.helpers.answers import add

VOCABULARY = Vocabulary(size=1000, fingerprint="0123456789abcdef")


def filled(num_prompts=20, length=50):
    rng = np.random.default_rng(1)
    shard = HistoryShard(3, 1 << 40)
    for prompt in range(num_prompts):
        for sample in range(4):
            text = rng.integers(0, 1000, length + sample).astype(np.int32)
            add(shard, 2**64 - 1 - prompt, prompt * 4 + sample, sample % 3, text)
            if sample == 2:
                shard.set_reward(2**64 - 1 - prompt, prompt * 4 + sample, 0.25)
    add(shard, 5, 2**64 - 1, 0, np.zeros(0, np.int32))
    return shard


def save(path, shard):
    snapshot.save(path, shard.answers(), VOCABULARY)


def content(rows):
    return [(key, a.answer_id, a.step, a.tokens, str(a.reward)) for key, a in rows]


def test_a_snapshot_holds_everything_in_order(tmp_path, monkeypatch):
    monkeypatch.setattr(snapshot, "ROW_GROUP_TOKENS", 1000)  # several row groups
    shard, path = filled(), tmp_path / "new/shard-0-of-1.parquet"
    save(path, shard)
    assert pq.ParquetFile(path).num_row_groups > 3
    assert content(snapshot.load(path)) == content(shard.answers())
    assert os.listdir(path.parent) == [path.name]


def test_saving_again_replaces_the_file_and_an_unfinished_one_is_never_read(tmp_path):
    path = snapshot.shard_file(tmp_path, 0, 1)
    save(path, filled(num_prompts=2))
    (tmp_path / ".shard-0-of-1.parquet.unfinished").write_bytes(b"half")
    save(path, filled(num_prompts=1))
    assert snapshot.shard_files(tmp_path) == [path]
    assert len(list(snapshot.load(path))) == 5


@pytest.mark.parametrize("damage", ["truncated", "flipped", "emptied", "missing"])
def test_a_damaged_snapshot_is_refused_with_its_name(tmp_path, damage):
    path = tmp_path / "shard-0-of-1.parquet"
    save(path, filled(num_prompts=200))
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
    with pytest.raises(SnapshotError, match="format 9, this version of rhyme_verl reads 3"):
        list(snapshot.load(path))
    pq.write_table(pa.table({"a": [1]}).replace_schema_metadata({snapshot.FORMAT_KEY: b"3"}), path)
    with pytest.raises(SnapshotError, match="columns"):
        list(snapshot.load(path))
    metadata = {snapshot.FORMAT_KEY: b"3", snapshot.SIZE_KEY: b"many", snapshot.FINGERPRINT_KEY: b"0"}
    pq.write_table(snapshot.SCHEMA.empty_table().replace_schema_metadata(metadata), path)
    with pytest.raises(SnapshotError, match="shard-0-of-1.parquet"):
        list(snapshot.load(path))


def test_a_reward_that_is_not_a_number_is_saved_as_unknown(tmp_path):
    shard = HistoryShard(3, 1 << 40)
    shard.set_reward(1, 0, float("nan"))  # before its answer
    for answer_id in range(3):
        add(shard, 1, answer_id, 0, np.array([answer_id], np.int32))
    shard.set_reward(1, 1, float("nan"))
    shard.set_reward(1, 2, 0.5)
    shard.check_integrity()
    save(snapshot.shard_file(tmp_path, 0, 1), shard)
    loaded = snapshot.load(snapshot.shard_file(tmp_path, 0, 1))
    assert [str(answer.reward) for _, answer in loaded] == ["nan", "nan", "0.5"]
    info = snapshot_tools.inspect(tmp_path)
    assert (info["answers"], info["rewarded"], info["mean_reward"]) == (3, 1, 0.5)


def test_the_newest_files_are_of_the_latest_folder_that_has_all_answers_of_a_shard(tmp_path):
    def files(index, num_shards, written_after=0):
        found = snapshot.newest_files(snapshot.folders_of_run(tmp_path), index, num_shards, written_after)
        return [f"{path.parents[1].name} {path.stem}" for path in found]

    assert files(0, 1) == []
    for step, shards in ((9, "0-of-2 1-of-2"), (10, "0-of-1"), (200, "1-of-2"), (201, "1-of-3")):
        for shard in shards.split():
            path = tmp_path / f"global_step_{step}" / snapshot.FOLDER / f"shard-{shard}.parquet"
            save(path, filled(1))
            os.utime(path, (step, step))
    (tmp_path / "global_step_300").mkdir()  # a checkpoint without history
    assert files(1, 3) == ["global_step_201 shard-1-of-3"]
    assert files(1, 2) == ["global_step_200 shard-1-of-2"]
    assert files(0, 2) == files(0, 1) == files(2, 3) == ["global_step_10 shard-0-of-1"]
    assert files(0, 2, written_after=10) == []
    os.utime(tmp_path / "global_step_10" / snapshot.FOLDER / "shard-0-of-1.parquet", (1, 1))
    assert files(0, 2, written_after=5) == ["global_step_9 shard-0-of-2"]
    assert files(0, 1, written_after=5) == ["global_step_9 shard-0-of-2", "global_step_9 shard-1-of-2"]


def test_earlier_checkpoints_are_those_of_the_same_run(tmp_path):
    for step in (9, 10, 200):
        (tmp_path / f"global_step_{step}" / snapshot.FOLDER).mkdir(parents=True)
    chosen = tmp_path / "global_step_10" / snapshot.FOLDER
    assert snapshot.folders_up_to(chosen) == [tmp_path / "global_step_9" / snapshot.FOLDER, chosen]
    best = tmp_path / "best" / snapshot.FOLDER
    assert snapshot.folders_up_to(best) == [best]


def test_a_snapshot_of_another_vocabulary_is_refused_with_the_remedy(tmp_path):
    path = tmp_path / "shard-0-of-1.parquet"
    save(path, filled(1))
    assert snapshot.vocabulary_of_file(path) == VOCABULARY
    assert len(list(snapshot.load(path, VOCABULARY))) == 5
    for other in (Vocabulary(1001, VOCABULARY.fingerprint), Vocabulary(1000, "f" * 16)):
        with pytest.raises(SnapshotError, match="answers are from another model .*: resume from a checkpoint of this"):
            list(snapshot.load(path, other))


def test_token_ids_outside_the_vocabulary_are_damage(tmp_path):
    path = tmp_path / "shard-0-of-1.parquet"
    for bad in (-5, 1000):
        shard = HistoryShard(3, 1 << 40)
        add(shard, 1, 1, 0, np.array([1, bad, 3], np.int32))
        save(path, shard)
        with pytest.raises(SnapshotError, match="token ids outside its vocabulary"):
            list(snapshot.load(path))


def test_a_full_disk_leaves_nothing_behind(tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        save(tmp_path / "shard-0-of-1.parquet", filled(1))
    assert os.listdir(tmp_path) == []


class Tokenizer:
    def __init__(self, **vocabulary):
        self._vocabulary = vocabulary

    def get_vocab(self):
        return self._vocabulary


class Config:
    def __init__(self, vocab_size):
        self.vocab_size = vocab_size

    def get_text_config(self):
        return self


def test_a_vocabulary_is_known_by_its_tokens_their_ids_and_the_models_size():
    one = vocabulary_of(Tokenizer(a=0, b=1), Config(8))
    assert one == vocabulary_of(Tokenizer(b=1, a=0), Config(8))
    others = [(Tokenizer(a=1, b=0), 8), (Tokenizer(a=0, c=1), 8), (Tokenizer(a=0, b=1), 9)]
    assert one not in [vocabulary_of(tokenizer, Config(size)) for tokenizer, size in others]


def test_a_file_that_is_removed_or_cannot_be_read_counts_as_never_written(tmp_path):
    checkpoint = tmp_path / "global_step_1"
    checkpoint.mkdir()
    (checkpoint / "actor").symlink_to(tmp_path / "removed")  # listed, but no longer there
    assert snapshot.saved_time(checkpoint) == snapshot.newest_time(tmp_path) == 0.0
    (checkpoint / "loop").symlink_to(checkpoint / "loop")  # cannot be followed
    (checkpoint / "data.pt").write_bytes(b"")
    assert snapshot.newest_time(tmp_path) == (checkpoint / "data.pt").stat().st_mtime
