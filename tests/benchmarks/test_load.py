"""The load test with a small job, and what it makes of its numbers."""

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress

import numpy as np
import psutil
import pytest

from benchmarks.load.calls import by_phase
from benchmarks.load.job import LoadedJob
from benchmarks.load.report import sizing_of

pytestmark = pytest.mark.slow


def test_the_load_follows_from_published_step_times():
    job = LoadedJob(replicas=1024)
    assert (job.prompts, job.workers) == (16384, 64)
    assert round(job.answers_per_s) == 5043
    assert sum(len(job.groups(worker, 1)) for worker in range(job.workers)) == job.prompts


def test_calls_count_in_the_phase_in_which_they_begin():
    recorded = {"fetch": np.array([[1.0, 0.002], [2.0, 0.004], [3.0, 0.5]])}
    rest, storm = by_phase(recorded, {"rest": (0.0, 2.0), "storm": (2.0, 4.0), "end": (4.0, 5.0)})
    assert (rest["phase"], rest["calls"], rest["max_ms"]) == ("rest", 1, 2.0)
    assert (storm["phase"], storm["calls"], storm["per_s"], storm["max_ms"]) == ("storm", 2, 1.0, 500.0)


def test_an_actors_size_is_half_a_core():
    step = {"replicas": 100, "shards": 4, "load_answers_per_s": 500.0, "router_us_per_answer": 100.0}
    row = sizing_of({**step, "shard_us_per_answer": 1000.0}, mean_tokens=1000)
    assert (row["router_replicas"], row["shard_replicas"], row["shard_tokens_per_s"]) == (1000.0, 100.0, 500_000.0)


@pytest.fixture
def bench(tmp_path):
    """The benchmark in a process, whose descendants carry a mark in their environment."""
    mark = str(tmp_path)
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.load.bench", "--quick", "--result", str(tmp_path / "load.json")],
        env={**os.environ, "RHYME_TEST": mark, "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # ignored if the tests run in the background
    )
    yield process
    process.kill()
    process.wait()


def left_of(tmp_path):
    """The processes of this test that are alive a moment later."""
    marked = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("RHYME_TEST") == str(tmp_path):
                marked.append(process)
    return psutil.wait_procs(marked, timeout=20)[1]


def test_a_small_job_loses_nothing_and_leaves_no_process(bench, tmp_path):
    output, _ = bench.communicate(timeout=600)
    assert bench.returncode == 0, output[-3000:]
    assert left_of(tmp_path) == []
    found = json.loads((tmp_path / "load.json").read_text())
    assert [(one["replicas"], one["shards"], one["lost_tokens"]) for one in found["steps"]] == [(4, 1, 0), (8, 2, 0)]
    assert all(one["unanswered_prompts"] == 0 and one["dropped_tokens"] == 0 for one in found["steps"])
    assert found["killed"]["lost_tokens_of_others"] == 0
    filled = found["filled"]
    assert filled["lost_tokens"] == 0 < filled["kept"]["evicted_tokens"]
    assert filled["kept"]["prompts"] == filled["prompts"], "every prompt keeps some answers"
    phases = {(row["phase"], row["call"]) for row in found["steps"][0]["calls"]}
    assert {("storm", "fetch"), ("flow", "report"), ("end", "finish_step"), ("rest", "probe: fetch")} <= phases


def test_an_interrupted_run_leaves_no_process(bench, tmp_path):
    for line in bench.stdout:
        if "[2/4]" in line:
            break
    bench.send_signal(signal.SIGINT)
    bench.communicate(timeout=120)
    assert bench.returncode != 0 and not (tmp_path / "load.json").exists()
    assert left_of(tmp_path) == []
