"""The drafter with contexts of its own: drafts first, learning later, and undrafted steps that are only considered."""

import numpy as np
import pytest

from tests.helpers.core import drafter, new_index, remember, tokens

PROMPT = [1, 2, 3]
PAST = list(range(10, 60))
K = 8
ALONE = ("siblings", "common")
ANY = 1 << 30


class Kept:
    """Requests whose contexts the drafter keeps; `truths`: what the model says after PROMPT."""

    def __init__(self, truths, stops=(), off=ALONE, past=(PAST,), **spec):
        index = new_index()
        remember(index, PROMPT, past)
        self.one = drafter(index, off=off, **{"max_draft_tokens": K, "min_acceptance": 0.0} | spec)
        self.truths, self.said, self.now = truths, [0] * len(truths), 0.0
        self.slots = tokens([self.one.open(tokens(PROMPT)) for _ in truths])
        for slot in self.slots.tolist():
            self.one.set_context(slot, tokens(PROMPT), tokens(stops))
        self.drafts, self.lengths = np.zeros((len(truths), K), np.int32), np.zeros(len(truths), np.int32)

    def sample(self):
        """The tokens of a step that verifies the newest drafts, int32 [rows, K + 1]."""
        sampled = np.full((len(self.truths), K + 1), -1, np.int32)
        for row, truth in enumerate(self.truths):
            rest, draft = truth[self.said[row] :], self.drafts[row, : self.lengths[row]].tolist()
            accepted = 0
            while accepted < min(len(draft), len(rest) - 1) and draft[accepted] == rest[accepted]:
                accepted += 1
            count = min(accepted + 1, len(rest))
            sampled[row, :count] = rest[:count]
            self.said[row] += count
        return sampled

    def rooms(self):
        return np.full(len(self.truths), K, np.int32)

    def draft(self, sampled, rooms=None, expected=(), max_step_tokens=ANY, max_sampled_rows=0, num_rows=0):
        self.now += 0.01
        self.one.draft_first(
            self.slots, sampled, self.rooms() if rooms is None else tokens(rooms), tokens(expected), self.drafts,
            self.lengths, now=self.now, max_step_tokens=max_step_tokens, max_sampled_rows=max_sampled_rows,
            num_rows=num_rows,
        )  # fmt: skip
        return [draft[:length].tolist() for draft, length in zip(self.drafts, self.lengths, strict=True)]

    def consider(self, sampled, max_step_tokens=ANY, is_timed=True):
        self.now += 0.01
        self.lengths[:] = 0
        return self.one.consider(
            self.slots, sampled, self.rooms(), self.now, max_step_tokens=max_step_tokens, max_sampled_rows=0,
            is_timed=is_timed,
        )  # fmt: skip


@pytest.mark.parametrize(("is_timed", "saves"), [(True, True), (False, False)])
def test_a_drafted_step_of_unknown_time_saves_nothing(is_timed, saves):
    kept = Kept([PAST])
    kept.one.observe_cost(1, False, 0.01)
    kept.one.observe_cost(1 + K, True, 0.01)
    assert kept.draft(kept.sample()) == [PAST[1:9]]
    kept.one.learn(kept.slots)
    kept.consider(kept.sample(), max_step_tokens=0, is_timed=is_timed)
    assert kept.one.stats().num_accepted_tokens == K
    assert (kept.one.stats().saved_seconds > 0) == saves


def test_requests_that_join_count_towards_the_bounds():
    kept = Kept([PAST])
    assert kept.draft(kept.sample(), max_step_tokens=10, num_rows=7) == [PAST[1:4]], "3 tokens are left"
    assert kept.draft(kept.sample(), max_sampled_rows=16, num_rows=5) == [PAST[5:7]], "5 rows of 3"
    assert kept.draft(kept.sample(), max_sampled_rows=16) == [PAST[8:16]], "1 row of 9"
    assert kept.draft(kept.sample(), max_step_tokens=7, num_rows=7) == [[]]


def test_drafts_are_those_of_the_call_that_learns_first():
    kept = Kept([PAST])
    assert kept.draft(kept.sample()) == [PAST[1:9]]
    kept.one.learn(kept.slots)
    assert kept.draft(kept.sample()) == [PAST[10:18]]
    assert kept.one.stats().num_accepted_tokens == 8
    assert sum(kept.one.stats().tokens_by_prediction) == 0, "what has come is not yet learnt from"
    kept.one.learn(kept.slots)
    assert sum(kept.one.stats().tokens_by_prediction) == 8
    kept.one.learn(kept.slots)
    assert sum(kept.one.stats().tokens_by_prediction) == 8, "nor learnt from twice"


