"""The simulator half of bench-pipe: scenarios, prediction errors, and the simulator held against recorded replicas."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.scheduling.bench import OURS, STOCK, Job, bars_of, drafting_speedups, jobs, run
from benchmarks.scheduling.length_errors import RecordedLengths
from benchmarks.scheduling.reality import (
    Request,
    answer_intervals,
    compare,
    fitted_cost,
    real,
    recorded_steps,
    replayed,
)
from benchmarks.scheduling.scenarios import MAX_RUNNING, pick, stated_fleet, worst_ratio
from rhyme_verl.histopipe.replica_cost import MeasuredCost
from rhyme_verl.sim.cluster import Replica
from rhyme_verl.sim.workload import LogNormal, from_distribution

TRACE = Path(__file__).parents[2] / "benchmarks/traces/quickstart.parquet"
COST = MeasuredCost(running=(1, 4), seconds=(0.01, 0.016), prefill_seconds_per_token=1e-3)


def test_lengths_are_predicted_in_the_workload_as_well_as_on_the_trace():
    recorded = RecordedLengths(TRACE, 400)
    assert recorded.lengths.shape == (6, 64, 8)
    errors = recorded.errors()
    assert [one["epoch"] for one in errors] == [2, 3, 4, 5, 6]
    measured = np.mean([one["rank_correlation"] for one in errors])
    spread = recorded.spread()
    lengths = LogNormal(p99_over_median=5.0, within_group=spread.within_group, epoch_noise=spread.epoch_noise)
    drawn = from_distribution(lengths, steps=4, groups=64, samples=16).rank_correlation
    assert drawn == pytest.approx(measured, abs=0.015)


def test_rows_are_compared_seed_by_seed():
    rows = [
        {"case": case, "seed": seed, "steps_per_hour": value}
        for case, seed, value in (("ours", 0, 30.0), ("ours", 1, 20.0), ("other", 1, 10.0), ("other", 0, 20.0))
    ]
    assert worst_ratio(rows, {"case": "ours"}, {"case": "other"}) == 1.5
    assert len(pick(rows, case="ours", seed=1)) == 1


def test_drafting_makes_tokens_cheaper_by_the_measured_ratio():
    cost, drafted = stated_fleet(1).cost, stated_fleet(1, {1: 4.0, 4: 2.0, 64: 1.5}).cost
    for running, ratio in ((1, 4.0), (2, 3.0), (4, 2.0), (64, 1.5), (MAX_RUNNING, 1.5)):
        assert cost.seconds[running] / drafted.seconds[running] == pytest.approx(ratio)


def test_drafting_ratios_are_of_the_trace_with_the_long_tail(tmp_path):
    by_drafter = {"rhyme": {"1": 400.0, "64": 900.0}, "none": {"1": 100.0, "64": 600.0}}
    rows = {
        name: {running: {"modelled_tokens_per_s": value} for running, value in by_running.items()}
        for name, by_running in by_drafter.items()
    }
    path = tmp_path / "drafter.json"
    path.write_text(json.dumps({"traces": {"longtail": rows}}))
    assert drafting_speedups(path) == {1: 4.0, 64: 1.5}


def test_every_bar_finds_its_simulations():
    """All jobs are listed, and one of them is played for real."""
    listed = list(jobs(2))
    rows = [
        {"factor": job.factor, "case": job.case.name, "seed": job.seed, "recompute_us": job.recompute_us,
         "drafted": job.drafted, "filtered": job.filtered, "noisy": job.factor == "predictions", "tail": job.tail,
         "steps_per_hour": 60.0 if job.case.system == "histopipe" else 40.0, "mixed": 0.05, "age_max": job.case.max_age,
         "of_bound": 0.9}
        for job in listed
    ]  # fmt: skip
    bars = bars_of(rows)
    assert all(one["holds"] for one in bars.values()), bars
    assert {job.case for job in listed} >= {STOCK, *OURS}


def test_a_simulation_of_the_benchmark_is_played():
    row = run(Job("base", OURS[1], seed=0), {1: 2.0, 64: 1.2})
    assert row["age_max"] == 2 and row["steps_per_hour"] > 30.0


SINCE_1970 = 1.8e9  # seconds, as recorded


def record(times, requests, windows, since=SINCE_1970):
    """Write a run as benchmarks.jobs.replica_job records it; requests by replica as (key, start, end, tokens)."""
    times.mkdir()
    for replica, own in enumerate(requests):
        lines = [
            {"key": key, "start": since + a, "end": since + b, "tokens": n, "prompt": 10, "cached": 8, "aborted": False}
            for key, a, b, n in own
        ]
        (times / f"requests-{replica}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    lines = [{"asked": since + a, "got": since + b} for a, b in [(0.0, 0.5), (0.5, 1.0), *windows]]
    (times / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_what_replicas_did_is_replayed(tmp_path):
    record(
        tmp_path / "run",
        [[(7, 2.0, 3.0, 100)], [(7, 2.1, 2.6, 50)]],
        [
            (2.0, 4.0),
        ],
    )
    (step,) = recorded_steps(tmp_path / "run", 2)
    assert step[0] == [Request(key=7, start=2.0, end=3.0, tokens=100, prefill_tokens=2)], "seconds of the run"
    measured = real(step, 4)
    assert (measured.makespan, measured.bubble) == pytest.approx((1.0, 1.0 - 1.5 / (2 * 4)))
    simulated = replayed(step, 4, COST)
    assert simulated.makespan == pytest.approx(0.002 + 100 * 0.01)


def test_more_requests_than_lanes_wait_in_the_engine():
    step = [[Request(key=0, start=0.0, end=9.0, tokens=100, prefill_tokens=0) for _ in range(3)]]
    assert replayed(step, 2, COST).makespan == pytest.approx(100 * 0.012 + 100 * 0.01)


@pytest.mark.parametrize("system", ["verl", "histopipe"])
def test_the_simulator_is_compared_with_a_run(tmp_path, system):
    """One lane and one replica: 20 and 30 tokens at 10 ms are half a second, whoever comes first."""
    steps = [[(1, t, t + 0.2, 20), (2, t, t + 0.5, 30)] for t in (2.0, 4.0)]
    record(tmp_path / "run", [steps[0] + steps[1]], [(2.0, 3.0), (4.0, 5.0)])
    found = compare(tmp_path / "run", 1, 1, COST, system)
    assert len(found["steps"]) == 2
    assert found["scheduled"]["makespan"] == pytest.approx(0.0, abs=1e-6)
    assert found["replayed"]["makespan"] == pytest.approx(2 * 2e-3 / 0.5, abs=1e-6)
    assert found["scheduled"]["bubble"] == pytest.approx(0.0, abs=1e-6)


def test_the_cost_of_steps_is_fitted_to_a_run():
    """Requests as an engine of known cost would have answered them give that cost back."""
    rng = np.random.default_rng(0)
    table = 0.01 + 0.002 * np.maximum(np.arange(5), 1)
    steps = []
    for _ in range(6):
        asked = [
            Request(key=0, start=t, end=0.0, tokens=n, prefill_tokens=0)
            for t, n in zip(np.sort(rng.uniform(0, 3, 12)).tolist(), rng.integers(20, 300, 12).tolist(), strict=True)
        ]
        ends = [end for _, end in answer_intervals(asked, Replica(table.tolist(), 4), COST)]
        steps.append([[replace(one, end=end) for one, end in zip(asked, ends, strict=True)]])
    fitted = fitted_cost(steps, 4)
    assert fitted.table(4).seconds == pytest.approx(table, rel=0.01)
    assert replayed(steps[0], 4, fitted).makespan == pytest.approx(real(steps[0], 4).makespan, rel=0.01)


def test_runs_of_other_modes_are_refused(tmp_path):
    record(tmp_path / "run", [[(7, 2.0, 3.0, 100)]], [(2.0, 4.0)])
    path = tmp_path / "run" / "requests-0.jsonl"
    path.write_text(path.read_text().replace("false", "true"))
    with pytest.raises(ValueError, match="trainer mode sync"):
        recorded_steps(tmp_path / "run", 1)
