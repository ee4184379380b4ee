"""Pairs or a stream: the trial keeps what is faster, and a trainer gets its batches whichever is tried."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rhyme_verl.histopipe.dispatcher import Group
from rhyme_verl.histopipe.intake import GATHER_SECONDS, Intake
from rhyme_verl.histopipe.trial import BATCHES, MARGIN, REPEAT_ROUNDS, TURNS, Trial

BATCH = 4
ROUNDS = [way for way in TURNS for _ in range(2)]  # each way settles for a round first


def play(trial, rounds, rate, refills=lambda way: 0):
    """Send batches, two in a round, and let answers end; `rate(way, round)` is in tokens per second."""
    ways, now = [], 0.0
    trial.begin(BATCH, now)
    for index in range(rounds):
        ways.append(way := trial.begin(BATCH, now))
        trial.begin(BATCH, now)
        trial.begin(refills(way), now)
        trial.add(int(1000 * rate(way, index)))
        now += 1000.0
    trial.begin(BATCH, now)
    return ways


@pytest.mark.parametrize(
    ("gain", "kept"), [(0.5, "pairs"), (1.0 + MARGIN / 2, "pairs"), (1.0 + 2 * MARGIN, "stream"), (3.0, "stream")]
)
def test_a_stream_is_kept_only_if_it_is_clearly_faster(gain, kept):
    trial = Trial(BATCH)
    assert trial.num_steps == BATCHES * len(ROUNDS)
    assert play(trial, len(ROUNDS), lambda way, _: 100.0 * (gain if way == "stream" else 1.0)) == ROUNDS
    assert trial.outcome.kept == kept == trial.begin(BATCH, 1e9)
    assert trial.outcome.gain == pytest.approx(gain, rel=1e-3)


@pytest.mark.parametrize("drift", [-0.03, 0.1])
def test_what_changes_steadily_favours_neither_way(drift):
    trial = Trial(BATCH)
    play(trial, len(ROUNDS), lambda way, index: 1000.0 * (1.0 + drift * index))
    assert trial.outcome.gain == pytest.approx(1.0, abs=0.02)


@pytest.mark.parametrize("epoch", range(1, len(ROUNDS)))
def test_a_jump_at_a_new_epoch_decides_nothing(epoch):
    trial = Trial(BATCH)
    play(trial, len(ROUNDS), lambda way, index: 100.0 if index < epoch else 150.0)
    assert trial.outcome.gain == pytest.approx(1.0)


def test_a_round_that_something_held_up_decides_nothing():
    trial = Trial(BATCH)
    play(trial, len(ROUNDS), lambda way, index: 10.0 if index == 5 else 100.0)
    assert trial.outcome.gain == pytest.approx(1.0)


def test_work_that_the_trainer_throws_away_is_not_counted():
    trial = Trial(BATCH)
    play(trial, len(ROUNDS), lambda *_: 100.0, refills=lambda way: 2 if way == "stream" else 0)
    assert trial.outcome.gain == pytest.approx(0.8)


def test_it_is_tried_again_as_lengths_change():
    trial = Trial(BATCH)
    ways = play(trial, len(ROUNDS) + REPEAT_ROUNDS - 1, lambda way, _: 200.0 if way == "stream" else 100.0)
    assert set(ways[len(ROUNDS) :]) == {"stream"}
    ways = play(trial, len(ROUNDS) + 3, lambda way, _: 200.0 if way == "pairs" else 100.0)
    assert trial.outcome.kept == "pairs" and ways[: len(ROUNDS)] == ROUNDS and set(ways[-3:]) == {"pairs"}


def test_more_batches_ahead_take_longer_to_settle():
    trial = Trial(BATCH, prefetched=4)
    ways = play(trial, 3 * len(TURNS), lambda *_: 100.0)
    assert ways == [way for way in TURNS for _ in range(3)] and trial.outcome is not None


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 6), st.integers(0, 2**32 - 1), st.sampled_from([0.0, 0.2]))
def test_a_trainer_gets_every_prompt_once_whatever_is_tried(batch_size, seed, thrown_away):
    """A trainer as verl's colocate_async: sends a batch a step, one ahead, takes what is finished, refills what it
    throws away. While it waits, prompts end in any order; it must never wait for what nobody is going to open."""
    rng = np.random.default_rng(seed)
    intake, trial = Intake("pairs", batch_size, prefetched=1), Trial(batch_size)
    running, finished, held, seen, now, count = [], [], [], [], 0.0, 0

    def start(unit):
        if unit is not None:
            running.extend(group.uid for group in unit.groups)

    def submit(num):
        nonlocal count
        groups = [Group(str(count + index), 0, 1, 1) for index in range(num)]
        count += num
        intake.mode = trial.begin(num, now)
        start(intake.submit(groups, len(finished), now))

    def end_one():
        uid = running.pop(rng.integers(len(running)))
        was_held = intake.is_held(uid)
        unit = intake.finish(uid)
        if was_held:
            held.append(uid)
            if unit is not None:
                finished.extend(group.uid for group in unit.groups)
                held[:] = [one for one in held if one not in finished]
        else:
            finished.append(uid)

    submit(batch_size)
    for _ in range(2 * len(ROUNDS) + 6):
        submit(batch_size)
        while len(finished) < batch_size:
            now += 2 * GATHER_SECONDS
            start(intake.gathered(now))
            assert running, "the trainer waits for ever"
            end_one()
            thrown = [one for one in finished if rng.random() < thrown_away / 10]
            if thrown:
                seen += thrown
                finished[:] = [one for one in finished if one not in thrown]
                submit(len(thrown))
        seen += finished[:batch_size]
        del finished[:batch_size]
    assert len(set(seen)) == len(seen)
    assert trial.outcome is not None
    left = len(running) + len(finished) + len(held) + intake.waiting
    assert len(seen) + left == count
