"""Host time in the replay: the tables, who is charged by which, and what a modelled step then costs."""

import json

import pytest

from benchmarks.drafting import replay
from benchmarks.drafting.bench import DrafterBench
from benchmarks.drafting.drafters import NoDrafter, RhymeDrafter
from benchmarks.drafting.host_gap import REVIEWED, HostGap, HostGaps, engine_gap, host_gaps
from benchmarks.drafting.replay import Replay
from tests.benchmarks.test_benchmarks import Script, answer, rid, step

GAP = HostGap(rows=(12, 112, 512), undrafted_ms=(1.0, 3.0, 7.0), token_us=(2.0, 4.0, 4.0))


@pytest.mark.parametrize(
    ("rows", "num_tokens", "ms"),
    [
        (12, 12, 1.0),
        (62, 62, 2.0),
        (12, 512, 1.0 + 500 * 0.002),
        (62, 112, 2.0 + 50 * 0.003),
        (312, 312, 5.0),
        (512, 1024, 7.0 + 512 * 0.004),
        (612, 712, 8.0 + 100 * 0.004),
        (2, 27, 0.8 + 25 * 0.002),
    ],
)
def test_a_gap_is_interpolated_by_rows_and_drafted_tokens(rows, num_tokens, ms):
    assert GAP.seconds(rows, num_tokens) == pytest.approx(1e-3 * ms)


def test_the_earlier_measurement_is_reproduced():
    for rows, undrafted_ms, drafted_ms in ((64, 1.5, 2.25), (128, 2.7, 3.81), (256, 5.4, 6.41)):
        assert REVIEWED.seconds(rows, rows) == pytest.approx(1e-3 * undrafted_ms)
        assert REVIEWED.seconds(rows, 512) == pytest.approx(1e-3 * drafted_ms, rel=1e-3)
    assert 0.0 < REVIEWED.seconds(1, 1) < 0.5e-3
    assert not REVIEWED.is_asynchronous


class Gap(HostGap):
    """One second per row and two per drafted token."""

    def seconds(self, rows, num_tokens):
        return 1.0 * rows + 2.0 * (num_tokens - rows)


@pytest.fixture
def ticking(monkeypatch):
    """Every call of the replay's own clock takes 0.25 s."""
    ticks = iter(range(1000))
    monkeypatch.setattr(replay.time, "perf_counter", lambda: 0.25 * next(ticks))


@pytest.mark.parametrize(("is_asynchronous", "drafter_seconds"), [(False, 0.75), (True, 0.25)])
def test_a_modelled_step_costs_the_gap_the_drafter_and_the_accelerator(ticking, is_asynchronous, drafter_seconds):
    script = Script({(rid(0), 1): [2, 9]})
    gap = Gap(rows=(1,), undrafted_ms=(0.0,), token_us=(0.0,), is_asynchronous=is_asynchronous)
    engine = Replay(script, concurrency=1, width=16, step_cost=lambda *_: 10.0, host_gap=gap)
    totals = engine.run_step(step(answer([1, 2, 3, 4])))
    # Three steps, of which the second has two drafted tokens; three calls of the drafter, of which the first drafts.
    assert totals.model_seconds == 30.0
    assert totals.draft_seconds == 0.75
    assert totals.host_seconds == 1 + 5 + 1 + drafter_seconds
    summary = totals.summary()
    assert summary["modelled_tokens_per_s"] == 4 / (37 + drafter_seconds)
    assert summary["device_tokens_per_s"] == 4 / 30
    clock = [now for _, _, _, now in script.calls]
    assert clock[0] == 11.0
    assert clock[1] == 11.0 + 0.25 + 15.0
    assert clock[2] == clock[1] + (0.0 if is_asynchronous else 0.25) + 11.0


