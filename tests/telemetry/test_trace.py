"""Trajectory traces: round trip, order, complete parts, foreign files refused."""

import asyncio

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rhyme_verl.telemetry import trace
from rhyme_verl.telemetry.trace import TrajectoryRecorder, read_trace
from tests.helpers.traces import write_trajectories


def trajectory(step=0, prompt_key=7, sample=0, tokens=(4, 5, 6), reward=1.0):
    return dict(
        step=step,
        epoch=step + 1,
        prompt_key=prompt_key,
        sample=sample,
        prompt=[1, 2],
        tokens=tokens,
        reward=reward,
        validate=False,
    )


async def record(recorder, *trajectories):
    """Record trajectories that end one by one while another one runs, and end that one last."""
    recorder.open_group("another", 1, False)
    recorder.start("another", 0)
    for one in trajectories:
        columns = dict(one)
        uid, sample = f"{one['step']}-{one['prompt_key']}-{one['sample']}", columns.pop("sample")
        recorder.open_group(uid, columns.pop("epoch"), columns.pop("validate"))
        recorder.start(uid, sample)
        await recorder.record(uid, sample, **columns)
        await recorder.close_group(uid)
    recorder.stop("another", 0)
    await recorder.close_group("another")


def test_a_folder_of_parts_reads_as_one_table_in_order(tmp_path):
    async def scenario():
        first, second = (TrajectoryRecorder(str(tmp_path / "trace")) for _ in range(2))
        first._name, second._name = "a", "b"
        await record(
            first,
            trajectory(step=1, prompt_key=2**64 - 1, tokens=[], reward=None),
            trajectory(step=0, prompt_key=9),
        )
        await record(first)  # nothing left: no part
        await record(
            second,
            trajectory(step=0, prompt_key=7, sample=1, tokens=range(5)),
            trajectory(step=0, prompt_key=7, sample=0),
        )
        await record(first, trajectory(step=2))

    asyncio.run(scenario())
    assert sorted(path.name for path in (tmp_path / "trace").iterdir()) == [
        "part-a-00000.parquet",
        "part-a-00001.parquet",
        "part-b-00000.parquet",
    ]
    table = read_trace(tmp_path / "trace")
    assert table.schema.equals(trace.SCHEMA)
    order = table.select(["step", "prompt_key", "sample"]).to_pylist()
    assert [tuple(row.values()) for row in order] == [(0, 7, 0), (0, 7, 1), (0, 9, 0), (1, 2**64 - 1, 0), (2, 7, 0)]
    assert table["tokens"].to_pylist() == [[4, 5, 6], [0, 1, 2, 3, 4], [4, 5, 6], [], [4, 5, 6]]
    assert table["length"].to_pylist() == [3, 5, 3, 0, 3]
    assert table["reward"].to_pylist() == [1.0, 1.0, 1.0, None, 1.0]
    assert read_trace(tmp_path / "trace/part-a-00001.parquet")["epoch"].to_pylist() == [3]


def test_a_full_buffer_is_written_without_being_told(tmp_path, monkeypatch):
    monkeypatch.setattr(trace, "MAX_BUFFERED_ROWS", 3)

    async def scenario():
        recorder = TrajectoryRecorder(str(tmp_path))
        recorder.open_group("a", 1, False)
        for sample in range(8):
            recorder.start("a", sample)
        for sample in range(7):
            await recorder.record("a", sample, step=0, prompt_key=7, prompt=[1, 2], tokens=[4], reward=1.0)
        assert read_trace(tmp_path)["sample"].to_pylist() == list(range(6))
        recorder.stop("a", 7)
        await recorder.close_group("a")
        assert read_trace(tmp_path)["sample"].to_pylist() == list(range(7))

    asyncio.run(scenario())


def test_an_unfinished_part_is_not_read(tmp_path):
    write_trajectories(tmp_path / "part-a-00000.parquet", [trajectory()])
    (tmp_path / ".part-a-00001.parquet.unfinished").write_bytes(b"PAR1")
    assert read_trace(tmp_path).num_rows == 1


def test_greedy_bits_are_read_where_there_are_some(tmp_path):
    path = tmp_path / "part-a-00000.parquet"
    write_trajectories(path, [trajectory()])
    table = read_trace(tmp_path)
    assert table["greedy"].to_pylist() == [None]
    trace.write_trace(path, table.drop_columns("greedy"))  # as traces were before they had greedy bits
    assert read_trace(tmp_path).equals(table)
    bits = pa.array([[True, False, True]], trace.SCHEMA.field("greedy").type)
    trace.write_trace(path, table.drop_columns("greedy").append_column("greedy", bits))
    assert read_trace(tmp_path)["greedy"].to_pylist() == [[True, False, True]]


def test_some_columns_are_read_without_the_others(tmp_path):
    write_trajectories(tmp_path / "part-a-00000.parquet", [trajectory()])
    write_trajectories(tmp_path / "part-b-00000.parquet", [trajectory()])
    table = read_trace(tmp_path, ("validate", "length"))
    assert table.column_names == ["validate", "length"]
    assert table.equals(read_trace(tmp_path).select(["validate", "length"]))


def test_what_is_not_a_trace_is_refused_with_its_name(tmp_path):
    with pytest.raises(ValueError, match="nowhere: no trace here"):
        read_trace(tmp_path / "nowhere")
    foreign = tmp_path / "foreign.parquet"
    pq.write_table(pa.table({"step": [1]}), foreign)
    with pytest.raises(ValueError, match="foreign.parquet: a Parquet file, but not a rhyme trace"):
        read_trace(foreign)
    newer = tmp_path / "newer.parquet"
    pq.write_table(pa.table({"step": [1]}).replace_schema_metadata({trace.FORMAT_KEY: b"2"}), newer)
    with pytest.raises(ValueError, match="newer.parquet: trace format 2, this version of rhyme_verl reads 1"):
        read_trace(newer)
    malformed = tmp_path / "malformed.parquet"
    good = trajectory() | {"length": 3}
    for change, complaint in (
        ({"tokens": [4, None, 6]}, "values are missing in column 'tokens'"),
        ({"reward": None, "greedy": [True, None, False]}, "values are missing in column 'greedy'"),
        ({"greedy": [True, False]}, "`greedy` and `tokens` differ in length"),
    ):
        pq.write_table(pa.Table.from_pylist([good | change], schema=trace.SCHEMA), malformed)
        with pytest.raises(ValueError, match=f"malformed.parquet: malformed trace: {complaint}$"):
            read_trace(malformed)
    sound = pa.Table.from_pylist([good], schema=trace.SCHEMA)
    pq.write_table(sound.drop_columns("tokens"), malformed)
    with pytest.raises(ValueError, match="malformed.parquet: malformed trace: no column 'tokens'$"):
        read_trace(malformed)
    pq.write_table(sound.set_column(5, "tokens", pa.array(["text"])), malformed)
    with pytest.raises(ValueError, match=r"malformed.parquet: damaged, malformed, or not a Parquet file: [^\n]+$"):
        read_trace(malformed)
    damaged = tmp_path / "damaged.parquet"
    damaged.write_bytes(b"PAR1 and then nothing")
    with pytest.raises(ValueError, match="damaged.parquet: damaged"):
        read_trace(tmp_path)
