"""What the server-overhead benchmark makes of its requests, runs and profiles, by hand; nothing is started."""

from types import SimpleNamespace

import pytest

from benchmarks.common.processes import aggregate, by_role
from benchmarks.jobs.server_overhead import SAMPLES, describe, engine_pids, make_requests, summarize
from examples.quickstart.problems import make_problem

STACKS = """\
<module> (<string>:1);run (threading.py:982);step (vllm/core.py:10);decode (vllm/serial.py:5) 30
<module> (<string>:1);run (threading.py:982);step (vllm/core.py:12);decode (vllm/serial.py:9) 10
<module> (<string>:1);run (threading.py:982);step (vllm/core.py:12) 40
<module> (<string>:1);run (threading.py:982);walk (vllm/tree.py:3);walk (vllm/tree.py:4);walk (vllm/tree.py:3) 15
poll (libc.so.6) 5
"""


def measured(case: str, concurrency: int, tokens_per_s: float, worker_seconds: float) -> dict:
    return {
        "case": case, "concurrency": concurrency, "tokens": 4000, "tokens_per_s": tokens_per_s,
        "seconds_per_step": 0.005, "cpu_seconds": {"worker": worker_seconds},
    }  # fmt: skip


def test_a_profile_sums_up_lines_of_a_function_and_counts_recursion_once() -> None:
    profile = aggregate(STACKS, num_samples=200)
    assert profile["busy_threads"] == 0.5
    assert profile["self"] == {
        "step (vllm/core.py)": 0.4,
        "decode (vllm/serial.py)": 0.4,
        "walk (vllm/tree.py)": 0.15,
        "poll (libc.so.6)": 0.05,
    }


def test_what_only_starts_others_has_no_inclusive_share() -> None:
    assert aggregate(STACKS, num_samples=200)["inclusive"] == {
        "step (vllm/core.py)": 0.8,
        "decode (vllm/serial.py)": 0.4,
        "walk (vllm/tree.py)": 0.15,
        "poll (libc.so.6)": 0.05,
    }


def test_a_process_that_did_nothing_has_an_empty_profile() -> None:
    assert aggregate("", num_samples=200) == {"busy_threads": 0.0, "self": {}, "inclusive": {}}


def test_cpu_seconds_go_to_roles_and_the_rest_to_others() -> None:
    before = {1: 10.0, 2: 5.0, 3: 1.0, 4: 7.0}
    after = {1: 12.0, 2: 5.5, 3: 1.25, 5: 0.5}  # 4 has ended, 5 is new
    used = by_role(before, after, {"client": [1], "worker": [2, 3], "server": []})
    assert used == {"client": 2.0, "worker": 0.75, "server": 0, "others": 0.5}


def test_the_engine_core_is_its_hosts_child_and_the_worker_is_not() -> None:
    processes = [SimpleNamespace(pid=pid, ppid=lambda parent=parent: parent) for pid, parent in ((11, 1), (12, 11))]
    assert engine_pids(processes, host=1) == {"engine core": [11], "worker": [12]}


def test_requests_ask_each_problem_so_many_times_one_after_another() -> None:
    questions: list[str] = []

    def encode(question: str) -> list[int]:
        questions.append(question)
        return [len(questions)]

    requests = make_requests(encode, first_problem=3, count=2 * SAMPLES)
    assert requests == [[1]] * SAMPLES + [[2]] * SAMPLES
    assert questions == [make_problem("train", 0, index).question for index in (3, 4)]


def test_ratios_are_taken_within_a_turn() -> None:
    runs = [
        measured("vllm", 64, 2000.0, 2.0),
        measured("engine", 64, 4000.0, 1.0),
        measured("engine", 64, 2000.0, 2.0),
        measured("vllm", 64, 1500.0, 3.0),
    ]
    runs += [measured("engine-uni", 64, 4000.0, 1.0), measured("engine-uni", 64, 3000.0, 1.0)]
    vllm = summarize(runs)["64"]["vllm"]
    assert vllm["ratio_to_engine_uni"]["runs"] == [0.5, 0.5]
    assert vllm["ratio_to_engine"]["runs"] == [0.5, 0.75]
    assert vllm["tokens_per_s"]["median"] == 1750.0
    assert vllm["ms_per_step"]["median"] == 5.0
    assert vllm["cpu_seconds_per_1k_tokens"]["worker"]["runs"] == [0.5, 0.75]


@pytest.mark.parametrize(("others", "warned"), [(0.1, False), (5.0, True)])
def test_a_run_says_if_systems_that_should_wait_did_not(others: float, warned: bool) -> None:
    line = describe({"tokens_per_s": 1234.5, "seconds": 10.0, "cpu_seconds": {"others": others}})
    assert line.startswith("1,234 tokens/s, 10.0 s")
    assert ("idle systems used 0.50 cores" in line) == warned
