"""Virtual time: the clock and its device by hand; real engines, as far as their speed does not matter."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import typer

from benchmarks.drafting.host_gap import FOUND
from benchmarks.drafting.replay import load_trace
from benchmarks.engines import host_time, rollout
from benchmarks.engines.comparison import recorded_groups, recorded_load, summarize, with_shuffled_ids
from benchmarks.engines.device_time import DeviceTime
from benchmarks.engines.process import METHODS, RECORDED_ANSWER, SETTINGS, Engine, EngineSettings
from benchmarks.engines.rollout import LOADS, VIRTUAL_ARGUMENTS
from benchmarks.engines.virtual_time import (
    BOOKKEEPING,
    DRAFTER,
    INPUTS,
    LAUNCH_SECONDS,
    HostParts,
    LaunchCounter,
    RecordedAnswers,
    VirtualClock,
    event_and_stream,
)

pytestmark = pytest.mark.slow

ROWS, MODEL = 4, "qwen2.5-7b"
SLOW = 100.0  # scale of step times next to which no host is slow


class Time:
    """The time of the host's work, which moves when told to."""

    def __init__(self):
        self.now = 50.0

    def __call__(self):
        return self.now


@pytest.fixture
def time():
    return Time()


@pytest.fixture
def clock(time):
    return VirtualClock(time)


def test_the_clock_runs_while_the_core_works(clock, time):
    time.now += 5
    assert clock.now() == 0.0
    with clock.running(True):
        time.now += 2
        with clock.running(False):  # what a device would compute
            time.now += 100
            assert clock.now() == 2.0
        time.now += 1
    time.now += 7
    assert (clock.now(), clock.worked) == (3.0, 3.0)


def test_host_work_is_hidden_while_the_device_computes(clock, time):
    with clock.running(True):
        assert clock.queue(10.0) == 0.0
        time.now += 4
        assert clock.queue(10.0) == 0.0, "the second step is queued behind the first"
        assert clock.free_at == 20.0
        clock.wait_until(clock.free_at)
        assert (clock.now(), clock.waited, clock.worked) == (20.0, 16.0, 4.0)
        time.now += 3
        assert clock.queue(10.0) == 3.0, "the device has waited for the host"
        assert clock.free_at == 33.0
        clock.wait_until(30.0)
        clock.wait_until(25.0)  # has passed
    assert (clock.now(), clock.waited) == (30.0, 23.0)


def test_an_event_remembers_its_place_in_the_queue(clock, time):
    Event, Stream = event_and_stream(clock)
    first, second, new = Event(), Event(blocking=True), Event()
    clock.queue(10.0)
    first.record()
    clock.queue(5.0)
    second.record(Stream())
    assert (new.query(), first.query(), second.query()) == (True, False, False)
    first.synchronize()
    assert (clock.now(), first.query(), second.query()) == (10.0, True, False)
    Stream().synchronize()
    assert (clock.now(), second.query()) == (15.0, True)
    first.record()  # again, with nothing queued since
    first.synchronize()
    assert clock.now() == 15.0


def test_launches_take_host_time_and_end_no_earlier(clock):
    clock.launch(3)
    assert clock.now() == clock.free_at == 3 * LAUNCH_SECONDS
    clock.queue(1.0)
    clock.launch(2)
    assert clock.now() == pytest.approx(5 * LAUNCH_SECONDS)
    assert clock.free_at == 3 * LAUNCH_SECONDS + 1.0


def test_a_part_does_not_include_parts_that_it_calls_nor_waiting(clock, time):
    parts = HostParts(clock)
    parts.is_on = True

    def work(seconds, then=lambda: None):
        time.now += seconds
        then()

    draft = parts.timed(DRAFTER, lambda: work(2, lambda: clock.wait_until(clock.now() + 50)))
    prepare = parts.timed(INPUTS, lambda: work(1, draft))
    with clock.running(True):
        parts.timed(BOOKKEEPING, lambda: work(4))()
        prepare()
        prepare()
        work(8)
    taken = parts.take()
    assert {name: seconds for name, seconds in taken.items() if seconds} == {BOOKKEEPING: 4, INPUTS: 2, DRAFTER: 4}
    assert not any(parts.take().values())


def test_views_and_allocations_are_not_launched():
    with LaunchCounter() as counter:
        matrix = torch.empty(4, 6)
        matrix[1:3].view(-1).fill_(1.0)
        (matrix.t() @ matrix).softmax(dim=-1)
    assert counter.count == 3


