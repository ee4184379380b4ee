"""The planner and the late binder: everything is planned and handed out once, loads are as even as asked."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rhyme_verl.histopipe.binder import LateBinder
from rhyme_verl.histopipe.migration import EXPECTED_REST, seconds_saved
from rhyme_verl.histopipe.planner import plan, schedule
from rhyme_verl.histopipe.ranges import Fleet, Work
from rhyme_verl.histopipe.step_cost import StepCost


def fleet_of(num_replicas=8, max_running=16, speeds=None):
    cost = StepCost.affine(0.015, 0.001, max_running)
    return Fleet(speeds=np.ones(num_replicas) if speeds is None else speeds, max_running=max_running, cost=cost)


def work_of(rng, groups, samples=4, spread=0.9):
    p50 = np.clip(rng.lognormal(6.0, spread, groups), 10, 8000)
    p90 = np.minimum(p50 * rng.uniform(1.1, 2.0, groups), 8192)
    counts = np.full(groups, samples, dtype=np.int64)
    return Work(tokens=(p50 + p90) / 2.0, p50=p50, p90=p90, samples=counts, max_tokens=8192.0)


cases = st.tuples(
    st.integers(0, 2**31), st.integers(1, 60), st.integers(1, 9), st.integers(1, 12), st.sampled_from([1, 4, 16])
)


def random_case(case):
    seed, groups, samples, replicas, max_running = case
    rng = np.random.default_rng(seed)
    return work_of(rng, groups, samples), fleet_of(replicas, max_running, rng.uniform(0.5, 2.0, replicas))


@settings(max_examples=40, deadline=None)
@given(cases, st.sampled_from(["barrier", "pipelined"]), st.integers(1, 2))
def test_every_sequence_is_planned_once(case, mode, step):
    work, fleet = random_case(case)
    found = plan(work, fleet, mode, step=step)
    assert sorted(found.order.tolist()) == list(range(work.samples.sum()))
    assert found.replica.shape == (work.samples.sum(),)
    assert found.replica.min() >= 0 and found.replica.max() < len(fleet.speeds)
    assert np.all(found.seconds >= 0)


def test_plans_start_with_the_longest():
    work = work_of(np.random.default_rng(0), 100)
    lengths = np.repeat(work.p90, work.samples)[plan(work, fleet_of(), "pipelined").order]
    assert lengths[0] == work.p90.max()
    assert np.corrcoef(lengths, np.arange(len(lengths)))[0, 1] < -0.8


def test_seconds_are_what_the_cost_table_says():
    fleet = fleet_of(2, 4)
    found = plan(Work.certain(np.array([100.0, 100.0])), fleet, "barrier")
    assert sorted(found.replica.tolist()) == [0, 1]
    assert found.seconds == pytest.approx([100 * 0.016, 100 * 0.016])


def test_mirrored_steps_give_every_replica_the_same_time():
    """Two like steps: what a replica does in both together differs by no more than one group's time."""
    rng = np.random.default_rng(3)
    groups, samples = 400, 4
    work = Work.certain(np.repeat(rng.uniform(300.0, 1200.0, groups), samples))
    fleet = fleet_of(num_replicas=100, max_running=16)  # as many lanes as sequences
    odd, even = (plan(work, fleet, "pipelined", step=step) for step in (1, 2))
    assert even.replica.tolist() == (99 - odd.replica).tolist()
    pair = odd.seconds + even.seconds
    budget = odd.budgets.first + odd.budgets.last
    group_seconds = work.tokens.max() * fleet.cost.seconds[1]
    assert pair.max() <= budget + group_seconds
    assert np.all(np.diff(odd.budgets.of_rank(np.arange(100), 100)) <= 0)


@settings(max_examples=40, deadline=None)
@given(cases)
def test_pair_loads_keep_to_the_budget_of_a_pair(case):
    work, fleet = random_case(case)
    certain = Work.certain(np.repeat(work.tokens, work.samples))
    odd, even = (plan(certain, fleet, "pipelined", step=step) for step in (1, 2))
    sequence_seconds = work.tokens.max() * fleet.cost.seconds[fleet.max_running] / fleet.speeds
    budget = max(one.budgets.first for one in (odd, even)) + max(one.budgets.last for one in (odd, even))
    assert np.all(odd.seconds + even.seconds <= 1.01 * budget + 2 * sequence_seconds)


def test_long_sequences_run_few_together_and_short_ones_many():
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(6.0, 1.0, 1024), 1, 8192)
    fleet = fleet_of(32, 64)
    found = plan(Work.certain(lengths), fleet, "barrier")
    of_longest = found.replica[np.argmax(lengths)]
    assert (found.replica == of_longest).sum() < 32
    most = np.bincount(found.replica, minlength=32).max()
    assert most >= 40


