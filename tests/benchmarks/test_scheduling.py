"""The simulator half of bench-pipe: scenarios, prediction errors, and the simulator held against recorded replicas."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.scheduling.bench import OURS, STOCK, Job, bars_of, drafting_speedups, jobs, run
from benchmarks.scheduling.reality import Recorded, Request, fitted_cost, recorded, simulated_seconds
from benchmarks.scheduling.scenarios import MAX_RUNNING, pick, stated_step_seconds, worst_ratio
from rhyme_verl.sim.cluster import Replica, affine_step_seconds
from rhyme_verl.sim.experiment import Case

TRACE = Path(__file__).parents[2] / "benchmarks/traces/quickstart.parquet"


def test_rows_are_compared_seed_by_seed():
    rows = [
        {"case": case, "seed": seed, "steps_per_hour": value}
        for case, seed, value in (("ours", 0, 30.0), ("ours", 1, 20.0), ("other", 1, 10.0), ("other", 0, 20.0))
    ]
    assert worst_ratio(rows, {"case": "ours"}, {"case": "other"}) == 1.5
    assert len(pick(rows, case="ours", seed=1)) == 1


def test_drafting_makes_tokens_cheaper_by_the_measured_ratio():
    seconds, drafted = stated_step_seconds(), stated_step_seconds({1: 4.0, 4: 2.0, 64: 1.5})
    for running, ratio in ((1, 4.0), (2, 3.0), (4, 2.0), (64, 1.5), (MAX_RUNNING, 1.5)):
        assert seconds[running] / drafted[running] == pytest.approx(ratio)


def test_drafting_ratios_are_of_the_trace_with_the_long_tail(tmp_path):
    runs = {"none": {"1": [{"verifies": 50, "steps": 50}], "64": [{"verifies": 400, "steps": 10}]}}
    ratios = {"rhyme": {"1": {"ratio": {"median": 4.0}}, "64": {"ratio": {"median": 1.5}}}}
    measured = {"full history, scale 1": {"runs": runs, "summary": ratios}}
    path = tmp_path / "rollout.json"
    path.write_text(json.dumps({"loads": {"longtail": measured}}))
    assert drafting_speedups(path) == {1.0: 4.0, 40.0: 1.5}, "on the mean, 40 run"


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


def record(times, requests, windows, gates=()):
    """Write a job as benchmarks.jobs.replica_job records it; one replica; requests as (key, start, end, tokens[,
    resumed, aborted]), windows as (asked, got) of each step, gates as (time, open).
    """
    times.mkdir()
    lines = [
        {"key": key, "start": SINCE_1970 + start, "end": SINCE_1970 + end, "tokens": tokens,
         "resumed": rest[0] if rest else 0, "aborted": bool(rest) and rest[1]}
        for key, start, end, tokens, *rest in requests
    ]  # fmt: skip
    write_lines(times / "requests-0.jsonl", lines)
    write_lines(times / "samples.jsonl", [{"asked": SINCE_1970 + a, "got": SINCE_1970 + b} for a, b in windows])
    write_lines(times / "gates-0.jsonl", [{"time": SINCE_1970 + a, "open": is_open} for a, is_open in gates])


def write_lines(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.parametrize("system", ["verl", "histopipe"])
def test_a_recorded_job_is_simulated(tmp_path, system):
    """One lane: 20 and 30 tokens at 10 ms are half a second, whoever comes first."""
    requests = [
        (key, t + 0.2 * (key - 1), t + 0.2 + 0.3 * (key - 1), 10 + 10 * key) for t in (0.0, 2.0) for key in (1, 2)
    ]
    record(tmp_path / "times", requests, [(0.0, 0.6), (2.0, 2.6)])
    job = recorded(tmp_path / "times", 1, "sync")
    first = replace(job.requests[0][0], end=0.2)
    assert first == Request(key=1, start=0.0, end=0.2, tokens=20, resumed=0, aborted=False)
    assert job.busy_seconds(1) == pytest.approx(0.5)
    cost = affine_step_seconds(0.01, 0.0, 1)
    case = Case(mode="sync", system=system)
    seconds = simulated_seconds(job, case, cost, batch_size=2, samples=1, warmup_steps=1)
    assert seconds == pytest.approx(0.5)


def test_an_interrupted_answer_counts_once_with_all_its_tokens(tmp_path):
    requests = [(1, 0.0, 0.4, 40, 0, True), (2, 0.0, 0.2, 20), (1, 1.0, 1.1, 10, 40, False), (2, 1.0, 1.5, 50)]
    gates = [(0.4, False), (1.0, True), (1.5, False)]
    record(tmp_path / "times", requests, [(0.0, 0.4), (0.9, 1.5)], gates)
    job = recorded(tmp_path / "times", 1, "colocate_async")
    assert np.array(job.windows) == pytest.approx(np.array([(0.0, 0.4), (1.0, 1.5)]))
    assert job.busy_seconds(1) == pytest.approx(0.5)
    case = Case(mode="colocate_async")
    seconds = simulated_seconds(job, case, affine_step_seconds(0.01, 0.0, 4), batch_size=1, samples=1, warmup_steps=1)
    assert 0.0 < seconds < 0.5, "50, 20 and 50 tokens, two at a time"


def test_an_answer_that_a_job_left_unfinished_takes_its_time(tmp_path):
    finished = [(2, 0.0, 0.2, 20), (3, 1.0, 1.3, 30)]
    unfinished = [(1, 0.0, 0.4, 40, 0, True), (1, 1.0, 1.4, 40, 40, True)]
    cost = affine_step_seconds(0.0, 0.01, 2)
    seconds = {}
    for name, requests in (("finished", finished), ("all", finished + unfinished)):
        record(tmp_path / name, requests, [(0.0, 0.4), (0.9, 1.4)], [(0.4, False), (1.0, True), (1.4, False)])
        job = recorded(tmp_path / name, 1, "colocate_async")
        case = Case(mode="colocate_async")
        seconds[name] = simulated_seconds(job, case, cost, batch_size=1, samples=1, warmup_steps=1)
    assert seconds["all"] > seconds["finished"]


def test_the_cost_of_steps_is_fitted_to_a_job():
    """Requests as an engine of known cost would have answered them, slower in the warm-up, give that cost back."""
    rng = np.random.default_rng(0)
    cost = affine_step_seconds(0.01, 0.002, 4)
    requests, windows = [], []
    warmup_steps = 2
    for number in range(10):
        step_seconds = cost * 3.0 if number < warmup_steps else cost
        engine, began, lengths = Replica(step_seconds.tolist()), 100.0 * number, rng.integers(20, 300, 4).tolist()
        ends = {}
        for index, length in enumerate(lengths):
            engine.start(index, length, began)
        while (now := engine.next_end()) < float("inf"):
            ends.update((index, now) for index, _ in engine.pop_ended(now))
        requests += [
            Request(key=0, start=began, end=ends[index], tokens=length, resumed=0, aborted=False)
            for index, length in enumerate(lengths)
        ]
        windows.append((began, max(ends.values())))
    job = Recorded(requests=[requests], windows=windows, got=[end for _, end in windows])
    fitted = fitted_cost(job, 4, warmup_steps)
    assert fitted == pytest.approx(cost, rel=0.03)
