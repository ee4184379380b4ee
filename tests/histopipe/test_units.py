"""Units publish by count, carry the slowest groups over, and never let an answer become older than promised."""

import math
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rhyme_verl.histopipe.messages import Group
from rhyme_verl.histopipe.units import Units, UnitShape, default_shape

BATCH = 4


def chance(salt, uid):
    return zlib.crc32(f"{salt} {uid}".encode()) / 2**32


class Trainer:
    """verl's trainer: submits a batch per step, takes the groups of the earliest submission first, filters some."""

    def __init__(self, units, warmup, is_filtered=lambda uid: False, batch=BATCH):
        self.units, self.batch, self.is_filtered = units, batch, is_filtered
        self.step = 1
        self.num_submitted = 0
        self.births, self.steps = {}, {}  # by uid
        self.running, self.visible = [], []
        self.trained, self.failed, self.filtered = [], [], []
        self.ages = []
        self.releases = []
        self.submit(warmup * batch)
        self.submit(batch)
        self.take()

    def submit(self, num):
        groups = [Group(f"g{self.num_submitted + index:04}", index, 1, self.step) for index in range(num)]
        self.num_submitted += num
        self.steps.update((group.uid, self.step) for group in groups)
        self.apply(self.units.submit(groups, len(self.visible)))

    def apply(self, changes):
        for group in changes.opened:
            self.running.append(group.uid)
            self.births[group.uid] = self.step
            self.units.start(group.uid)
        self.visible += changes.published
        if changes.released:
            held = len(changes.published) + len(self.units._withheld)
            self.releases.append((self.step, held, list(self.running)))

    def end(self, uid, failed=False):
        self.running.remove(uid)
        if failed:
            self.failed.append(uid)
        self.apply(self.units.end(uid, failed))
        self.take()

    def take(self):
        while True:
            gone = [uid for uid in self.visible if uid in self.failed or self.is_filtered(uid)]
            if gone:
                self.visible = [uid for uid in self.visible if uid not in gone]
                self.filtered += gone
                self.submit(len(gone))
                continue
            if len(self.visible) < self.batch:
                return
            self.visible.sort(key=lambda uid: (self.steps[uid], -int(uid[1:])))  # the worst of all orders
            taken, self.visible = self.visible[: self.batch], self.visible[self.batch :]
            self.visible += self.units.publish_more(len(self.visible)).published
            self.ages += [self.step - self.births[uid] for uid in taken]
            self.trained += taken
            self.step += 1
            self.submit(self.batch)


@settings(deadline=None, max_examples=300)
@given(data=st.data(), max_age=st.integers(0, 4), filtered=st.sampled_from([0.0, 0.0, 0.1, 0.5]))
def test_no_answer_is_older_than_promised_and_no_group_is_lost_or_trained_twice(data, max_age, filtered):
    shapes = [default_shape(max_age, BATCH), UnitShape(max_age + 1, 0)]
    if max_age > 1:
        shapes += [UnitShape(batches, carried) for batches in range(1, max_age + 1) for carried in range(BATCH + 1)]
    warmup = max_age + data.draw(st.integers(0, 2))
    salt = data.draw(st.integers(0, 1000))
    units = Units(BATCH, max_age, data.draw(st.sampled_from(shapes)))
    trainer = Trainer(units, warmup, lambda uid: chance(salt, uid) < filtered, batch=BATCH)
    slow = set()
    for _ in range(data.draw(st.integers(20, 150))):
        assert trainer.running, "the trainer waits, and nothing runs"
        quick = [uid for uid in trainer.running if uid not in slow] or trainer.running
        uid = data.draw(st.sampled_from(quick))
        if data.draw(st.integers(0, 9)) == 0:
            slow.add(uid)
        else:
            trainer.end(uid, failed=data.draw(st.integers(0, 19)) == 0)
    assert max(trainer.ages, default=0) <= max_age
    assert len(set(trainer.trained)) == len(trainer.trained)
    everything = set(trainer.trained) | set(trainer.filtered) | set(trainer.running) | set(trainer.visible)
    left = trainer.units.waiting + len(trainer.units._finished) + len(trainer.units._withheld)
    assert len(everything) + left == trainer.num_submitted


def test_exactly_two_batches_are_published_while_the_slowest_group_goes_on():
    trainer = Trainer(Units(BATCH, 2, UnitShape(2, 1)), warmup=2)
    assert len(trainer.running) == 9
    slowest = trainer.running[3]
    for uid in [uid for uid in trainer.running if uid != slowest]:
        assert trainer.trained == []
        trainer.end(uid)
    assert trainer.releases == [(1, 8, [slowest])]
    assert trainer.step == 3 and len(trainer.trained) == 8, "two steps at once"
    assert len(trainer.running) == 9 and slowest in trainer.running
    for uid in [uid for uid in trainer.running if uid != slowest]:
        trainer.end(uid)
    assert len(trainer.trained) == 8, "it would be too old if the unit were released without it"
    trainer.end(slowest)
    assert len(trainer.trained) == 16 and max(trainer.ages) == 2


