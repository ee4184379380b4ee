"""What a dispatch worker's recorder has on disk, and when."""

import asyncio
import logging

import pytest

from rhyme_verl.telemetry import trace
from rhyme_verl.telemetry.trace import TrajectoryRecorder, read_trace


async def record(recorder, uid, sample, reward=1.0):
    await recorder.record(uid, sample, step=3, prompt_key=7, prompt=[1, 2], tokens=[5, 6], reward=reward)


def test_everything_is_on_disk_as_soon_as_nothing_runs(tmp_path):
    async def scenario():
        recorder = TrajectoryRecorder(str(tmp_path))
        recorder.open_group("a", epoch=2, validate=False)
        recorder.open_group("b", epoch=0, validate=True)
        for sample in range(2):
            recorder.start("a", sample)
        for sample in range(2):
            await record(recorder, "a", sample)
        assert not list(tmp_path.iterdir()), "b has been dispatched and not begun"
        recorder.start("b", 0)
        recorder.start("b", 1)
        await record(recorder, "b", 1, reward=None)
        await recorder.close_group("a")
        assert not list(tmp_path.iterdir()), "a sample of b is running"
        await record(recorder, "b", 0)
        rows = read_trace(tmp_path).select(["epoch", "sample", "reward", "validate"]).to_pylist()
        assert sorted(tuple(row.values()) for row in rows if row["reward"] is not None) == [
            (0, 0, 1.0, True),
            (2, 0, 1.0, False),
            (2, 1, 1.0, False),
        ]
        assert len(rows) == 4
        await recorder.close_group("b")
        assert len(list(tmp_path.iterdir())) == 1

    asyncio.run(scenario())


def test_where_something_always_runs_it_is_written_from_time_to_time(tmp_path, monkeypatch):
    async def scenario():
        recorder = TrajectoryRecorder(str(tmp_path))
        recorder.open_group("a", epoch=1, validate=False)
        for sample in range(3):
            recorder.start("a", sample)
        await record(recorder, "a", 0)
        assert not list(tmp_path.iterdir())
        monkeypatch.setattr(trace, "WRITE_SECONDS", 0.0)
        await record(recorder, "a", 1)
        assert read_trace(tmp_path).num_rows == 2

    asyncio.run(scenario())


def test_a_sample_that_failed_holds_nothing_back(tmp_path):
    async def scenario():
        recorder = TrajectoryRecorder(str(tmp_path))
        recorder.open_group("a", epoch=1, validate=False)
        recorder.start("a", 0)
        recorder.start("a", 1)
        await record(recorder, "a", 0)
        recorder.stop("a", 1)
        await recorder.close_group("a")
        assert read_trace(tmp_path).num_rows == 1

    asyncio.run(scenario())


@pytest.mark.parametrize("when", ["at first", "later"])
def test_a_trace_that_cannot_be_written_is_said_once_and_stops_nothing(tmp_path, caplog, when):
    folder = tmp_path / "trace"

    async def scenario():
        if when == "at first":
            folder.write_text("a file in the way")
        recorder = TrajectoryRecorder(str(folder))
        if when == "later":
            folder.rmdir()
        for uid in ("a", "b"):
            recorder.open_group(uid, epoch=1, validate=False)
            recorder.start(uid, 0)
            await record(recorder, uid, 0)
            await recorder.close_group(uid)

    with caplog.at_level(logging.ERROR):
        asyncio.run(scenario())
    assert caplog.text.count("the trace cannot be written") == 1
