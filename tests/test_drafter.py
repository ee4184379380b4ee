"""The drafter: what it drafts, for how long, whom it believes, and how it accounts for what vLLM verified."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rhyme_verl._core import DraftLength, HistoryIndex

from tests.core import Batch, drafter, remember, tokens

PROMPT = [1, 2, 3]
PAST = list(range(10, 60))
ALONE = {"sibling_weight": 0.0, "phrases": False}  # history only


def history_of(*answers, **arguments):
    index = HistoryIndex(
        **{name: arguments.pop(name) for name in ("recency_weight", "reward_weight") if name in arguments}
    )
    remember(index, PROMPT, answers, **arguments)
    return index


def draft(one, slot, prompt, answer, model_len=512):
    row = np.zeros((1, 512), np.int32)
    context = [*prompt, *answer]
    row[0, : len(context)] = context
    return one.draft(row, tokens([len(context)]), tokens([slot]), model_len, 0.0)[0]


def drafts_of(one, answer, prompt=PROMPT):
    return [step[0] for step in Batch(one, [prompt], [answer]).run()]


def test_repeats_a_past_answer_with_a_growing_window():
    answer = list(range(10, 40))
    one = drafter(history_of(answer), min_acceptance=0.0, max_draft_tokens=8, initial_window=4, **ALONE)
    assert drafts_of(one, answer) == [answer[1:5], answer[6:12], answer[13:21], answer[22:30]]
    stats = one.stats()
    assert (stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens) == (4, 26, 25)
    assert (stats.draft_tokens_by_place[0], stats.accepted_tokens_by_place[0]) == (26, 25)


def test_drafts_are_counted_by_where_in_the_answer_they_begin():
    answer = list(range(10, 310))
    one = drafter(history_of(answer), min_acceptance=0.0, max_draft_tokens=8, **ALONE)
    drafts_of(one, answer)
    stats = one.stats()
    assert [tokens > 0 for tokens in stats.draft_tokens_by_place] == [True] * 4 + [False] * 12
    assert sum(stats.draft_tokens_by_place) == stats.num_draft_tokens
    assert sum(stats.accepted_tokens_by_place) == stats.num_accepted_tokens
    assert stats.accepted_tokens_by_place[2] > 1.5 * stats.accepted_tokens_by_place[1], "128 tokens against 64"


def test_learns_how_far_its_drafts_can_be_trusted():
    past = list(range(10, 40))
    one = drafter(history_of(past, past), min_acceptance=0.5, initial_window=16, **ALONE)
    first = drafts_of(one, past)
    for _ in range(20):
        last = drafts_of(one, past)
    assert len(last) < len(first)
    for _ in range(100):
        after_failures = drafts_of(one, [*past[:3], *range(100, 130)])
    assert sum(map(len, after_failures)) < 15


def test_learns_to_trust_again_while_it_drafts_nothing():
    """What it would have drafted is compared with what came, so a floor above every estimate is no dead end."""
    one = drafter(history_of(PAST), min_acceptance=0.8, **ALONE)
    for _ in range(60):
        drafts_of(one, [10, *range(100, 130)])
    assert len(drafts_of(one, PAST)) > 20
    for _ in range(60):
        good = drafts_of(one, PAST)
    assert len(good) < 12


def test_drafts_nothing_without_history():
    one = drafter(HistoryIndex())
    assert drafts_of(one, list(range(10, 20))) == [[]] * 9
    assert one.stats().num_drafts == 0
    assert one.stats().num_generated_tokens == 10


@pytest.mark.parametrize(
    "changed",
    [
        [*PAST[:20], 99, *PAST[21:]],
        [*PAST[:20], 99, *PAST[20:]],
        [*PAST[:20], 99, 98, *PAST[20:]],
        [*PAST[:20], *PAST[21:]],
        [*PAST[:20], *PAST[22:]],
    ],
    ids=["substituted", "inserted", "two inserted", "left out", "two left out"],
)
def test_goes_on_after_a_difference(changed):
    one = drafter(history_of(PAST), min_acceptance=0.0, initial_window=4, **ALONE)
    without = drafter(history_of(PAST), min_acceptance=0.0, initial_window=4, rejoin=False, **ALONE)
    steps = len(drafts_of(one, changed))
    assert steps <= 14, "each difference may cost a few steps, not the rest of the answer"
    assert steps <= len(drafts_of(without, changed))


def test_follows_the_majority_unless_agreement_counts_for_nothing():
    past = [[10, 11, 12, 13, 24, 25], [10, 11, 12, 13, 24, 25], [11, 9, 12, 13, 14, 15]]
    answer = [10, 11, 12]
    for weight, expected in ((1.0, [13, 24, 25]), (0.0, [13, 24, 25])):
        one = drafter(history_of(*past), min_acceptance=0.0, agreement_weight=weight, **ALONE)
        assert draft(one, one.open(tokens(PROMPT)), PROMPT, answer) == expected
    lonely = [[10, 11, 12, 13, 14, 15], *[[10, 9, 12, 13, 24, 25]] * 3]
    best_alone = drafter(history_of(*lonely), min_acceptance=0.0, agreement_weight=0.0, **ALONE)
    together = drafter(history_of(*lonely), min_acceptance=0.0, agreement_weight=1.0, **ALONE)
    answer = [10, 11, 12, 13]
    assert draft(best_alone, best_alone.open(tokens(PROMPT)), PROMPT, answer)[0] == 14
    assert draft(together, together.open(tokens(PROMPT)), PROMPT, answer)[0] in (14, 24)


def test_recency_and_reward_decide_between_equals():
    past, rewards = [[10, 11, 12, 20, 21], [10, 11, 12, 30, 31]], [1.0, 0.0]

    def first_token(**weights):
        index = history_of(*past, steps=[1, 2], rewards=rewards, **weights)
        one = drafter(index, min_acceptance=0.0, **ALONE)
        return draft(one, one.open(tokens(PROMPT)), PROMPT, [10, 11, 12])[0]

    assert first_token(recency_weight=0.5) == 30
    assert first_token(recency_weight=0.9, reward_weight=0.5) == 20


def test_rewards_that_come_later_count():
    index = history_of([10, 11, 12, 20, 21], [10, 11, 12, 30, 31], steps=[1, 2], ids=[5, 6], reward_weight=3.0,
                       recency_weight=0.9)  # fmt: skip
    one = drafter(index, min_acceptance=0.0, **ALONE)
    slot = one.open(tokens(PROMPT))
    assert draft(one, slot, PROMPT, [10, 11])[:2] == [12, 30]
    remember(index, PROMPT, [[10, 11, 12, 20, 21], [10, 11, 12, 30, 31]], [1, 2], rewards=[1.0, 0.0], ids=[5, 6])
    assert draft(one, slot, PROMPT, [10, 11, 12])[0] == 20


def test_siblings_draft_for_each_other_from_the_first_epoch_on():
    answer = [*range(100, 160)]
    one = drafter(HistoryIndex(), min_acceptance=0.0, phrases=False)
    ahead = Batch(one, [PROMPT], [answer])
    for _ in range(40):
        ahead.step()
    behind = Batch(one, [PROMPT], [answer])
    assert len(behind.run()) < 25
    alone = drafter(HistoryIndex(), min_acceptance=0.0, **ALONE)
    assert len(drafts_of(alone, answer)) == 59


def test_a_request_drafts_from_its_own_prompt_and_repetitions():
    prompt = [*range(10, 40)]
    one = drafter(HistoryIndex(), min_acceptance=0.0, phrases=False)
    assert len(drafts_of(one, [5, 12, 13, 14, *range(15, 40)], prompt)) < 12


def test_finished_siblings_are_forgotten_when_memory_runs_out_or_their_history_comes():
    rng = np.random.default_rng(0)
    index = HistoryIndex()
    one = drafter(index, min_acceptance=0.0, phrases=False, max_live_tokens=500)
    answers = rng.integers(10, 10_000, (10, 200)).tolist()
    for number, answer in enumerate(answers):
        assert len(drafts_of(one, answer, [number])) == 199
    assert len(drafts_of(one, answers[9], [9])) < 50
    assert len(drafts_of(one, answers[0], [0])) == 199
    remember(index, [0], [rng.integers(10, 10_000, 50).tolist()])
    assert len(drafts_of(one, answers[0], [0])) == 199


def test_common_phrases_serve_prompts_never_seen():
    rng = np.random.default_rng(0)
    phrase = [50, 51, 52, 53, 54, 55, 56, 57, 58, 59, 60, 61]

    def answer():
        return [token for _ in range(6) for token in (*rng.integers(100, 10_000, 3).tolist(), *phrase)]

    one = drafter(HistoryIndex(), min_acceptance=0.5, sibling_weight=0.0)
    steps = [len(drafts_of(one, answer(), [prompt])) for prompt in range(40)]
    assert steps[0] > 75
    assert np.mean(steps[20:]) < 60


def test_history_that_arrives_during_the_answer_is_used_at_once():
    index = HistoryIndex()
    one = drafter(index, min_acceptance=0.0, **ALONE)
    slot = one.open(tokens(PROMPT))
    assert draft(one, slot, PROMPT, PAST[:10]) == []
    remember(index, PROMPT, [PAST])
    assert draft(one, slot, PROMPT, PAST[:11])[:4] == PAST[11:15]
    remember(index, PROMPT, [[*PAST[:15], 99, 98]], 1)
    assert set(draft(one, slot, PROMPT, PAST[:12])) <= {*PAST, 99, 98}


def test_window_shrinks_on_early_rejection_and_respects_the_limits():
    past = list(range(10, 80))
    one = drafter(history_of(past), min_acceptance=0.0, initial_window=4, **ALONE)
    slot = one.open(tokens(PROMPT))
    assert len(draft(one, slot, PROMPT, past[:10])) == 4
    assert len(draft(one, slot, PROMPT, [*past[:10], 500])) <= 2
    assert len(draft(one, slot, PROMPT, [*past[:10], 500, 11], model_len=len(PROMPT) + 13)) == 0


def test_a_resumed_request_goes_on_where_it_was():
    one = drafter(history_of(PAST), initial_window=4, min_acceptance=0.0, **ALONE)
    slot = one.open(tokens([*PROMPT, *PAST[:12]]))
    assert draft(one, slot, PROMPT, PAST[:13]) == PAST[13:17]


def test_a_preempted_request_is_rebuilt_when_it_returns():
    one = drafter(history_of(PAST), initial_window=4, min_acceptance=0.0, **ALONE)
    slot = one.open(tokens(PROMPT))
    draft(one, slot, PROMPT, PAST[:12])
    one.close(slot)
    before = one.stats().num_generated_tokens
    slot = one.open(tokens(PROMPT))
    assert draft(one, slot, PROMPT, PAST[:13]) == PAST[13:17]
    assert one.stats().num_generated_tokens == before + 1


def test_a_later_turn_goes_on_in_the_history_of_its_first_prompt():
    trajectory = [*PAST[:20], 900, 901, 902, *PAST[20:]]  # turn 1, a tool's output, turn 2
    one = drafter(history_of(trajectory), initial_window=4, min_acceptance=0.0, **ALONE)
    second_turn = [*PROMPT, *trajectory[:23]]
    slot = one.open(tokens(second_turn))
    assert draft(one, slot, second_turn, PAST[20:21]) == PAST[21:25]


def test_siblings_meet_in_later_turns_too():
    one = drafter(HistoryIndex(), min_acceptance=0.0, phrases=False)
    turn_one, tool, turn_two = PAST[:20], [900, 901], PAST[20:]
    drafts_of(one, turn_one)
    drafts_of(one, turn_two, [*PROMPT, *turn_one, *tool])
    other = [*PROMPT, *range(300, 320), *tool]
    assert len(drafts_of(one, turn_two, other)) < 15


def test_slots_are_reused_and_skipped_rows_draft_nothing():
    one = drafter(history_of(PAST), min_acceptance=0.0, initial_window=4, **ALONE)
    first, second = one.open(tokens(PROMPT)), one.open(tokens(PROMPT))
    one.close(first)
    with pytest.raises(ValueError, match="not open"):
        one.close(first)
    assert one.open(tokens(PROMPT)) == first
    rows = np.zeros((2, 8), np.int32)
    rows[:, :4] = [*PROMPT, 10]
    drafts = one.draft(rows, tokens([4, 4]), tokens([-1, second]), 512, 0.0)
    assert drafts == [[], PAST[1:5]]
    with pytest.raises(ValueError, match="not open"):
        one.draft(rows, tokens([4, 4]), tokens([-1, 99]), 512, 0.0)
    with pytest.raises(ValueError, match="outside its row"):
        one.draft(rows, tokens([4, 9]), tokens([-1, second]), 512, 0.0)


lengths = st.sampled_from([DraftLength.fixed, DraftLength.aimd, DraftLength.cost_aware])
texts = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=30), min_size=1, max_size=8)


@settings(max_examples=300, deadline=None)
@given(texts, st.integers(1, 9), st.integers(1, 4), lengths, st.randoms(use_true_random=False))
def test_random_histories_never_break_limits_or_accounting(answers, max_draft, at_once, length, random):
    index = HistoryIndex(recency_weight=random.random(), reward_weight=random.random())
    one = drafter(
        index,
        length,
        max_draft_tokens=max_draft,
        min_acceptance=random.choice([0.0, 0.3]),
        sibling_weight=random.choice([0.0, 2.0]),
        phrases=random.random() < 0.5,
        rejoin=random.random() < 0.5,
    )
    for start in range(0, len(answers), at_once):
        group = answers[start : start + at_once]
        prompts = [random.choice([PROMPT, [4, 5]]) for _ in group]
        for drafts in Batch(one, prompts, group).run():
            assert all(len(proposed) <= max_draft for proposed in drafts)
        remember(index, PROMPT, group, start, rewards=[random.choice([0.0, 1.0, np.nan]) for _ in group])
        assert index.check_integrity() == ""
    stats = one.stats()
    assert stats.num_generated_tokens == sum(map(len, answers))
    assert stats.num_accepted_tokens <= stats.num_draft_tokens
    assert stats.num_steps + stats.num_accepted_tokens == stats.num_generated_tokens


def test_saved_seconds_are_undrafted_steps_spared_less_what_drafts_cost():
    """Undrafted steps take 1 s, steps with drafts 1.5 s: 20 tokens by drafts of 4 take 6 s, not 20."""
    answer = list(range(10, 31))
    one = drafter(history_of(answer), length=DraftLength.fixed, min_acceptance=0.0, max_draft_tokens=4, **ALONE)
    now = 0.0

    def play(prompt, seconds_a_step):
        nonlocal now
        batch = Batch(one, [prompt], [answer])
        while True:
            last = batch.done
            batch.step(now)
            if last:
                break
            now += seconds_a_step
        one.close(batch.slots[0])

    play([7, 8, 9], 1.0)
    assert one.stats().saved_seconds == 0.0
    play(PROMPT, 1.5)
    play(PROMPT, 1.5)  # what a step with drafts costs is known now
    before = one.stats()
    play(PROMPT, 1.5)
    after = one.stats()
    assert after.num_accepted_tokens - before.num_accepted_tokens == 16
    assert after.num_drafts - before.num_drafts == 4
    assert after.saved_seconds - before.saved_seconds == pytest.approx(16 * 1.0 - 4 * 0.5)
