"""The emulated clock, with clocks and a model runner of its own: what a step lasts, what the host is charged, and what
counts as late."""

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.drafting.host_gap import engine_gap
from benchmarks.engines.device_time import DeviceTime
from benchmarks.engines.process import METHODS
from benchmarks.engines.virtual_time import event_and_stream
from benchmarks.jobs import emulated_worker
from benchmarks.jobs.emulated_clock import EmulatedClock, EmulatedTime, attach
from examples.quickstart.policy import SHIPPED_POLICY
from examples.quickstart.progress import json_lines
from tests.helpers.engine import engine, generate, quickstart_prompts


class Time:
    """The real time, which only moves when told to, or when somebody sleeps."""

    def __init__(self):
        self.real = 100.0

    def sleep(self, seconds):
        self.real += seconds


class TenPerToken:
    """A step costs 10 s and 1 s for each token."""

    def seconds(self, rows, num_tokens, context, drafted, longest):
        return 10.0 + num_tokens


class Gap:
    """The host takes 0.5 s per row and 0.25 s per drafted token."""

    def seconds(self, rows, num_tokens):
        return 0.5 * rows + 0.25 * (num_tokens - rows)


@pytest.fixture
def time():
    return Time()


@pytest.fixture
def make_clock(time):
    def make(gap):
        return EmulatedClock(TenPerToken(), 2.0, gap, real_now=lambda: time.real, sleep=time.sleep)

    return make


@pytest.fixture
def clock(make_clock):
    return make_clock(Gap())


def step(clock, time, num_tokens=1, drafted=0, follows=True, computing=0.0):
    """Launch a step, compute it on the CPU, and wait for it."""
    clock.launch(1, num_tokens, drafted, 0, 0.0, follows)
    time.real += computing
    clock.wait_until(clock.free_at)


def test_a_period_is_the_dilated_step_and_the_host_s_time_before_it(clock, time):
    step(clock, time, num_tokens=5, follows=False, computing=3.0)
    assert time.real == 100 + 2 * 15
    time.real += 1.0  # the host's work takes its own time here
    step(clock, time, num_tokens=5, drafted=4, computing=3.0)
    assert time.real == 130 + 2 * (1.5 + 15)
    assert clock.times == EmulatedTime(steps=2, seconds=63.0, host_seconds=3.0, tokens=10)


def test_an_engine_that_is_charged_nothing_takes_the_steps_time(make_clock, time):
    clock = make_clock(None)
    step(clock, time, follows=False)
    time.real += 4.0
    step(clock, time)
    assert time.real == 100 + 22 + 22
    assert clock.times == EmulatedTime(steps=2, seconds=44.0, tokens=2)


def test_work_while_the_accelerator_computes_is_hidden(clock, time):
    step(clock, time, follows=False)  # until 122
    clock.launch(1, 1, 0, 0, 0.0, follows=True)  # until 145
    clock.launch(1, 1, 0, 0, 0.0, follows=True)  # before the step before it has ended: until 167
    clock.wait_until(145.0)
    assert time.real == 145.0
    clock.wait_until(145.0)  # a second event of the same step
    clock.wait_until(clock.free_at)
    assert time.real == 167.0
    assert (clock.times.host_seconds, clock.times.late_steps) == (1.0, 0)


def test_an_idle_engine_is_charged_nothing(clock, time):
    step(clock, time, follows=False)
    time.real += 50.0
    step(clock, time, follows=False)
    assert time.real == 122 + 50 + 22
    assert (clock.times.host_seconds, clock.times.seconds, clock.times.late_steps) == (0.0, 44.0, 0)


def test_late_steps_are_counted_and_not_made_up_for(clock, time):
    step(clock, time, follows=False, computing=25.0)  # due after 22
    assert (time.real, clock.times.late_steps, clock.times.late_seconds) == (125.0, 1, 3.0)
    step(clock, time)
    assert time.real == 125.0 + 1 + 22
    assert (clock.times.late_step_share, clock.times.late_time_share) == (0.5, 3 / 45)
    assert not clock.times.is_valid


def test_a_host_that_never_waits_is_paced_nevertheless(clock, time):
    step(clock, time, follows=False)
    for _ in range(10):
        clock.launch(80, 1, 0, 0, 0.0, follows=True)
    assert time.real == 122 + 10 * 80 - 22  # the last step may be computed 22 s early
    assert clock.times.host_seconds == 10 * 80 - 9 * 22


def test_a_drafter_learns_emulated_seconds(clock, time):
    step(clock, time, follows=False)
    before = clock.emulated_seconds()
    step(clock, time, num_tokens=5, drafted=4)
    assert clock.emulated_seconds() - before == 1.5 + 15


def test_three_percent_of_the_steps_may_be_late():
    assert EmulatedTime(steps=100, seconds=10.0, late_steps=3, late_seconds=0.2).is_valid
    assert not EmulatedTime(steps=100, seconds=10.0, late_steps=4, late_seconds=0.0).is_valid
    assert not EmulatedTime(steps=100, seconds=10.0, late_steps=1, late_seconds=0.21).is_valid