def test_faster_replicas_get_more():
    speeds = np.array([0.5] * 4 + [2.0] * 4)
    work = work_of(np.random.default_rng(0), 200, spread=0.1)
    found = plan(work, fleet_of(speeds=speeds), "barrier")
    tokens = np.bincount(found.replica, weights=np.repeat(work.tokens, work.samples), minlength=8)
    assert tokens[4:].sum() > 3.0 * tokens[:4].sum()
    assert found.seconds.max() < 1.3 * found.seconds.mean()


def test_groups_stay_together_where_ranges_are_larger_than_groups():
    work = work_of(np.random.default_rng(0), 64, samples=4, spread=0.05)
    found = plan(work, fleet_of(4, 64), "pipelined")
    on = [len(set(found.replica[4 * g : 4 * g + 4].tolist())) for g in range(64)]
    assert np.mean(np.array(on) == 1) > 0.9


@settings(max_examples=40, deadline=None)
@given(cases, st.sampled_from(["barrier", "pipelined"]))
def test_binder_hands_out_every_sequence_once_and_never_too_many(case, mode):
    work, fleet = random_case(case)
    rng = np.random.default_rng(case[0])
    binder = LateBinder(fleet, mode)
    names = 1000 + np.arange(work.samples.sum())
    binder.open(names, work, now=0.0)
    running = [0] * len(fleet.speeds)
    handed, now = [], 0.0
    while len(binder):
        replica = int(rng.integers(len(running)))
        taken = binder.take(replica, running[replica], 0, now)
        handed += taken
        running[replica] += len(taken)
        assert running[replica] <= fleet.max_running
        ended = int(rng.integers(len(running)))
        running[ended] = int(rng.integers(running[ended] + 1)) if rng.random() < 0.7 else 0
        now += float(rng.exponential(2.0))
    assert sorted(handed) == names.tolist()


def test_what_waits_when_replicas_come_or_go_is_opened_anew():
    work = work_of(np.random.default_rng(0), 64)
    binder = LateBinder(fleet_of(4, 16), "barrier")
    binder.open(np.arange(256), work, now=0.0)
    started = binder.take(0, 0, 0, 0.0)
    left = binder.waiting()
    assert len(left) == len(binder) == 256 - len(started)
    tokens = np.repeat(work.tokens, work.samples)[left]
    other = LateBinder(fleet_of(3, 200), "barrier")
    other.open(np.array(left), Work.certain(tokens), now=1.0)
    handed = [one for replica in range(3) for one in other.take(replica, 0, 0, 1.0)]
    handed += [one for replica in range(3) for one in other.take(replica, 0, 0, 2.0)]
    assert sorted(started + handed + other.waiting()) == list(range(256))


def test_binder_waits_for_a_new_enough_policy_version():
    work = work_of(np.random.default_rng(0), 4)
    binder = LateBinder(fleet_of(2, 16), "barrier")
    binder.open(np.arange(16), work, now=0.0, needs_version=3)
    assert binder.take(0, 0, 2, 0.0) == []
    assert binder.take(0, 0, 3, 0.0) != []


def test_a_replica_that_is_not_dry_takes_no_range():
    work = work_of(np.random.default_rng(0), 64)
    binder = LateBinder(fleet_of(8, 16), "pipelined")
    binder.open(np.arange(256), work, now=0.0)
    assert binder.take(0, 1, 0, 0.0) == []
    assert len(binder.take(0, 0, 0, 0.0)) > 0


def test_uncertain_lengths_are_given_more_room():
    rng = np.random.default_rng(0)
    p50 = np.clip(rng.lognormal(6.0, 1.0, 128), 10, 4000)
    counts = np.full(128, 4, dtype=np.int64)
    kinds = [Work(tokens=p50, p50=p50, p90=p50 * f, samples=counts, max_tokens=8192.0) for f in (1.0001, 1.4)]
    sure, unsure = (schedule(one, fleet_of(32, 32), "barrier") for one in kinds)
    assert unsure.spans.max() > sure.spans.max()


def test_moving_pays_only_where_few_run():
    cost = StepCost.affine(0.015, 5e-5, 128)
    assert seconds_saved(8000, 128, 0, cost, 5e-5) == pytest.approx(EXPECTED_REST * 8000 * 127 * 5e-5 - 8000 * 5e-5)
    assert seconds_saved(8000, 2, 1, cost, 5e-5) < 0.0


def test_step_cost_table_is_interpolated_and_monotone():
    cost = StepCost.from_table([1, 4, 8], [0.010, 0.012, 0.011], 16)
    assert cost.seconds[1] == pytest.approx(0.010)
    assert cost.at(2.5) == pytest.approx(0.011)
    assert np.all(np.diff(cost.seconds) >= 0)
    assert np.all(np.diff(cost.seconds[1:] / np.arange(1, 17)) <= 1e-12)
    with pytest.raises(ValueError, match="ascending"):
        StepCost.from_table([4, 1], [0.01, 0.02], 8)
    with pytest.raises(ValueError, match="positive"):
        StepCost.from_table([1, 2], [0.0, 0.02], 8)