def test_a_request_gets_its_recorded_answer_after_whatever_was_drafted():
    answers = RecordedAnswers([[11, 12, 13, 2], [21, 2]])
    # Request a, of answer 1, is prefilled: 3 tokens; b, of answer 0, has a prompt of 2, 1 token, and a draft of 4.
    requests = {
        name: SimpleNamespace(sampling_params=SimpleNamespace(extra_args={RECORDED_ANSWER: answer}))
        for name, answer in (("a", 1), ("b", 0))
    }
    runner = SimpleNamespace(
        input_batch=SimpleNamespace(num_reqs=2, req_ids=["a", "b"], num_prompt_tokens=np.array([3, 2, 99])),
        requests=requests,
        query_start_loc=SimpleNamespace(np=np.array([0, 3, 8, 8])),
        positions=torch.tensor([0, 1, 2, 2, 3, 4, 5, 6]),
    )
    assert answers.next_tokens(runner, None).tolist() == [21, 2], "a's first token; beyond the end the last one repeats"
    metadata = SimpleNamespace(logits_indices=torch.tensor([2, 3, 4, 5, 6, 7]))
    tokens = answers.next_tokens(runner, metadata)
    assert tokens.tolist() == [21, 12, 13, 2, 2, 2]
    logits = torch.randn(6, 30, dtype=torch.bfloat16)
    answers.force(logits, tokens)
    assert logits.float().softmax(dim=-1)[torch.arange(6), torch.from_numpy(tokens)].tolist() == [1.0] * 6


def test_shuffled_answers_repeat_where_the_others_do():
    groups = [([5, 6, 5], [[7, 7, 2], [6, 2]])]
    ((prompt, (first, second)),) = with_shuffled_ids(groups)
    assert prompt[0] == prompt[2] and first[0] == first[1] and first[2] == second[1] and prompt[1] == second[0]
    assert len({*prompt, *first, *second}) == 4


def test_results_are_told_with_and_without_host_time():
    def run(seconds, device_seconds, **other):
        return {"tokens": 100, "drafted": 40, "accepted": 30, "verifies": 60, "gap_ms": 1.5, **other} | {
            "seconds": seconds,
            "device_seconds": device_seconds,
            "tokens_per_s": 100 / seconds,
        }

    row = summarize({"none": {8: [run(10, 10)]}, "rhyme": {8: [run(5, 4)]}})["rhyme"]["8"]
    assert (row["ratio"]["median"], row["device_only"]["ratio"]["median"]) == (2.0, 2.5)
    assert (row["device_only"]["tokens_per_s"]["median"], row["accepted_per_verify"]) == (25.0, 0.5)


def test_host_bars_compare_the_time_between_arrival_and_launch():
    def by_rows(gap):
        return {str(rows): {host_time.ARRIVAL: gap} for rows in (16, 64)}

    found = {
        host_time.NOTHING: {"none": by_rows(0.0), "rhyme-sync": by_rows(2.0), "rhyme": by_rows(0.05)},
        host_time.DRAFTED: {"rhyme-sync": by_rows(4.0), "rhyme": by_rows(3.0)},
    }
    bars = host_time.all_bars(found)
    assert {name: (one["measured"], one["holds"]) for name, one in bars.items()} == {
        "512-token steps, 64 rows: arrival to launch, asynchronous / synchronous": (0.75, False),
        "nothing drafted, 64 rows: arrival to launch, asynchronous, ms": (0.05, True),
    }


def test_an_engine_is_measured_with_nothing_light_and_full_drafts():
    light = ["draft tokens per row: 1", "draft tokens per row: 4"]
    assert host_time.limits("none", 16) == {host_time.NOTHING: 1}
    assert host_time.limits("suffix", 16) == {FOUND: 512}
    assert host_time.limits("rhyme-sync", 16) == {host_time.NOTHING: 1, host_time.DRAFTED: 512}
    assert host_time.limits("rhyme", 16) == {host_time.NOTHING: 1, light[0]: 32, light[1]: 80, host_time.DRAFTED: 512}
    assert host_time.limits("rhyme", 128) == {host_time.NOTHING: 1, light[0]: 256, host_time.DRAFTED: 512}
    assert host_time.limits("rhyme", 512) == {host_time.NOTHING: 1, host_time.DRAFTED: 1024}