def test_with_max_age_1_nothing_is_carried():
    trainer = Trainer(Units(BATCH, 1, default_shape(1, BATCH)), warmup=1)
    for _ in range(40):
        trainer.end(trainer.running[0])
    assert all(running == [] for _, _, running in trainer.releases)
    assert {published for _, published, _ in trainer.releases} == {2 * BATCH}
    assert set(trainer.ages) == {0, 1}


def test_groups_that_the_trainer_filters_during_a_unit_are_replaced_within_it():
    units = Units(BATCH, 2, UnitShape(1, 0))
    first = units.submit([Group(f"{index}", index, 1, 1) for index in range(8)], 0).opened
    published = [uid for group in first for uid in units.end(group.uid, failed=False).published]
    assert len(published) == BATCH
    more = units.submit([Group("8", 8, 1, 1)], BATCH - 1).opened
    more += units.submit([Group("9", 9, 1, 1)], BATCH - 2).opened
    assert len(more) == 2, "else the trainer would wait for a batch, and nothing would run"
    assert units.end(more[0].uid, failed=False).published == []
    assert len(units.end(more[1].uid, failed=False).published) == 2


def test_the_last_unit_is_no_larger_than_the_job_needs():
    units = Units(BATCH, 1, default_shape(1, BATCH), total_steps=3)
    trainer = Trainer(units, warmup=1)
    for _ in range(8):
        trainer.end(trainer.running[0])
    assert trainer.step == 3 and len(trainer.running) == BATCH, "one step is left"


def test_the_last_unit_opens_no_groups_to_carry_over():
    units = Units(BATCH, 2, UnitShape(1, 2), total_steps=1)
    batch = [Group(f"g{index}", index, 1, 1) for index in range(3 * BATCH)]
    opened = [group.uid for group in units.submit(batch, 0).opened]
    assert len(opened) == BATCH
    for uid in opened[:-1]:
        assert not units.end(uid, failed=False).opened


def test_a_failed_group_is_published_at_once_and_replaced():
    trainer = Trainer(Units(BATCH, 2, UnitShape(2, 1)), warmup=2)
    first = trainer.running[0]
    trainer.end(first, failed=True)
    assert trainer.filtered == [first] and len(trainer.running) == 9


def test_groups_that_end_before_they_are_opened_are_forgotten():
    units = Units(BATCH, 0, UnitShape(1, 0))
    batch = [Group(f"g{index}", index, 1, 1) for index in range(2 * BATCH)]
    opened = [group.uid for group in units.submit(batch, 0).opened]
    assert opened == [group.uid for group in batch[:BATCH]]
    assert units.end("g7", failed=True).published == ["g7"]
    assert units.waiting == BATCH - 1


def test_when_nothing_more_can_come_what_is_finished_is_published():
    units = Units(BATCH, 2, UnitShape(2, 1))
    batch = [Group(f"g{index}", index, 1, 1) for index in range(9)]
    assert len(units.submit(batch, 0).opened) == 9
    published = []
    for index in range(9):  # a dead worker's groups fail, the others finish
        published += units.end(f"g{index}", failed=index >= 5).published
    published += units.publish_more(0).published
    assert sorted(published) == [f"g{index}" for index in range(9)]


@pytest.mark.parametrize("filtered", [0.1, 0.3, 0.5])
def test_with_dynamic_sampling_a_unit_still_feeds_two_steps(filtered):
    batch = 64
    units = Units(batch, 2, UnitShape(2, batch // 4))
    trainer = Trainer(units, 2, lambda uid: chance(0, uid) < filtered, batch=batch)
    while trainer.step < 40:
        trainer.end(trainer.running[0])
    late = [one for one in trainer.releases if one[0] > 10]
    steps_per_unit = (trainer.step - 11) / len(late)
    assert steps_per_unit > 0.9 * 2.0 * (1.0 - filtered), "as many as the groups that are left make"
    assert max(trainer.ages) <= 2


def test_without_units_groups_are_opened_and_published_at_once():
    units = Units(BATCH, 0, None)
    batch = [Group(f"g{index}", index, 1, 1) for index in range(3)]
    assert units.submit(batch, 0).opened == batch
    assert units.end("g1", failed=False).published == ["g1"]


@pytest.mark.parametrize("max_age, shape", [(0, (1, 0)), (1, (2, 0)), (2, (2, 16)), (3, (3, 16))])
def test_the_default_shape_respects_the_age(max_age, shape):
    found = default_shape(max_age, 32)
    assert (found.batches, found.carried) == shape
    assert found.batches - 1 + math.ceil(found.carried / 32) <= max_age