def test_learning_that_was_left_out_is_made_up_for():
    kept = Kept([PAST])
    for _ in range(4):
        kept.draft(kept.sample())
    kept.one.learn(kept.slots)
    assert sum(kept.one.stats().tokens_by_prediction) == kept.one.stats().num_accepted_tokens == 24
    assert kept.one.check_integrity() == ""


def test_siblings_learn_from_each_other_one_step_later():
    kept = Kept([PAST, PAST], off=(), past=())
    first = kept.sample()
    first[1] = -1  # the second one is still being prefilled
    kept.said[1] = 0
    while kept.said[0] < 30:
        kept.draft(first)
        kept.one.learn(kept.slots)
        first = kept.sample()
        first[1], kept.said[1] = -1, 0
    first[1, 0], kept.said[1] = PAST[0], 1
    assert kept.draft(first)[1] == PAST[1:9]


def test_an_answer_that_has_ended_gets_no_draft():
    kept = Kept([PAST], stops=[PAST[5]])
    assert kept.draft(kept.sample()) == [PAST[1:9]]
    assert kept.draft(kept.sample()) == [[]]


def test_rows_that_leave_are_counted_and_not_drafted_for():
    kept = Kept([PAST, PAST])
    kept.draft(kept.sample())
    assert kept.draft(kept.sample(), rooms=[-1, K]) == [[], PAST[10:18]]
    assert kept.one.stats().num_accepted_tokens == 16
    kept.one.learn(kept.slots)
    assert kept.one.check_integrity() == ""


def test_a_count_that_is_not_the_schedulers_is_refused():
    kept = Kept([PAST])
    kept.draft(kept.sample(), expected=[len(PROMPT)])
    with pytest.raises(ValueError, match="row 0 has 4 tokens, but the scheduler counts 5"):
        kept.draft(kept.sample(), expected=[5])


def test_a_context_that_starts_again_is_followed_from_there():
    kept = Kept([PAST])
    kept.draft(kept.sample())
    kept.draft(kept.sample())
    kept.one.set_context(0, tokens([*PROMPT, *PAST[:6]]), tokens([]))  # the newest tokens were dropped
    kept.said, kept.lengths[:] = [6], 0
    kept.draft(kept.sample())
    kept.one.learn(kept.slots)
    assert kept.draft(kept.sample())[0][:4] == PAST[8:12]
    assert kept.one.check_integrity() == ""


def test_drafts_that_would_pay_are_noticed_while_none_are_made():
    kept = Kept([PAST])
    assert kept.consider(kept.sample()) is True
    assert kept.consider(kept.sample(), max_step_tokens=1) is False, "nothing is allowed"
    assert kept.draft(kept.sample()) == [PAST[3:11]]
    stats = kept.one.stats()
    assert (stats.num_draft_tokens, stats.num_generated_tokens) == (0, 3), "no draft has been verified"


def test_an_undrafted_step_is_wanted_until_its_cost_is_known():
    kept = Kept([PAST], policy="cost_aware")
    while kept.one.wants_undrafted(1):
        assert kept.consider(kept.sample(), max_step_tokens=0) is False
    assert kept.said == [4], "three steps between four"
    assert kept.consider(kept.sample()) is True


def test_drafts_that_do_not_pay_are_tried_less_and_less_often():
    answer = np.random.default_rng(5).integers(10, 1000, 900).tolist()
    kept = Kept([answer], past=(answer,), policy="cost_aware")
    tried = []
    for step in range(500):
        if kept.draft(kept.sample())[0]:
            tried.append(step)
            kept.now += 1.0
    between = np.diff(tried)[3:]  # at first, a few steps show what drafts cost
    assert between.tolist()[:3] == [34, 66, 130]


@pytest.mark.parametrize("policy", ["fixed", "cost_aware"])
def test_a_bound_on_the_steps_tokens_is_kept(policy):
    kept = Kept([PAST] * 5, policy=policy)
    for _ in range(5):
        kept.consider(kept.sample())
    drafts = kept.draft(kept.sample(), max_step_tokens=5 + 12)
    assert sum(map(len, drafts)) == 12
    assert kept.draft(kept.sample(), max_step_tokens=5) == [[]] * 5


def test_wrong_arrays_are_refused():
    kept = Kept([PAST])
    sampled = kept.sample()
    with pytest.raises(ValueError, match="a row for each slot"):
        kept.draft(sampled, rooms=[])
    with pytest.raises(ValueError, match="2-d int32"):
        kept.draft(sampled[0])
    with pytest.raises(ValueError, match="not open"):
        kept.one.set_context(7, tokens(PROMPT), tokens([]))