class Runner:
    """A model runner with the methods and fields of vLLM's that the clock uses; it computes for 2 s.

    Row a has a draft of four tokens; row b is prefilled, or has nothing drafted.
    """

    def __init__(self, time, asynchronous):
        self.time = time
        self.use_async_scheduling = asynchronous
        self.input_batch = SimpleNamespace(
            num_reqs=2,
            num_tokens_no_spec=np.array([10, 30, 99]),
            num_computed_tokens_cpu=np.array([9, 0, 0]),
            num_prompt_tokens=np.array([4, 3, 0]),
        )
        self.query_start_loc = SimpleNamespace(np=np.array([0, 5, 8]))
        self.execute_model_state = None

    def execute_model(self, scheduled):
        self._model_forward()
        self.execute_model_state = SimpleNamespace(scheduler_output=scheduled)

    def sample_tokens(self, grammar):
        self.execute_model_state = None
        output = SimpleNamespace(sampled_token_ids=[[1, 2, 3], [4]], req_id_to_index={"a": 0, "b": 1})
        self._bookkeeping_sync()
        return SimpleNamespace(get_output=lambda: output) if self.use_async_scheduling else output

    def _model_forward(self):
        self.time.real += 2.0

    def _bookkeeping_sync(self):
        pass


def scheduled(cached=("a", "b")):
    return SimpleNamespace(
        scheduled_spec_decode_tokens={"a": [2, 3, 9, 9]}, scheduled_cached_reqs=SimpleNamespace(req_ids=list(cached))
    )


def test_a_synchronous_runner_waits_for_every_step_and_pays_for_its_drafts(clock, time):
    runner = Runner(time, asynchronous=False)
    attach(runner, clock)
    for cached in ((), ("a",), ("a", "b")):
        runner.execute_model(scheduled(cached))
        runner.sample_tokens(None)
    gap = 2 * 0.5 + 4 * 0.25  # prompts are not drafted
    assert clock.times == EmulatedTime(
        steps=3, seconds=2 * (3 * 18 + 2 * gap), host_seconds=2 * 2 * gap, tokens=24, verifies=3, drafted=12, accepted=6
    )
    assert time.real == 100 + 2 * (3 * 18 + 2 * gap)


def test_an_asynchronous_runner_is_counted_when_its_output_is_read(clock, time):
    runner = Runner(time, asynchronous=True)
    attach(runner, clock)
    runner.execute_model(scheduled())
    output = runner.sample_tokens(None)
    assert (clock.times.steps, clock.times.drafted) == (1, 0)
    assert output.get_output().req_id_to_index == {"a": 0, "b": 1}
    assert (clock.times.verifies, clock.times.drafted, clock.times.accepted) == (2, 4, 2)
    assert time.real == 100 + 2  # nobody has waited


def test_an_event_is_a_place_in_the_accelerator_s_queue(clock, time):
    event_class, _ = event_and_stream(clock)
    never, first, second = event_class(), event_class(), event_class()
    clock.launch(1, 1, 0, 0, 0.0, follows=False)
    first.record()
    clock.launch(1, 1, 0, 0, 0.0, follows=True)
    second.record()
    never.synchronize()
    assert (time.real, never.query(), first.query()) == (100.0, True, False)
    first.synchronize()
    assert (time.real, first.query(), second.query()) == (122.0, True, False)
    second.synchronize()
    assert second.query()


@pytest.mark.parametrize(("method", "asynchronous"), [("suffix", False), ("rhyme-sync", False), ("rhyme", True)])
def test_each_drafter_has_its_own_table(monkeypatch, method, asynchronous):
    monkeypatch.setattr(emulated_worker, "engine_gap", lambda name: f"table of {name}")
    assert emulated_worker._host_gap(SimpleNamespace(**METHODS[method]), asynchronous) == f"table of {method}"


def _run_engine(method):
    """Run in a process of its own: vLLM adds a worker extension to the worker class of its process, for good."""
    arguments = {"speculative_config": METHODS[method], "async_scheduling": False} if method != "none" else {}
    extension = "benchmarks.jobs.emulated_worker.EmulatedWorkerExtension"
    with engine(SHIPPED_POLICY, worker_extension_cls=extension, **arguments) as llm:
        if method == "rhyme-sync":
            assert llm.collective_rpc("rhyme_bind") == [True]
        llm.collective_rpc("bench_emulate")
        generate(llm, quickstart_prompts(4), temperature=1.0, max_tokens=96, ignore_eos=True)


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize("method", ["none", "rhyme-sync"])
def test_an_engine_of_a_job_is_paced_and_charged_by_the_table(tmp_path, monkeypatch, method):
    monkeypatch.setenv("RHYME_BENCH_STEP", "qwen2.5-7b,1")
    monkeypatch.setenv("RHYME_BENCH_TIMES", str(tmp_path))
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        process.submit(_run_engine, method).result()
    last = json_lines(tmp_path / "emulation-0.jsonl")[-1]
    published = DeviceTime("qwen2.5-7b")
    assert last["seconds"] - last["host_seconds"] > last["steps"] * published.seconds(1, 1, 0.0)
    if method == "none":
        assert last["host_seconds"] == 0.0
    else:
        gap = engine_gap(method)  # answers end at different steps, and then there are fewer rows
        least, most = gap.seconds(1, 1), gap.seconds(4, 4 * 33)
        assert 0.0 < least < last["host_seconds"] / (last["steps"] - 1) < most
