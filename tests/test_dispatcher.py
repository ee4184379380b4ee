"""The dispatcher loses nothing, runs nothing twice and never overfills a replica, whatever comes and goes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rhyme_verl.histopipe.dispatcher import AHEAD_SECONDS, KEEP_SECONDS, MAX_AHEAD, Dispatcher, Group
from rhyme_verl.histopipe.intake import GATHER_SECONDS, Intake
from rhyme_verl.histopipe.lengths import LengthPredictor
from rhyme_verl.histopipe.lengths_file import LATEST, load_lengths, save_lengths
from rhyme_verl.histopipe.meter import FleetMeter
from rhyme_verl.histopipe.step_cost import StepCost

LANES = 4


def groups(num, samples=2, step=1, prefix="p"):
    return [Group(f"{prefix}{step}-{index}", index, samples, step) for index in range(num)]


class Fleet:
    """Replicas of a test: every trajectory asks at once, and answers end when the test says so."""

    def __init__(self, replicas, lanes=LANES, max_tokens=100):
        self.dispatcher = Dispatcher(max_running=lanes, max_tokens=max_tokens)
        self.dispatcher.add_replicas(replicas, 0.0)
        self.now = 0.0
        self.running = {}  # trajectory -> replica
        self.waiting = set()
        self.stranded = []  # nowhere to go
        self.ended = []

    def open(self, batch, planned=True):
        self.waiting.update((group.uid, sample) for group in batch for sample in range(group.samples))
        self.take(self.dispatcher.open(batch, planned=planned, now=self.now))

    def take(self, bound):
        for trajectory in bound:
            self.waiting.remove(trajectory)
            self.ask(trajectory)

    def ask(self, trajectory):
        assert trajectory not in self.running and trajectory not in self.waiting
        if self.dispatcher.replicas:
            self.running[trajectory] = self.dispatcher.ask(trajectory, self.now)
        else:
            self.stranded.append(trajectory)

    def add(self, replica):
        self.take(self.dispatcher.add_replicas([replica], self.now))
        for trajectory in self.stranded:
            self.running[trajectory] = self.dispatcher.ask(trajectory, self.now)
        self.stranded = []

    def end(self, trajectory, tokens=10):
        replica = self.running.pop(trajectory)
        self.dispatcher.release(trajectory, replica, self.now)
        bound, finished, report = self.dispatcher.finish(trajectory, tokens, False, self.now)
        self.ended.append(trajectory)
        self.take(bound)
        return finished, report

    def remove(self, replica):
        """The replica dies; its clients ask again."""
        orphans = [one for one, where in self.running.items() if where == replica]
        for trajectory in orphans:
            del self.running[trajectory]
        self.take(self.dispatcher.remove_replicas([replica], self.now))
        for trajectory in orphans:
            self.ask(trajectory)

    def loads(self):
        return {name: sum(where == name for where in self.running.values()) for name in self.dispatcher.replicas}


def test_answers_wait_until_a_replica_has_room_and_all_of_them_run_once():
    fleet = Fleet(["a", "b"])
    fleet.open(groups(10))
    reports = []
    while fleet.running:
        assert max(fleet.loads().values()) <= LANES
        fleet.now += 1.0
        reports.append(fleet.end(next(iter(fleet.running)))[1])
    assert sorted(fleet.ended) == sorted((group.uid, sample) for group in groups(10) for sample in range(2))
    assert fleet.dispatcher.waiting == 0
    assert [report is not None for report in reports] == [False] * 19 + [True]
    assert reports[-1].answers == 20 and reports[-1].tokens == 200
    assert reports[-1].seconds == 20.0
    assert 0.0 < reports[-1].bubble < 1.0


@settings(deadline=None)
@given(data=st.data(), planned=st.booleans())
def test_nothing_is_lost_or_run_twice_when_replicas_die_join_and_are_slow(data, planned):
    fleet = Fleet(["r0", "r1", "r2"])
    wanted, names, step = [], 3, 0
    for _ in range(data.draw(st.integers(5, 40))):
        fleet.now += data.draw(st.floats(0.01, 5.0))
        action = data.draw(st.sampled_from(["open", "end", "end", "end", "remove", "add", "abort", "fail", "tick"]))
        if action == "open":
            step += 1
            batch = groups(data.draw(st.integers(1, 6)), data.draw(st.integers(1, 3)), step)
            wanted += [(group.uid, sample) for group in batch for sample in range(group.samples)]
            fleet.open(batch, planned)
        elif action == "end" and fleet.running:
            fleet.end(data.draw(st.sampled_from(sorted(fleet.running))))
        elif action == "remove" and fleet.dispatcher.replicas:
            fleet.remove(data.draw(st.sampled_from(fleet.dispatcher.replicas)))
        elif action == "add":
            fleet.add(f"r{names}")
            names += 1
        elif action == "abort" and fleet.running:  # all requests of a replica end unfinished and are resumed
            replica = fleet.running[data.draw(st.sampled_from(sorted(fleet.running)))]
            aborted = [one for one, where in fleet.running.items() if where == replica]
            for one in aborted:
                del fleet.running[one]
                fleet.dispatcher.release(one, replica, fleet.now)
            fleet.now += data.draw(st.sampled_from([0.1, 2 * KEEP_SECONDS]))
            fleet.take(fleet.dispatcher.expire(fleet.now))
            for one in aborted:
                fleet.ask(one)
        elif action == "fail" and fleet.waiting:
            one = data.draw(st.sampled_from(sorted(fleet.waiting)))
            fleet.waiting.discard(one)
            fleet.take(fleet.dispatcher.finish(one, None, False, fleet.now)[0])
            fleet.ended.append(one)
        elif action == "tick":
            fleet.take(fleet.dispatcher.expire(fleet.now))
    fleet.add("last")
    while fleet.running or fleet.waiting:
        assert fleet.running, "something waits although every replica is free"
        fleet.now += 1.0
        fleet.end(sorted(fleet.running)[0])
    assert sorted(fleet.ended) == sorted(wanted)
    assert fleet.dispatcher.waiting == 0
    assert all(fleet.dispatcher.requests_at(name) == 0 for name in fleet.dispatcher.replicas)


def test_no_more_run_than_a_replicas_cache_holds():
    fleet = Fleet(["a", "b"], lanes=64, max_tokens=100)
    fleet.dispatcher.cache_tokens = 100
    fleet.open(groups(20))  # nothing is known: 25 tokens are expected, a longish one of 36
    assert set(fleet.loads().values()) == {2}
    while fleet.running:
        trajectory = next(iter(fleet.running))
        replica = fleet.running.pop(trajectory)
        fleet.dispatcher.release(trajectory, replica, fleet.now)
        fleet.take(fleet.dispatcher.finish(trajectory, 10, False, fleet.now, prompt_tokens=100)[0])
    fleet.open(groups(20, step=2))  # now answers are known to be short, but prompts are not
    assert set(fleet.loads().values()) == {2}


def test_as_many_more_are_bound_as_are_on_their_way():
    fleet = Fleet(["a", "b"], lanes=8)
    fleet.open(groups(40))
    assert set(fleet.loads().values()) == {8}
    for _ in range(20):
        fleet.dispatcher.observe_transit(3.0)
    while fleet.dispatcher.waiting > 8:
        fleet.end(next(iter(fleet.running)))
        assert max(fleet.loads().values()) <= 11
    assert max(fleet.loads().values()) == 11
    for _ in range(100):
        fleet.dispatcher.observe_transit(1000.0)
    fleet.open(groups(40, step=2), planned=False)
    for _ in range(10):
        fleet.end(next(iter(fleet.running)))
    assert max(fleet.loads().values()) <= 8 * (1 + MAX_AHEAD)


def test_a_replica_gets_more_while_what_is_bound_to_it_does_not_come():
    dispatcher = Dispatcher(max_running=8, max_tokens=100)
    dispatcher.add_replicas(["a", "b"], 0.0)
    late = dispatcher.open(groups(40), planned=True, now=0.0)
    assert len(late) == 16
    more = dispatcher.top_up(0.1)
    assert len(more) == 16, "as many as are late"
    assert not set(more) & set(late)
    for trajectory in late + more:
        dispatcher.ask(trajectory, 0.2)
    assert dispatcher.top_up(0.3) == []
    replica = dispatcher.replica_of(late[0])
    for trajectory in [one for one in late + more if dispatcher.replica_of(one) == replica][:7]:
        dispatcher.release(trajectory, replica, 1.0)
        bound, _, _ = dispatcher.finish(trajectory, 10, False, 1.0)
        assert bound == [], "what is there beyond its places comes first"


def test_a_replica_always_has_work_for_the_next_seconds():
    fleet = Fleet(["a", "b"], lanes=8)
    fleet.open(groups(40))
    while fleet.running:  # 80 answers
        fleet.now += 0.25
        fleet.end(next(iter(fleet.running)))
    fleet.open(groups(40, step=2), planned=False)
    assert set(fleet.loads().values()) == {8 + round(80 / fleet.now / 2 * AHEAD_SECONDS)} == {14}
    while fleet.dispatcher.waiting:
        fleet.end(next(one for one, where in fleet.running.items() if where == "a"))
    assert fleet.loads()["a"] <= 9 and fleet.loads()["b"] == 14, "the last ones are not taken ahead"


def test_not_all_is_bound_if_nothing_comes():
    dispatcher = Dispatcher(max_running=8, max_tokens=100)
    dispatcher.add_replicas(["a", "b"], 0.0)
    bound = dispatcher.open(groups(60), planned=True, now=0.0)
    for tick in range(40):
        bound += dispatcher.top_up(0.1 * tick)
    assert len(bound) == len(set(bound)) == 2 * 8 * (1 + MAX_AHEAD) < 120


def test_what_comes_to_a_full_replica_goes_where_room_is():
    dispatcher = Dispatcher(max_running=4, max_tokens=100)
    dispatcher.add_replicas(["a", "b"], 0.0)
    bound = dispatcher.open(groups(6), planned=True, now=0.0)
    for tick in range(10):
        bound += dispatcher.top_up(0.1 * tick)
    there = [one for one in bound if dispatcher.replica_of(one) == "a"]
    assert len(bound) == 12 and len(there) == 8
    assert [dispatcher.ask(one, 1.0) for one in there] == ["a"] * 4 + ["b"] * 2 + ["a"] * 2, "until both have as many"
    assert {dispatcher.ask(one, 1.0) for one in bound if one not in there} == {"b"}
    assert dispatcher.requests_at("a") + dispatcher.requests_at("b") == 12


def test_a_later_turn_goes_to_the_replica_of_the_one_before_without_waiting():
    fleet = Fleet(["a", "b"], lanes=1)
    fleet.open(groups(2, samples=2))
    trajectory, replica = next(iter(fleet.running.items()))
    fleet.dispatcher.release(trajectory, replica, 1.0)
    assert fleet.dispatcher.ask(trajectory, 1.5) == replica
    fleet.dispatcher.release(trajectory, replica, 2.0)
    fleet.now = 2.0 + 2 * KEEP_SECONDS
    bound = fleet.dispatcher.expire(fleet.now)
    assert len(bound) == 1  # the lane went to another answer meanwhile
    assert fleet.dispatcher.ask(trajectory, fleet.now) == replica


def test_an_aborted_answer_keeps_its_lane_until_verl_has_had_time_to_resume_it():
    fleet = Fleet(["a"], lanes=1)
    fleet.open(groups(1, samples=2))
    (trajectory,) = fleet.running
    fleet.dispatcher.release(trajectory, "a", 1.0)
    assert fleet.dispatcher.expire(1.0 + 0.9 * KEEP_SECONDS) == []


def test_requests_of_no_known_trajectory_go_where_the_fewest_are():
    dispatcher = Dispatcher(max_running=2, max_tokens=10)
    with pytest.raises(RuntimeError, match="No available servers in load balancer"):
        dispatcher.least_loaded()
    dispatcher.add_replicas(["a", "b"], 0.0)
    taken = []
    for _ in range(6):
        taken.append(dispatcher.least_loaded())
        dispatcher.start_other(taken[-1])
    assert sorted(taken) == ["a"] * 3 + ["b"] * 3
    dispatcher.release(None, "b", 1.0)
    assert dispatcher.least_loaded() == "b"


def test_long_prompts_are_learnt_and_start_first():
    fleet = Fleet(["a", "b"])
    for step in range(1, 4):
        fleet.open([Group(f"{step}-{index}", index, 2, step) for index in range(20)])
        for _ in range(40):
            fleet.now += 10.0
            trajectory = next(iter(fleet.running))
            index = int(trajectory[0].split("-")[1])
            fleet.end(trajectory, tokens=90 if index % 5 == 0 else 10)
    fleet.open([Group(f"4-{index}", index, 2, 4) for index in range(20)])
    first = {int(uid.split("-")[1]) for uid, _ in fleet.running}
    assert {0, 5, 10, 15} & first and len(fleet.running) == 2 * LANES
    long_first = [one for one in fleet.running if int(one[0].split("-")[1]) % 5 == 0]
    assert len(long_first) == 8


def test_an_answer_that_far_outlives_its_prediction_is_moved_where_less_runs():
    fleet = Fleet(["a", "b"], lanes=8, max_tokens=10_000)
    rng = np.random.default_rng(0)
    for step in range(1, 4):  # all answers have about 20 tokens, and a step of a replica that is full takes seconds
        fleet.open(groups(8, samples=2, step=step))
        for trajectory in list(fleet.running):
            fleet.now += 1.0
            fleet.end(trajectory, tokens=int(rng.integers(18, 22)))
    fleet.open(groups(8, samples=2, step=9))
    stay, leave = "a", "b"
    for trajectory in [one for one, where in fleet.running.items() if where == leave]:
        fleet.end(trajectory, tokens=20)
    assert fleet.dispatcher.outliers(1e-5, fleet.now + 1.0) == []
    fleet.now += 1000.0
    moved = fleet.dispatcher.outliers(1e-5, fleet.now)
    assert 0 < len(moved) < 8
    assert fleet.dispatcher.outliers(1e-5, fleet.now) == [], "each is moved once"
    for trajectory in moved:
        fleet.dispatcher.release(trajectory, stay, fleet.now)
        assert fleet.dispatcher.ask(trajectory, fleet.now) == leave
        fleet.running[trajectory] = leave
    assert fleet.dispatcher.migrations == len(moved)
    while fleet.running:
        fleet.end(next(iter(fleet.running)))


def test_an_answer_whose_new_replica_leaves_stays_or_goes_elsewhere():
    for leaving in ("a", "b", "c"):
        fleet = Fleet(["a", "b", "c"], max_tokens=4000)
        for step in range(1, 4):
            fleet.open(groups(3, samples=4, step=step))
            while fleet.running:
                fleet.now += 0.1
                fleet.end(next(iter(fleet.running)))
        fleet.open(groups(3, samples=4, step=9))
        last = [one for one in fleet.running if fleet.running[one] == "a"]
        for trajectory in [one for one in fleet.running if one not in last]:
            fleet.end(trajectory)
        fleet.now += 1000.0
        chosen = fleet.dispatcher.outliers(1e-6, fleet.now)
        assert chosen
        fleet.remove(leaving)
        fleet.dispatcher.outliers(1e-6, fleet.now)
        for trajectory in chosen:  # aborted, they come again
            if trajectory in fleet.running:
                fleet.dispatcher.release(trajectory, fleet.running.pop(trajectory), fleet.now)
                fleet.ask(trajectory)
        moved = fleet.dispatcher.migrations
        fleet.dispatcher.outliers(1e-6, fleet.now)
        while fleet.running:
            fleet.end(next(iter(fleet.running)))
        assert len(fleet.ended) == len(set(fleet.ended)) == 48
        assert fleet.dispatcher.migrations == moved <= len(chosen)


def test_a_replica_that_comes_back_under_its_name_has_its_own_lanes_alone():
    fleet = Fleet(["a", "b"])
    fleet.open(groups(8), planned=False)
    gone = [one for one in fleet.running if fleet.running[one] == "a"][0]
    fleet.dispatcher.release(gone, fleet.running.pop(gone), fleet.now)  # a tool works
    fleet.remove("a")
    fleet.add("a")
    fleet.ask(gone)
    while fleet.running:
        assert all(load <= 2 * LANES for load in fleet.loads().values())
        fleet.end(next(iter(fleet.running)))
    assert len(fleet.ended) == 16


def test_a_failing_planner_is_said_and_answers_are_generated_all_the_same(caplog):
    fleet = Fleet(["a", "b"])
    fleet.dispatcher.meter.fleet = None  # whatever the reason
    fleet.open(groups(6))
    while fleet.running:
        fleet.end(next(iter(fleet.running)))
    assert len(fleet.ended) == 12
    assert sum("HistoPipe could not plan" in record.message for record in caplog.records) == 1


def test_the_meter_finds_step_cost_and_speeds():
    true = StepCost.affine(4e-3, 2e-4, 32)
    meter = FleetMeter(32)
    rng = np.random.default_rng(0)
    for _ in range(3000):
        running, tokens = rng.uniform(1, 32), int(rng.integers(20, 200))
        noise = rng.lognormal(0.0, 0.1)
        meter.observe("fast", tokens, tokens * float(true.at(running)) * noise, running)
        meter.observe("slow", tokens, 2 * tokens * float(true.at(running)) * noise, running)
    fleet = meter.fleet(["fast", "slow", "new"], 32)
    assert fleet.speeds[0] / fleet.speeds[1] == pytest.approx(2.0, rel=0.1)
    assert fleet.speeds[2] == 1.0
    cost = fleet.cost.seconds
    assert cost[32] / cost[1] == pytest.approx(true.seconds[32] / true.seconds[1], rel=0.15)


def test_pairs_open_together_are_held_back_together_and_the_next_waits_until_it_is_needed():
    intake = Intake("pairs", batch_size=4, prefetched=1)
    first, second, third, fourth = (groups(4, step=step) for step in range(1, 5))
    assert intake.submit(first, available=0, now=0.0) is None  # the trainer's warm-up batch
    unit = intake.submit(second, available=0, now=0.1)
    assert unit is not None and [g.uid for g in unit.groups] == [g.uid for g in first + second]
    assert all(intake.is_held(group.uid) for group in unit.groups)
    ends = [intake.finish(group.uid) for group in unit.groups]
    assert ends[:-1] == [None] * 7 and ends[-1] is unit
    assert intake.submit(third, available=4, now=1.0) is None  # the trainer has taken one batch and takes the other
    assert intake.gathered(100.0) is None
    unit = intake.submit(fourth, available=0, now=101.0)
    assert unit is not None and len(unit.groups) == 8


def test_refills_of_a_waiting_trainer_are_opened_after_a_moment():
    intake = Intake("pairs", batch_size=4, prefetched=1)
    intake.submit(groups(4, step=1), available=0, now=0.0)
    unit = intake.submit(groups(4, step=2), available=0, now=0.0)
    assert intake.submit(groups(2, step=3), available=0, now=0.5) is None
    for group in unit.groups:
        intake.finish(group.uid)
    assert intake.gathered(10.0) is None  # the trainer has enough
    assert intake.submit(groups(1, step=4), available=3, now=11.0) is None  # but it threw five of them away
    assert intake.gathered(11.0 + 0.9 * GATHER_SECONDS) is None
    refill = intake.gathered(11.0 + 1.1 * GATHER_SECONDS)
    assert refill is not None and len(refill.groups) == 3


def test_a_prompt_that_fails_while_it_waits_is_not_opened():
    intake = Intake("pairs", batch_size=4, prefetched=1)
    intake.submit(groups(4, step=1), available=0, now=0.0)
    first = intake.submit(groups(4, step=2), available=0, now=0.0)
    later = groups(4, step=3)
    intake.submit(later, available=0, now=1.0)
    assert intake.is_waiting(later[0].uid) and intake.finish(later[0].uid) is None
    for group in first.groups:
        intake.finish(group.uid)
    intake.submit(groups(1, step=4), available=0, now=2.0)  # verl's refill
    second = intake.submit(groups(4, step=5), available=0, now=3.0)
    assert len(second.groups) == 8 and later[0] not in second.groups
    assert [intake.finish(group.uid) for group in second.groups][-1] is second


def test_without_prefetched_batches_there_is_nothing_to_pair():
    intake = Intake("pairs", batch_size=4, prefetched=0)
    assert len(intake.submit(groups(4), available=0, now=0.0).groups) == 4


def test_lengths_survive_a_restart_and_a_damaged_file_is_ignored(tmp_path, caplog):
    predictor = LengthPredictor()
    prompts = np.repeat(np.arange(5, dtype=np.uint64), 4)
    predictor.observe(prompts, 10.0 * (prompts + 1.0), np.zeros(20, dtype=bool), 3)
    assert save_lengths(tmp_path, predictor, -1) == -1  # verl has saved nothing
    (tmp_path / LATEST).write_text("3")
    assert save_lengths(tmp_path, predictor, -1) == 3
    restored = LengthPredictor()
    assert load_lengths(tmp_path / "global_step_3", restored)
    keys = np.arange(7, dtype=np.uint64)
    for mine, theirs in zip(vars(restored.predict(keys)).values(), vars(predictor.predict(keys)).values(), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    file = tmp_path / "global_step_3/rhyme_history/lengths.npz"
    file.write_bytes(file.read_bytes()[:-100])
    fresh = LengthPredictor()
    assert not load_lengths(tmp_path / "global_step_3", fresh) and len(fresh) == 0
    assert "lengths.npz cannot be used" in caplog.text
