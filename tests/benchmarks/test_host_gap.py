"""Host time in the replay: the tables, who is charged by which, and what a modelled step then costs."""

import json
from dataclasses import replace

import pytest

from benchmarks.drafting import replay
from benchmarks.drafting.bench import DrafterBench
from benchmarks.drafting.drafters import NoDrafter, RhymeDrafter
from benchmarks.drafting.host_gap import FOUND, HostGap, HostGaps, engine_gap, host_gaps
from benchmarks.drafting.replay import Replay
from tests.benchmarks.test_benchmarks import Script, answer, rid, step

GAP = HostGap(rows=(10, 110), drafted=((0, 100), (0, 50, 100)), ms=((1.0, 2.0), (2.0, 4.0, 5.0)))
AT_10_ROWS, AT_110_ROWS, BETWEEN = 10, 110, 60


@pytest.mark.parametrize(
    ("rows", "num_drafted", "ms"),
    [
        (AT_10_ROWS, 0, 1.0),
        (AT_10_ROWS, 50, 1.5),
        (AT_10_ROWS, 200, 3.0),
        (AT_110_ROWS, 25, 3.0),
        (AT_110_ROWS, 75, 4.5),
        (AT_110_ROWS, 200, 7.0),
        (BETWEEN, 50, (1.5 + 4.0) / 2),
        (210, 0, 3.0),
        (0, 0, 0.9),
    ],
)
def test_a_gap_is_interpolated_by_rows_and_drafted_tokens(rows, num_drafted, ms):
    assert GAP.seconds(rows, rows + num_drafted) == pytest.approx(1e-3 * ms)


def test_asynchronously_a_few_drafts_cost_as_much_as_the_fewest_that_were_measured():
    gap = replace(GAP, is_asynchronous=True)
    found = [1e3 * gap.seconds(110, 110 + drafted) for drafted in (0, 1, 50, 75)]
    assert found == pytest.approx([2.0, 4.0, 4.0, 4.5])


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
    gap = Gap(rows=(), drafted=(), ms=(), is_asynchronous=is_asynchronous)
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
    slow, fast = (HostGap(rows=(1, 2), drafted=((0, 1), (0, 1)), ms=((ms, ms), (ms, ms))) for ms in (1e6, 1e5))
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
            "rhyme-sync": {"16": one(216, 2.0, 0.6), "64": one(564, 4.0, 1.0)},
            "rhyme": {"16": one(216, 0.9, 0.7), "64": one(564, 1.75, 1.5)},
        },
        "draft tokens per row: 1": {"rhyme": {"16": one(32, 0.8, 0.3)}},
        FOUND: {"suffix": {"16": one(56, 1.8, 0.6), "64": one(114, 3.5, 1.0)}},
    }
    path = tmp_path / "host.json"

    def write():
        path.write_text(json.dumps({"milliseconds": measured, "date": "2026-11-24"}), encoding="utf-8")

    write()
    found = host_gaps(path)
    assert found.source == "host.json, 2026-11-24"
    assert found.synchronous == HostGap(rows=(16, 64), drafted=((0, 200), (0, 500)), ms=((1.0, 1.4), (2.0, 3.0)))
    assert found.rhyme.drafted == ((0, 16, 200), (0, 500))
    assert found.rhyme.ms == (pytest.approx((0.0, 0.5, 0.2)), (0.0, 0.25))
    assert found.rhyme.is_asynchronous
    suffix, rhyme, synchronous = (engine_gap(name, path) for name in ("suffix", "rhyme", "rhyme-sync"))
    assert suffix == HostGap(rows=(16, 64), drafted=((0, 40), (0, 50)), ms=((1.0, 1.8), (2.0, 3.5)))
    assert rhyme == replace(found.rhyme, ms=((0.0, 0.8, 0.9), (0.1, 1.75)))
    assert synchronous == replace(found.synchronous, ms=((1.5, 2.0), (3.0, 4.0)))
    del measured[FOUND]
    write()
    assert engine_gap("suffix", path) == synchronous
    measured.clear()
    write()
    with pytest.raises(ValueError, match="run make bench-host again: the result lacks steps of rhyme-sync"):
        host_gaps(path)


def test_bench_host_writes_what_is_read():
    from benchmarks.engines import host_time

    assert (host_time.SYNCHRONOUS, host_time.ASYNCHRONOUS, host_time.SUFFIX) == ("rhyme-sync", "rhyme", "suffix")
    assert host_time.ARRIVAL == "arrival to launch"
    assert "drafter" in host_time.PARTS
