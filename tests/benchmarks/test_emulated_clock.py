"""The emulated clock, with clocks and a model runner of its own: what a step lasts, what the host is charged, and what
counts as late."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from benchmarks.engines.virtual_time import LAUNCH_SECONDS, LOGITS_LAUNCHES, PIECES_PER_LAYER, event_and_stream
from benchmarks.jobs.emulated_clock import EmulatedClock, EmulatedTime, attach


class Time:
    """The real time and the CPU time of the engine's thread; they only move when told to, or when somebody sleeps."""

    def __init__(self):
        self.real = 100.0
        self.cpu = 7.0

    def sleep(self, seconds):
        self.real += seconds

    def work(self, cpu, preempted=0.0):
        self.cpu += cpu
        self.real += cpu + preempted


class TenPerToken:
    """A step costs 10 s and 1 s for each token."""

    def seconds(self, rows, num_tokens, context):
        return 10.0 + num_tokens


@pytest.fixture
def time():
    return Time()


@pytest.fixture
def make_clock(time):
    def make(charges_host):
        return EmulatedClock(
            TenPerToken(), 2.0, charges_host=charges_host,
            real_now=lambda: time.real, sleep=time.sleep, host_now=lambda: time.cpu,
        )  # fmt: skip

    return make


@pytest.fixture
def clock(make_clock):
    return make_clock(True)


def step(clock, time, num_tokens=1, follows=True, computing=0.0):
    """Launch a step, compute it on the CPU, and wait for it."""
    clock.launch(1, num_tokens, 0.0, follows)
    with clock.uncharged():
        time.work(computing)
    clock.wait_until(clock.free_at)


def test_a_period_is_the_dilated_step_and_the_host_s_work_before_it(clock, time):
    step(clock, time, num_tokens=5, follows=False, computing=3.0)
    assert time.real == 100 + 2 * 15
    time.work(cpu=1.5)
    step(clock, time, num_tokens=5, computing=3.0)
    assert time.real == 130 + 2 * (1.5 + 15)
    assert clock.times == EmulatedTime(steps=2, seconds=63.0, host_seconds=3.0, tokens=10)


def test_an_engine_that_is_charged_nothing_takes_the_steps_time(make_clock, time):
    clock = make_clock(False)
    step(clock, time, follows=False)
    time.work(cpu=4.0)
    clock.work(3.0)
    step(clock, time)
    assert time.real == 100 + 22 + 22
    assert clock.times == EmulatedTime(steps=2, seconds=44.0, tokens=2)


def test_other_processes_that_preempt_the_host_are_not_charged(clock, time):
    step(clock, time, follows=False)
    time.work(cpu=1.0, preempted=6.0)
    step(clock, time)
    assert time.real == 122 + 2 * (1 + 11)
    assert (clock.times.host_seconds, clock.times.late_steps) == (2.0, 0)


def test_work_while_the_accelerator_computes_is_hidden(clock, time):
    step(clock, time, follows=False)  # until 122
    clock.launch(1, 1, 0.0, follows=True)  # until 144
    time.work(cpu=4.0)  # until 130 for the host
    clock.launch(1, 1, 0.0, follows=True)  # before the step before it has ended: until 166
    time.work(cpu=2.0)
    clock.wait_until(144.0)
    assert time.real == 144.0
    clock.wait_until(144.0)  # a second event of the same step
    time.work(cpu=1.5)
    clock.wait_until(clock.free_at)
    assert time.real == 166.0
    assert (clock.times.host_seconds, clock.times.late_steps) == (0.0, 0)


def test_only_the_gap_between_the_arrival_and_the_launch_is_charged(clock, time):
    step(clock, time, follows=False)
    for _ in range(2):
        time.work(cpu=0.5)  # drafting and input preparation
        clock.launch(1, 1, 0.0, follows=True)
        time.work(cpu=3.0)  # learning, output processing and scheduling
        clock.wait_until(clock.free_at)
    assert time.real == 122 + 2 * (2 * 0.5 + 22)
    assert clock.times.host_seconds == 2 * 2 * 0.5


def test_launches_are_charged_to_the_host(clock, time):
    step(clock, time, follows=False)
    clock.work(0.5)
    step(clock, time)
    assert clock.times.host_seconds == 1.0
    assert time.real == 122 + 2 * (0.5 + 11)


def test_an_idle_engine_is_charged_nothing(clock, time):
    step(clock, time, follows=False)
    time.work(cpu=2.0)  # new weights
    time.real += 50.0
    step(clock, time, follows=False)
    assert time.real == 122 + 52 + 22
    assert (clock.times.host_seconds, clock.times.seconds, clock.times.late_steps) == (0.0, 44.0, 0)


def test_late_steps_are_counted_and_not_made_up_for(clock, time):
    step(clock, time, follows=False, computing=25.0)  # due after 22
    assert (time.real, clock.times.late_steps, clock.times.late_seconds) == (125.0, 1, 3.0)
    step(clock, time)
    assert time.real == 125.0 + 22
    assert (clock.times.late_step_share, clock.times.late_time_share) == (0.5, 3 / 44)
    assert not clock.times.is_valid


def test_a_host_that_is_always_behind_is_paced_nevertheless(clock, time):
    step(clock, time, follows=False)
    for _ in range(10):
        time.work(cpu=30.0)
        clock.launch(1, 1, 0.0, follows=True)
    assert time.real == 122 + 10 * 60 - 22  # the last step may be computed 22 s early
    assert clock.times.host_seconds == 10 * 60 - 9 * 22


