"""The emulated clock, with a clock and a model runner of its own: what a step lasts, and what counts as late."""

from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.jobs.emulated_clock import EmulatedClock, EmulatedTime, attach


class Time:
    """A clock that only moves when told to, or when somebody sleeps."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


class TenPerToken:
    """A step costs 10 s and 1 s for each token."""

    def seconds(self, rows, num_tokens, context):
        return 10.0 + num_tokens


@pytest.fixture
def time():
    return Time()


@pytest.fixture
def clock(time):
    return EmulatedClock(TenPerToken(), 2.0, time, time.sleep)


def test_a_step_lasts_the_dilated_cost_and_the_drafter_s_time(clock, time):
    clock.start(follows=False)
    time.now += 3.0
    clock.add_drafter_time(1.5)
    clock.finish(rows=2, num_tokens=5, context=100.0)
    assert time.now == 100.0 + 2 * (15 + 1.5)
    assert clock.times == EmulatedTime(steps=1, seconds=33.0, drafter_seconds=1.5, tokens=5)


def test_the_drafter_is_called_when_the_step_would_be_computed(clock, time):
    clock.start(follows=False)
    time.now += 3.0
    clock.wait_for_drafter(rows=2, num_tokens=5, context=100.0)
    assert time.now == pytest.approx(100.0 + 2 * 15, abs=0.01)
    clock.wait_for_drafter(rows=2, num_tokens=5, context=100.0)
    time.now += 1.5
    clock.add_drafter_time(1.5)
    clock.finish(rows=2, num_tokens=5, context=100.0)
    assert time.now == 100.0 + 2 * (15 + 1.5)


def test_what_lies_between_two_steps_is_part_of_the_second_one(clock, time):
    clock.start(follows=False)
    clock.finish(1, 1, 0.0)
    time.now += 4.0  # scheduling and output
    clock.start(follows=True)
    clock.finish(1, 1, 0.0)
    assert time.now == 100.0 + 22 + 22
    time.now += 50.0  # idle
    clock.start(follows=False)
    clock.finish(1, 1, 0.0)
    assert time.now == 144.0 + 50 + 22
    assert clock.times.late_steps == 0


def test_late_steps_are_counted_and_not_made_up_for(clock, time):
    clock.start(follows=False)
    time.now += 25.0
    clock.finish(1, 1, 0.0)  # due after 22
    assert (time.now, clock.times.late_steps, clock.times.late_seconds) == (125.0, 1, 3.0)
    clock.start(follows=True)
    clock.finish(1, 1, 0.0)
    assert time.now == 125.0 + 22
    assert (clock.times.late_step_share, clock.times.late_time_share) == (0.5, 3 / 44)
    assert not clock.times.is_valid


def test_three_percent_of_the_steps_may_be_late():
    assert EmulatedTime(steps=100, seconds=10.0, late_steps=3, late_seconds=0.2).is_valid
    assert not EmulatedTime(steps=100, seconds=10.0, late_steps=4, late_seconds=0.0).is_valid
    assert not EmulatedTime(steps=100, seconds=10.0, late_steps=1, late_seconds=0.21).is_valid


def test_a_runner_is_paced_by_what_it_was_scheduled(clock, time):
    batch = SimpleNamespace(num_reqs=2, num_tokens_no_spec=np.array([10, 30, 99]))
    output = SimpleNamespace(sampled_token_ids=[[1, 2, 3], [4]], req_id_to_index={"a": 0, "b": 1})
    runner = SimpleNamespace(
        input_batch=batch,
        execute_model=lambda scheduled: None,
        sample_tokens=lambda grammar: runner.propose_draft_token_ids() and output,
        propose_draft_token_ids=lambda: ["draft"],
    )
    attach(runner, clock)
    runner.execute_model(
        SimpleNamespace(
            total_num_scheduled_tokens=6,
            num_scheduled_tokens={"a": 5, "b": 1},
            scheduled_spec_decode_tokens={"a": [2, 3, 9, 9]},
            scheduled_cached_reqs=SimpleNamespace(req_ids=["a", "b"]),
        )
    )
    assert runner.sample_tokens(None) is output
    times = clock.times
    assert (times.steps, times.tokens, times.verifies, times.drafted, times.accepted) == (1, 6, 2, 4, 2)
    assert 0 < times.drafter_seconds < 0.1
