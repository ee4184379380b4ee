"""The scheduler loses nothing, runs nothing twice and never overfills a replica, whatever comes and goes."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rhyme_verl.histopipe import lanes
from rhyme_verl.histopipe.lanes import AHEAD, KEEP_SECONDS
from rhyme_verl.histopipe.messages import Finished, Group
from rhyme_verl.histopipe.scheduler import Job, Scheduler
from rhyme_verl.histopipe.units import UnitShape

LANES = 4


def groups(num, samples=2, step=1):
    return [Group(f"{step}-{index}", index, samples, step) for index in range(num)]


class Fleet:
    """Workers and replicas of a test: answers start when they have a lane, and end when the test says so."""

    def __init__(self, replicas=("a", "b"), lanes=LANES, max_tokens=100, **job):
        job = {"batch_size": 1000, "max_running": lanes, "max_tokens": max_tokens, **job}
        self.now = 0.0
        self.replica = {}  # of answers that may run
        self.running = {}  # answer -> replica
        self.aborted = []  # ask again
        self.wanted, self.started = [], []
        self.ended, self.published = [], []
        self.left = {}
        self.scheduler = Scheduler(Job(**job), self)
        self.scheduler.lanes.add_replicas(replicas, 0.0)

    @property
    def lanes(self):
        return self.scheduler.lanes

    def grant(self, answer, replica):
        assert answer not in self.ended
        self.replica[answer] = replica
        if answer not in self.running and answer not in self.aborted:
            self.start(answer)

    def park(self, answer):
        self.replica.pop(answer)

    def publish(self, uid):
        self.published.append(uid)

    def start(self, answer):
        self.running[answer] = self.replica[answer]
        self.started.append(answer)

    def tell_starts(self):
        """Reports come after the call that granted the lane, as they do through the router."""
        while True:
            started, self.started = self.started, []
            for answer in started:
                self.scheduler.start(answer, self.now)
            self.lanes.deal(self.now)
            if not self.started:
                return

    def submit(self, batch, available=0):
        self.left.update((group.uid, group.samples) for group in batch)
        self.wanted += [(group.uid, sample) for group in batch for sample in range(group.samples)]
        self.scheduler.submit(batch, available, self.now)
        self.tell_starts()

    def end(self, answer, tokens=10, **named):
        self.running.pop(answer, None)
        self.replica.pop(answer, None)
        self.ended.append(answer)
        self.lanes.stop(answer, self.now)
        schedule = self.scheduler.finish(Finished(answer, tokens, **named), self.now)
        self.left[answer[0]] -= 1
        if not self.left[answer[0]]:
            self.scheduler.end_group(answer[0], tokens is None, self.now)
        self.tell_starts()
        return schedule

    def abort(self, answers):
        """Requests end unfinished and are resumed where their lane is, if they have one."""
        for answer in answers:
            del self.running[answer]
            self.lanes.stop(answer, self.now)
        self.aborted += answers

    def resume(self):
        back, self.aborted = (
            [one for one in self.aborted if one in self.replica],
            [one for one in self.aborted if one not in self.replica],
        )
        for answer in back:
            self.start(answer)
        self.tell_starts()

    def remove(self, replica):
        self.lanes.remove_replicas([replica], self.now)
        self.abort([one for one, where in self.running.items() if where == replica])
        self.resume()

    def loads(self):
        return {name: sum(where == name for where in self.running.values()) for name in self.lanes.replicas}

    def most(self):
        """Return how many answers of equal predictions a replica has while others wait."""
        return math.ceil(self.lanes.max_running / (1.0 - AHEAD))


def test_answers_wait_until_a_replica_has_room_and_all_of_them_run_once():
    fleet = Fleet()
    fleet.submit(groups(10))
    while fleet.running:
        assert max(fleet.loads().values()) <= fleet.most()
        fleet.now += 1.0
        fleet.end(next(iter(fleet.running)))
    assert sorted(fleet.ended) == sorted(fleet.wanted)
    assert sorted(fleet.published) == sorted(group.uid for group in groups(10))
    (report,) = fleet.scheduler.take_reports()
    assert (report["answers"], report["tokens"], report["makespan_s"]) == (20, 200, 20.0)
    assert 0.0 < report["bubble"] < 1.0
    assert fleet.lanes.waiting == fleet.lanes.held == 0


@settings(deadline=None, max_examples=200)
@given(data=st.data())
def test_nothing_is_lost_or_run_twice_when_replicas_leave_join_and_are_slow(data):
    fleet = Fleet(["r0", "r1", "r2"])
    names, step = 3, 0
    for _ in range(data.draw(st.integers(5, 40))):
        fleet.now += data.draw(st.floats(0.01, 5.0))
        action = data.draw(st.sampled_from(["submit", "end", "end", "end", "remove", "add", "abort", "fail", "tick"]))
        if action == "submit":
            step += 1
            fleet.submit(groups(data.draw(st.integers(1, 6)), data.draw(st.integers(1, 3)), step))
        elif action == "end" and fleet.running:
            fleet.end(data.draw(st.sampled_from(sorted(fleet.running))))
        elif action == "remove" and fleet.lanes.replicas:
            fleet.remove(data.draw(st.sampled_from(sorted(fleet.lanes.replicas))))
        elif action == "add":
            fleet.lanes.add_replicas([f"r{names}"], fleet.now)
            fleet.tell_starts()
            names += 1
        elif action == "abort" and fleet.running:
            replica = fleet.running[data.draw(st.sampled_from(sorted(fleet.running)))]
            fleet.abort([one for one, where in fleet.running.items() if where == replica])
            fleet.now += data.draw(st.sampled_from([0.1, 2 * KEEP_SECONDS]))
            fleet.lanes.expire(fleet.now)
            fleet.tell_starts()
            fleet.resume()
        elif action == "fail":
            waiting = sorted(set(fleet.wanted) - set(fleet.running) - set(fleet.ended) - set(fleet.aborted))
            if waiting:
                fleet.end(data.draw(st.sampled_from(waiting)), tokens=None)
        elif action == "tick":
            fleet.lanes.expire(fleet.now)
            fleet.tell_starts()
        fleet.resume()
    fleet.lanes.add_replicas(["last"], fleet.now)
    fleet.tell_starts()
    fleet.resume()
    while len(fleet.ended) < len(fleet.wanted):
        assert fleet.running, "something waits although every replica is free"
        fleet.now += 1.0
        fleet.end(sorted(fleet.running)[0])
        fleet.resume()
    assert sorted(fleet.ended) == sorted(fleet.wanted)
    assert fleet.lanes.waiting == fleet.lanes.held == 0
    assert all(one.running == 0 for one in fleet.lanes.replicas.values())


def test_carried_answers_wait_for_the_next_unit_and_go_first():
    fleet = Fleet(lanes=16, batch_size=4, max_age=2, shape=UnitShape(2, 1))
    fleet.submit(groups(8))
    fleet.submit([Group(f"b{index}", 100 + index, 2, 1) for index in range(4)])
    assert len(fleet.running) == 18
    slow = ("1-3", 0)
    for answer in [one for one in fleet.running if one != slow and one[0] != "b0"]:
        fleet.end(answer)
    for answer in [one for one in fleet.running if one[0] == "b0"]:
        fleet.end(answer)
    assert len(fleet.published) == 4 and slow in fleet.running and slow not in fleet.replica
    fleet.scheduler.publish_more(0, fleet.now)
    assert len(fleet.published) == 8
    fleet.abort([slow])
    fleet.resume()
    assert fleet.aborted == [slow], "it waits for the next unit"
    fleet.submit([Group(f"c{index}", 200 + index, 2, 2) for index in range(4)], available=4)
    assert fleet.running == {}, "the trainer has a batch"
    fleet.submit([Group(f"d{index}", 300 + index, 2, 3) for index in range(4)], available=0)
    assert list(fleet.replica)[0] == slow
    fleet.resume()
    assert slow in fleet.running and len(fleet.running) == 17
    (report,) = fleet.scheduler.take_reports()
    assert report["carried_groups"] == 1 and report["answers"] >= 16


def test_the_share_of_answers_with_several_versions_includes_those_that_were_interrupted():
    fleet = Fleet(batch_size=2)
    fleet.submit(groups(2))
    interrupted, *others = list(fleet.running)
    fleet.abort([interrupted])
    fleet.resume()
    for answer, versions in [(interrupted, (1, 2)), (others[0], (2, 2)), (others[1], None), (others[2], (1, 1))]:
        fleet.scheduler.finish(Finished(answer, 10, versions=versions), fleet.now)
    for group in groups(2):
        fleet.scheduler.end_group(group.uid, False, fleet.now)
    (report,) = fleet.scheduler.take_reports()
    assert report["versions_spanned"] == pytest.approx(1 / 3)


def test_groups_that_replace_filtered_ones_are_in_the_report_of_their_step():
    """The batch ends, the trainer filters half of it and has it replaced, and the last answer ends late."""
    fleet = Fleet(["a"], lanes=64, batch_size=4)
    fleet.now = 100.0
    fleet.submit(groups(4))
    for seconds in (10.0, 5.0):
        fleet.now += seconds
        for answer in list(fleet.running):
            fleet.end(answer, tokens=30)
        if seconds == 10.0:
            fleet.submit([Group(f"more-{index}", 50 + index, 2, 1) for index in range(2)])
    (report,) = fleet.scheduler.take_reports()
    assert (report["answers"], report["tokens"], report["makespan_s"]) == (12, 360, 15.0)
    assert report["bubble"] == pytest.approx(1 - (8 * 10 + 4 * 5) / (64 * 15))
    assert not fleet.scheduler.take_reports()


def test_validation_goes_first_and_is_published_at_once_even_between_units():
    fleet = Fleet(lanes=8, batch_size=2, max_age=0, shape=UnitShape(1, 0))
    fleet.submit(groups(2))
    for answer in list(fleet.running):
        fleet.end(answer)
    validation = [Group("v", 9, 2, 1)]
    fleet.left["v"] = 2
    fleet.scheduler.submit_validation(validation, fleet.now)
    fleet.tell_starts()
    assert sorted(fleet.running) == [("v", 0), ("v", 1)]
    for answer in list(fleet.running):
        fleet.end(answer)
    assert fleet.published[-1] == "v"


def test_a_held_group_whose_worker_dies_is_not_counted_any_more():
    fleet = Fleet(lanes=16, batch_size=2, max_age=1, shape=UnitShape(2, 0))
    fleet.submit(groups(4, samples=1))
    for answer in list(fleet.running)[:2]:
        fleet.end(answer)
    assert fleet.published == []
    dead = fleet.ended[0][0]
    fleet.scheduler.end_group(dead, True, fleet.now)
    assert fleet.published == [dead]
    for answer in list(fleet.running):
        fleet.end(answer)
    fleet.scheduler.publish_more(0, fleet.now)
    assert sorted(fleet.published) == ["1-0", "1-1", "1-2", "1-3"], "each once"


@pytest.mark.parametrize(("shares_prompts", "most"), [(False, range(9, 13)), (True, range(25, 38))])
def test_no_more_run_than_a_replicas_cache_holds(shares_prompts, most):
    fleet = Fleet(lanes=64, shares_prompts=shares_prompts)
    fleet.scheduler.cache_tokens = 1000
    fleet.submit(groups(20, samples=8))
    assert set(fleet.loads().values()) == {fleet.most()}, "nothing is known yet"
    while fleet.running:
        fleet.end(next(iter(fleet.running)), prompt_tokens=100)
    fleet.submit(
        groups(20, samples=8, step=2)
    )  # known to be short, but prompts are not; two replicas, so four siblings each
    limit = fleet.lanes.max_running
    assert limit in most
    assert set(fleet.loads().values()) == {limit}
    fleet.scheduler.lengths.observe(np.array([99], np.uint64), np.array([100]), np.array([False]), 3)
    fleet.submit([Group("long", 99, 8, 3)])
    assert limit - 3 <= fleet.lanes.max_running <= limit, "one long group among many"


def test_tool_tokens_take_space_in_the_cache():
    fleet = Fleet(["a"], lanes=64)
    fleet.scheduler.cache_tokens = 1000
    limits = []
    for step, tool_tokens in ((1, 0), (2, 90), (3, 0)):
        fleet.submit(groups(300, samples=1, step=step))
        limits.append(fleet.lanes.max_running)
        while fleet.running:
            fleet.end(next(iter(fleet.running)), tool_tokens=tool_tokens)
    assert limits[:2] == [64, 64] and 10 <= limits[2] < 12, "10 generated tokens and about 90 of tools"


def test_groups_without_samples_limit_nothing():
    fleet = Fleet(lanes=64)
    fleet.scheduler.cache_tokens = 1000
    fleet.scheduler.lengths.observe(np.array([99], np.uint64), np.array([100]), np.array([False]), 1)
    fleet.submit(groups(2, samples=0))
    assert fleet.lanes.max_running == 64


def test_a_few_more_are_granted_than_a_replica_has_lanes_while_answers_wait():
    fleet = Fleet(lanes=40)
    fleet.submit(groups(60))
    assert set(fleet.loads().values()) == {50}
    overlapping = Fleet(lanes=40, overlaps=True)
    overlapping.submit(groups(60))
    assert set(overlapping.loads().values()) == {41}
    few = Fleet(lanes=40)
    few.submit(groups(30))
    assert set(few.loads().values()) == {30}


def test_short_answers_are_granted_further_ahead():
    fleet = Fleet(["a"], lanes=40)
    granted, grant = [], fleet.grant
    fleet.grant = lambda answer, replica: (granted.append(answer), grant(answer, replica))
    lengths = np.repeat([100, 10], [20, 120])
    fleet.scheduler.lengths.observe(np.arange(140, dtype=np.uint64), lengths, np.zeros(140, dtype=bool), 1)
    fleet.submit(groups(140))
    held = [fleet.lanes._answers[answer].predicted for answer in granted]
    assert min(held[:40]) > 2 * max(held[40:])
    assert len(held) > 70, "equal predictions would allow 50"
    assert 0.0 <= sum(held[40:]) - AHEAD * sum(held) <= held[-1], "the last one passes the limit"


def test_none_is_granted_ahead_of_answers_that_are_not_ready():
    fleet = Fleet(["a"], lanes=40)
    fleet.grant = lambda answer, replica: fleet.replica.update({answer: replica})  # none starts
    fleet.submit(groups(60))
    first = list(fleet.replica)
    assert len(first) == 40
    for answer in first[:39]:
        fleet.start(answer)
    fleet.tell_starts()
    assert len(fleet.replica) == 40
    fleet.start(first[39])
    fleet.tell_starts()
    assert len(fleet.replica) == 50


def test_a_replica_that_is_ready_first_does_not_take_what_others_will_have_room_for():
    fleet = Fleet(["a", "b"], lanes=40)
    fleet.grant = lambda answer, replica: fleet.replica.update({answer: replica})  # none starts
    fleet.submit(groups(60))
    for answer in [one for one, replica in fleet.replica.items() if replica == "a"]:
        fleet.start(answer)
    fleet.tell_starts()
    assert sorted(fleet.replica.values()) == ["a"] * 41 + ["b"] * 40
    for answer in [one for one, replica in fleet.replica.items() if replica == "b"]:
        fleet.start(answer)
    fleet.tell_starts()
    assert sorted(fleet.replica.values()) == ["a"] * 50 + ["b"] * 50


def test_an_answer_that_prepares_for_long_does_not_keep_a_lane():
    fleet = Fleet(["a"], lanes=2)
    fleet.grant = lambda answer, replica: fleet.replica.update({answer: replica})  # none starts
    fleet.submit(groups(2, samples=1))
    first = set(fleet.replica)
    assert len(first) == 2
    fleet.submit(groups(2, samples=1, step=2))
    assert set(fleet.replica) == first
    fleet.now = 2 * KEEP_SECONDS
    fleet.lanes.expire(fleet.now)
    assert len(fleet.replica) == 4
    for answer in sorted(fleet.replica):
        fleet.start(answer)
    fleet.tell_starts()
    for answer in sorted(fleet.running):
        fleet.end(answer)
    assert fleet.lanes.held == fleet.lanes.waiting == 0


def test_a_later_turn_goes_to_the_replica_of_the_one_before():
    fleet = Fleet(lanes=1)
    fleet.submit(groups(3, samples=2))
    answer, replica = next(iter(fleet.running.items()))
    fleet.abort([answer])
    fleet.now = 2 * KEEP_SECONDS
    before = len(fleet.running)
    fleet.lanes.expire(fleet.now)
    fleet.tell_starts()
    assert len(fleet.running) == before + 1, "the lane went to another answer meanwhile"
    fleet.resume()
    assert fleet.running[answer] == replica


def test_an_answer_keeps_its_lane_until_the_last_of_its_parallel_requests_has_ended():
    fleet = Fleet(["a"], lanes=1)
    fleet.submit(groups(3, samples=1))
    answer, other = fleet.running
    replica = fleet.lanes.replicas["a"]
    fleet.scheduler.start(answer, fleet.now)
    assert (replica.running, replica.lanes, fleet.lanes.waiting) == (3, 2, 1)
    fleet.lanes.stop(answer, fleet.now)
    fleet.now = 2 * KEEP_SECONDS
    fleet.lanes.expire(fleet.now)
    assert (replica.running, replica.lanes, fleet.lanes.waiting) == (2, 2, 1)
    fleet.lanes.stop(answer, fleet.now)
    fleet.now = 4 * KEEP_SECONDS
    fleet.lanes.expire(fleet.now)
    fleet.tell_starts()
    assert (replica.running, replica.lanes, fleet.lanes.waiting) == (2, 2, 0), "the third answer runs instead"


def test_an_answer_that_ends_ends_all_its_requests():
    fleet = Fleet(["a"], lanes=2)
    fleet.submit(groups(1, samples=1))
    (answer,) = fleet.running
    fleet.scheduler.start(answer, fleet.now)
    assert len(fleet.scheduler.finish(Finished(answer, 10), fleet.now)) == 1, "they ran at the same time"
    assert fleet.lanes.replicas["a"].running == fleet.lanes.held == 0


def test_an_aborted_answer_keeps_its_lane_until_verl_has_had_time_to_resume_it():
    fleet = Fleet(["a"], lanes=1)
    fleet.submit(groups(2, samples=2))
    running = len(fleet.running)
    fleet.abort([next(iter(fleet.running))])
    fleet.now = 0.9 * KEEP_SECONDS
    fleet.lanes.expire(fleet.now)
    fleet.tell_starts()
    assert len(fleet.running) == running - 1


def test_long_prompts_are_learnt_and_start_first():
    fleet = Fleet()
    for step in range(1, 4):
        fleet.submit(groups(20, step=step))
        while fleet.running:
            fleet.now += 10.0
            answer = next(iter(fleet.running))
            fleet.end(answer, tokens=90 if int(answer[0].split("-")[1]) % 5 == 0 else 10)
    fleet.submit(groups(20, step=4))
    first = list(fleet.running)[:8]
    assert {int(uid.split("-")[1]) for uid, _ in first} == {0, 5, 10, 15}
    assert LANES < max(fleet.loads().values()) < 20, "the others wait"


def test_the_log_has_a_line_for_each_time_that_an_answer_ran():
    fleet = Fleet(["a"], lanes=8)
    fleet.submit(groups(4))
    fleet.now = 10.0
    interrupted = next(iter(fleet.running))
    fleet.abort([interrupted])
    fleet.now = 1000.0  # the replicas sleep meanwhile
    fleet.resume()
    fleet.now = 1004.0
    lines = fleet.end(interrupted, tokens=100)
    assert [(line["start"], line["end"], line.get("tokens")) for line in lines] == [(0, 10, None), (1000, 1004, 100)]
    (line,) = fleet.end(next(iter(fleet.running)), tokens=100)
    assert (line["replica"], line["start"], line["end"], line["tokens"]) == ("a", 0.0, 1004.0, 100)


def test_a_call_grants_a_bounded_number_of_lanes(monkeypatch):
    """All other calls of the router wait meanwhile; the next report, or tick, goes on."""
    monkeypatch.setattr(lanes, "MAX_PER_CALL", 3)
    dealt = Fleet([], lanes=4).lanes
    for index in range(8):
        dealt.add((f"g{index}", 0), 0, 1.0)
    dealt.add_replicas(["a", "b"], 0.0)
    assert dealt.held == 3
    dealt.deal(0.0)
    dealt.deal(0.0)
    assert dealt.held == 8
    dealt.expire(KEEP_SECONDS + 1.0)
    assert dealt.held == 5
    dealt.expire(KEEP_SECONDS + 1.0)
    dealt.expire(KEEP_SECONDS + 1.0)
    assert dealt.held == 0