def test_a_drafter_learns_emulated_seconds(clock, time):
    step(clock, time, follows=False)
    before = clock.emulated_seconds()
    time.work(cpu=1.5)
    step(clock, time)
    assert clock.emulated_seconds() - before == 1.5 + 11


def test_three_percent_of_the_steps_may_be_late():
    assert EmulatedTime(steps=100, seconds=10.0, late_steps=3, late_seconds=0.2).is_valid
    assert not EmulatedTime(steps=100, seconds=10.0, late_steps=4, late_seconds=0.0).is_valid
    assert not EmulatedTime(steps=100, seconds=10.0, late_steps=1, late_seconds=0.21).is_valid


class Runner:
    """A model runner with the methods and fields of vLLM's that the clock uses; every call costs the host 0.25 s."""

    speculative_config = "drafts"

    def __init__(self, time, asynchronous):
        self.time = time
        self.use_async_scheduling = asynchronous
        self.input_batch = SimpleNamespace(num_reqs=2, num_tokens_no_spec=np.array([10, 30, 99]))
        self.query_start_loc = SimpleNamespace(np=np.array([0, 5, 6]))
        self.model = SimpleNamespace(compute_logits=lambda hidden: self.compute(2.0))
        self.execute_model_state = None

    def compute(self, cpu):
        """Compute in the accelerator's place: three operations and two views."""
        self.time.work(cpu)
        numbers = torch.ones(4)
        return (numbers.view(2, 2)[0] + 1.0).exp()

    def execute_model(self, scheduled):
        self.time.work(0.25)
        self._model_forward()
        self.model.compute_logits("hidden")
        self.execute_model_state = SimpleNamespace(scheduler_output=scheduled)

    def sample_tokens(self, grammar):
        self._sample("logits", "metadata")
        self.execute_model_state = None
        output = SimpleNamespace(sampled_token_ids=[[1, 2, 3], [4]], req_id_to_index={"a": 0, "b": 1})
        self._bookkeeping_sync()
        return SimpleNamespace(get_output=lambda: output) if self.use_async_scheduling else output

    def _model_forward(self):
        self.compute(3.0)

    def _sample(self, logits, metadata):
        return self.compute(4.0)

    def _bookkeeping_sync(self):
        self.time.work(0.25)


def scheduled(cached=("a", "b")):
    return SimpleNamespace(
        scheduled_spec_decode_tokens={"a": [2, 3, 9, 9]}, scheduled_cached_reqs=SimpleNamespace(req_ids=list(cached))
    )


def test_a_synchronous_runner_is_charged_from_the_arrival_to_the_launch(clock, time):
    runner = Runner(time, asynchronous=False)
    attach(runner, clock)
    for cached in ((), ("a", "b"), ("a", "b")):
        runner.execute_model(scheduled(cached))
        runner.sample_tokens(None)
        time.work(0.25)  # output processing and scheduling
    assert clock.times == EmulatedTime(
        steps=3, seconds=3 * 32 + 2 * 1.5, host_seconds=2 * 2 * 0.75, tokens=18, verifies=4, drafted=12, accepted=6
    )
    assert time.real == 100.25 + 2 * (3 * 16 + 2 * 0.75) + 0.5


def test_an_asynchronous_runner_is_counted_when_its_output_is_read(clock, time):
    runner = Runner(time, asynchronous=True)
    attach(runner, clock)
    runner.execute_model(scheduled())
    output = runner.sample_tokens(None)
    assert (clock.times.steps, clock.times.drafted) == (1, 0)
    assert output.get_output().req_id_to_index == {"a": 0, "b": 1}
    assert (clock.times.verifies, clock.times.drafted, clock.times.accepted) == (2, 4, 2)
    assert time.real == 100.25 + 9.0 + 0.25  # nobody has waited


def test_operations_of_the_accelerator_are_charged_as_launches(clock, time):
    runner = Runner(time, asynchronous=True)
    attach(runner, clock, num_layers=28)
    for _ in range(2):
        runner.execute_model(scheduled())
        before = clock.now()
        runner.sample_tokens(None)
        sampling = 3 * LAUNCH_SECONDS + 0.25
        assert clock.now() - before == pytest.approx(2.0 * sampling, abs=1e-9)
    forward_and_logits = (1 + 28 * PIECES_PER_LAYER + LOGITS_LAUNCHES) * LAUNCH_SECONDS
    before = clock.now()
    runner.execute_model(scheduled())
    assert clock.now() - before == pytest.approx(2.0 * (0.25 + forward_and_logits), abs=1e-9)


def test_an_event_is_a_place_in_the_accelerator_s_queue(clock, time):
    event_class, _ = event_and_stream(clock)
    never, first, second = event_class(), event_class(), event_class()
    clock.launch(1, 1, 0.0, follows=False)
    first.record()
    clock.launch(1, 1, 0.0, follows=True)
    second.record()
    never.synchronize()
    assert (time.real, never.query(), first.query()) == (100.0, True, False)
    first.synchronize()
    assert (time.real, first.query(), second.query()) == (122.0, True, False)
    time.work(cpu=11.0)  # 22 s on the accelerator's host
    assert second.query()