def test_stock_is_charged_nothing_and_drafters_their_table():
    steps = [step(answer([1, 2, 3, 4, 5, n]), number=n) for n in (1, 2)]
    slow, fast = (HostGap(rows=(1, 2), undrafted_ms=(ms, ms), token_us=(0.0, 0.0)) for ms in (1e6, 1e5))
    bench = DrafterBench(8, lambda *_: 10.0, 1, HostGaps(slow, fast, "made up"))

    def played(make):
        return bench.play(steps, make, 1, 0)

    stock = played(lambda steps, width: NoDrafter())
    assert stock["modelled_tokens_per_s"] == stock["device_tokens_per_s"] == 6 / 60
    other = played(lambda steps, width: Script())
    assert other["modelled_tokens_per_s"] == pytest.approx(6 / (6 * 1010), rel=1e-3)
    assert other["device_tokens_per_s"] == 6 / 60
    rhyme = played(lambda steps, width: RhymeDrafter(8, width))
    assert rhyme["host_share"] == pytest.approx(100 / 110, rel=1e-2)


def test_without_a_result_of_bench_host_all_drafters_have_the_earlier_measurement(tmp_path):
    found = host_gaps(tmp_path / "no-such.json")
    assert found.synchronous is found.rhyme is REVIEWED
    assert "2026-11" in found.source


def test_the_tables_of_bench_host_are_read_with_and_without_the_drafter_s_time(tmp_path):
    def one(tokens, gap, drafter):
        return {"tokens": tokens, "arrival to launch": gap, "drafter": drafter, "device": 99.0}

    measured = {
        "nothing drafted": {
            "none": {"16": one(16, 0.0, 0.0), "64": one(64, 0.0, 0.0)},
            "rhyme-sync": {"16": one(16, 1.5, 0.5), "64": one(64, 3.0, 1.0)},
            "rhyme": {"16": one(16, 0.0, 0.5), "64": one(64, 0.1, 1.0)},
        },
        "512-token steps": {
            "suffix": {"16": one(56, 1.8, 0.6), "64": one(114, 3.5, 1.0)},
            "rhyme-sync": {"16": one(216, 2.0, 0.6), "64": one(564, 4.0, 1.0)},
            "rhyme": {"16": one(216, 0.9, 0.7), "64": one(564, 1.0, 1.5)},
        },
    }
    path = tmp_path / "host.json"
    path.write_text(json.dumps({"milliseconds": measured, "date": "2026-11-24"}), encoding="utf-8")
    found = host_gaps(path)
    assert found.source == "host.json, 2026-11-24"
    assert (found.synchronous.rows, found.synchronous.undrafted_ms) == ((16, 64), (1.0, 2.0))
    assert found.synchronous.token_us == pytest.approx((1e3 * 0.4 / 200, 1e3 * 1.0 / 500))
    assert (found.rhyme.undrafted_ms, found.rhyme.is_asynchronous) == ((0.0, 0.0), True)
    assert found.rhyme.token_us == pytest.approx((1e3 * 0.2 / 200, 0.0))
    suffix, rhyme = engine_gap("suffix", path), engine_gap("rhyme", path)
    assert suffix.undrafted_ms == found.synchronous.undrafted_ms
    assert suffix.token_us == pytest.approx((1e3 * 0.8 / 40, 1e3 * 1.5 / 50))
    assert (rhyme.undrafted_ms, rhyme.token_us) == ((0.0, 0.1), pytest.approx((1e3 * 0.9 / 200, 1e3 * 0.9 / 500)))
    del measured["512-token steps"]["suffix"]
    path.write_text(json.dumps({"milliseconds": measured, "date": "2026-11-24"}), encoding="utf-8")
    assert engine_gap("suffix", path) == engine_gap("rhyme-sync", path)
    assert engine_gap("suffix", path).token_us == pytest.approx((1e3 * 0.5 / 200, 1e3 * 1.0 / 500))
    path.write_text(json.dumps({"milliseconds": {"nothing drafted": {}}, "date": ""}), encoding="utf-8")
    with pytest.raises(ValueError, match="no result of bench-host: it lacks"):
        host_gaps(path)
    with pytest.raises(ValueError, match="run make bench-host again: the result lacks"):
        engine_gap("suffix", path)


def test_bench_host_writes_what_is_read():
    from benchmarks.engines import host_time

    assert (host_time.NOTHING, host_time.DRAFTED, host_time.ARRIVAL) == (
        "nothing drafted",
        "512-token steps",
        "arrival to launch",
    )
    assert (host_time.SYNCHRONOUS, host_time.ASYNCHRONOUS) == ("rhyme-sync", "rhyme")
    assert "drafter" in host_time.PARTS
