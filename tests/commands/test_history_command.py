"""`rhyme history`: info, prune and export of saved snapshots."""

import json

import numpy as np
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from rhyme_verl.cli import app
from rhyme_verl.history import snapshot, snapshot_tools
from rhyme_verl.history.store import HistoryShard
from rhyme_verl.history.vocabulary import Vocabulary
from tests.helpers.answers import add

PROMPTS = 3


def rhyme(*arguments):
    result = CliRunner().invoke(app, ["history", *map(str, arguments)])
    return result.exit_code, result.output


def save(checkpoint, num_steps, num_shards=2):
    """A snapshot with one answer of 10 tokens to each prompt in each step; prompt 0 is rewarded in step 1."""
    for index in range(num_shards):
        shard = HistoryShard(window_epochs=10, budget_bytes=1 << 30)
        for step in range(num_steps):
            for prompt in range(index, PROMPTS, num_shards):
                add(shard, prompt, step << 32 | prompt, step, np.arange(10, dtype=np.int32) + step + prompt)
        path = snapshot.shard_file(checkpoint / snapshot.FOLDER, index, num_shards)
        snapshot.save(path, shard.answers(), Vocabulary(size=1000, fingerprint="0123456789abcdef"))


@pytest.fixture
def checkpoints(tmp_path):
    save(tmp_path / "global_step_9", 2)
    save(tmp_path / "global_step_10", 4)
    (tmp_path / "global_step_11").mkdir()  # a checkpoint without history
    return tmp_path


def test_info_shows_all_snapshots_in_order(checkpoints):
    code, output = rhyme("info", checkpoints)
    assert code == 0
    rows = [line.replace("│", " ").split() for line in output.splitlines() if "global_step" in line]
    assert [row[:6] for row in rows] == [
        ["global_step_9", "2", "3", "6", "60", "0-1"],
        ["global_step_10", "2", "3", "12", "120", "0-3"],
    ]


def test_prune_keeps_the_latest_rollouts_of_every_prompt(checkpoints):
    code, output = rhyme("prune", checkpoints / "global_step_10", "--window-epochs", 1)
    assert code == 0 and "12 answers before, 3 now" in output
    files = snapshot.shard_files(checkpoints / "global_step_10" / snapshot.FOLDER)
    assert {(key, answer.step) for file in files for key, answer in snapshot.load(file)} == {(0, 3), (1, 3), (2, 3)}
    assert rhyme("prune", checkpoints)[0] == 2, "without a bound there is nothing to do"


def test_prune_by_memory_drops_the_oldest(checkpoints):
    code, output = rhyme("prune", checkpoints / "global_step_10", "--budget-gib", 4000 / 2**30)
    assert code == 0
    files = snapshot.shard_files(checkpoints / "global_step_10" / snapshot.FOLDER)
    steps = {answer.step for file in files for _, answer in snapshot.load(file)}
    assert 3 in steps and 0 not in steps, steps


@pytest.mark.parametrize("name", ["answers.parquet", "answers.jsonl"])
def test_export_writes_the_latest_snapshot(checkpoints, name, monkeypatch):
    monkeypatch.setattr(snapshot_tools, "ROW_GROUP", 5)
    out = checkpoints / name
    code, output = rhyme("export", checkpoints, "--out", out)
    assert code == 0 and "12 answers" in output
    if out.suffix == ".parquet":
        rows = pq.read_table(out).to_pylist()
    else:
        rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows) == 12
    assert {"prompt_key": 1, "step": 3, "reward": None, "tokens": list(range(4, 14))} in rows


def test_a_damaged_snapshot_is_told_and_left_as_it_is(checkpoints):
    file = snapshot.shard_files(checkpoints / "global_step_10" / snapshot.FOLDER)[1]
    damaged = file.read_bytes()[:-20]
    file.write_bytes(damaged)
    for command in (["info", checkpoints], ["prune", checkpoints / "global_step_10", "--window-epochs", 1]):
        code, output = rhyme(*command)
        assert code == 1 and file.name in output.replace("\n", "")
    assert file.read_bytes() == damaged


def test_a_folder_without_history_is_told_with_what_to_give(tmp_path):
    code, output = rhyme("info", tmp_path)
    assert code == 1 and "trainer.default_local_dir" in output
    (tmp_path / "global_step_1").mkdir()
    assert rhyme("export", tmp_path / "global_step_1", "--out", tmp_path / "x.csv")[0] == 1