def engine(method):
    load = LOADS["quickstart"]
    return Engine(
        EngineSettings(
            model=str(load.policy),
            max_model_len=rollout.max_model_len(load),
            speculative=METHODS[method],
            rhyme=SETTINGS.get(method, {}),
            arguments={**VIRTUAL_ARGUMENTS, "max_num_seqs": ROWS},
            virtual_model=MODEL,
        )
    )


def quickstart_load(scale):
    load = LOADS["quickstart"]
    groups = recorded_groups(load_trace(load.trace, 4), 4)
    return recorded_load(groups[:1], ROWS, load.max_tokens, scale)


@pytest.mark.engine
def test_stock_vllm_hides_its_host_work_and_gives_the_recorded_answers():
    load = quickstart_load(SLOW)
    with engine("none") as stock:
        stock.wait_until_ready()
        assert stock.worker("bench_is_asynchronous")
        run, steps = stock.generate(load), stock.steps()
    assert run["tokens"] == sum(map(len, load.answers))
    assert all(step["gap"] == 0.0 for step in steps[1:])
    assert run["seconds"] == pytest.approx(run["device_seconds"], rel=0.01)
    decodes = [step for step in steps if step["rows"] == step["tokens"] == ROWS]
    table = DeviceTime(MODEL)
    published = {SLOW * table.seconds(ROWS, ROWS, float(context)) for context in range(0, 600, 16)}
    assert decodes and all(step["device_seconds"] in published for step in decodes)


@pytest.mark.engine
def test_a_synchronous_engine_waits_for_the_device_in_every_step():
    load = quickstart_load(SLOW)
    with engine("rhyme-sync") as synchronous:
        synchronous.wait_until_ready()
        assert not synchronous.worker("bench_is_asynchronous")
        assert synchronous.worker("bench_remember", str(LOADS["quickstart"].trace), 3) == 3 * 512
        run, steps = synchronous.generate(load), synchronous.steps()
        assert synchronous.worker("bench_remember", str(LOADS["quickstart"].trace), 0) == 0
    assert run["tokens"] == sum(map(len, load.answers))
    assert 0 < run["accepted"] <= run["drafted"] == sum(step["drafted"] for step in steps)
    for before, step in zip(steps, steps[1:], strict=False):
        assert step["gap"] > 0.0
        assert step["period"] == pytest.approx(before["device_seconds"] + step["gap"])


@pytest.mark.engine
def test_rollouts_are_measured_once(tmp_path, capsys):
    options = {"load": ["gsm8k-noisy"], "quick": True, "rows": "4", "methods": "rhyme", "scales": "0.25"}
    result = tmp_path / "rollout.json"
    rollout.main(**options, histories="full,empty", result=result)
    cells = json.loads(result.read_text())["loads"]["gsm8k-noisy"]
    assert list(cells) == ["full history, scale 0.25", "empty history, scale 0.25"]
    for cell in cells.values():
        runs = {method: by_rows["4"] for method, by_rows in cell["runs"].items()}
        assert runs["none"][0]["tokens"] == runs["rhyme"][0]["tokens"]
        assert list(cell["bars"]) == ["tokens/s / stock, worst number of rows"]
        assert cell["asynchronous"]["none"]
    rollout.main(**options, result=result)
    assert f"gsm8k-noisy: already in {result}" in capsys.readouterr().out.replace("\n", "")
    with pytest.raises(typer.BadParameter, match="gsm8k-noisy: measured with another value of repeats"):
        rollout.main(**options, repeats=2, result=result)
    with pytest.raises(typer.BadParameter, match="the policy of gsm8k-noisy.parquet is not here"):
        rollout.main(load=["gsm8k-noisy"], machine=True, result=result)


@pytest.mark.engine
def test_host_time_is_divided_into_parts():
    by_drafting = host_time.measure(["rhyme"], [ROWS], MODEL, waves=2, repeats=1)
    tokens = [by_drafting[name]["rhyme"][str(ROWS)]["tokens"] for name in host_time.limits("rhyme", ROWS)]
    assert tokens[0] == ROWS and tokens == sorted(set(tokens)), "a higher limit, more drafts"
    found = by_drafting[host_time.DRAFTED]["rhyme"][str(ROWS)]
    assert found["tokens"] > ROWS
    assert all(found[part] > 0.0 for part in host_time.PARTS)
    assert found["host"] > max(found[part] for part in host_time.PARTS)
