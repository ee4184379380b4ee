"""The drafter: what it drafts, for how long, and how it accounts for what vLLM verified."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from rhyme_verl._core import Drafter, DraftLength, HistoryIndex, prompt_key

PROMPT = np.array([1, 2, 3], np.int32)
MODEL_LEN = 512


def make_drafter(*past_answers, max_draft=8, length=DraftLength.aimd, **policy):
    index = HistoryIndex(gram_tokens=3, window_epochs=4, max_tokens_per_prompt=10_000)
    for step, answer in enumerate(past_answers):
        index.add(prompt_key(PROMPT), np.array(answer, np.int32), step)
    settings = {"initial_window": 4, "window_increase": 2, "window_decrease": 0.5, "min_acceptance": 0.2, **policy}
    return index, Drafter(index, length=length, max_draft_tokens=max_draft, **settings)


def draft(drafter, slot, answer, model_len=MODEL_LEN):
    row = np.zeros((1, MODEL_LEN), np.int32)
    context = np.concatenate([PROMPT, np.array(answer, np.int32)])
    row[0, : len(context)] = context
    return drafter.draft(row, np.array([len(context)], np.int32), np.array([slot], np.int32), model_len, 0.0)[0]


def generate(drafter, truth):
    """Play vLLM's part for a model that is going to say `truth`; returns the drafts it was offered."""
    slot, generated, drafts = drafter.open(PROMPT), 1, []
    while generated < len(truth):
        proposed = draft(drafter, slot, truth[:generated])
        drafts.append(proposed)
        accepted = 0
        while (
            accepted < len(proposed)
            and generated + accepted < len(truth) - 1
            and proposed[accepted] == truth[generated + accepted]
        ):
            accepted += 1
        generated += accepted + 1
    draft(drafter, slot, truth)  # vLLM calls once more before it notices the end
    drafter.close(slot)
    return drafts


def test_repeats_a_past_answer_with_a_growing_window():
    answer = list(range(10, 40))
    _, drafter = make_drafter(answer, min_acceptance=0.0)
    assert generate(drafter, answer) == [answer[1:5], answer[6:12], answer[13:21], answer[22:30]]
    stats = drafter.stats()
    assert (stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens) == (4, 26, 25)


def test_learns_how_far_its_drafts_can_be_trusted():
    past = [list(range(10, 40)), list(range(10, 40))]
    _, drafter = make_drafter(*past, min_acceptance=0.5, max_draft=16, initial_window=16)
    first = generate(drafter, past[0])
    for _ in range(20):
        last = generate(drafter, past[0])
    assert len(last) < len(first)
    for _ in range(40):
        after_failures = generate(drafter, [*past[0][:3], *range(100, 130)])
    assert sum(map(len, after_failures)) < 10


def test_drafts_nothing_without_history():
    _, drafter = make_drafter()
    assert generate(drafter, list(range(10, 20))) == [[]] * 9
    assert drafter.stats().num_drafts == 0
    assert drafter.stats().num_generated_tokens == 10


def test_goes_on_after_a_substituted_an_inserted_and_a_left_out_token():
    past = list(range(10, 60))
    for changed in (
        [*past[:20], 99, *past[21:]],
        [*past[:20], 99, *past[20:]],
        [*past[:20], *past[21:]],
    ):
        _, drafter = make_drafter(past, min_acceptance=0.0)
        drafts = generate(drafter, changed)
        assert len(drafts) <= 14, "each difference may cost a few steps, not the rest of the answer"


def test_follows_the_majority():
    past = [[10, 11, 12, 13, 14, 15], [10, 11, 12, 13, 24, 25], [10, 11, 12, 13, 24, 25]]
    _, drafter = make_drafter(*past, min_acceptance=0.0)
    slot = drafter.open(PROMPT)
    assert draft(drafter, slot, [10, 11, 12]) == [13, 24, 25]


def test_window_shrinks_on_early_rejection_and_respects_the_limits():
    past = list(range(10, 80))
    _, drafter = make_drafter(past, min_acceptance=0.0)
    slot = drafter.open(PROMPT)
    assert len(draft(drafter, slot, past[:10])) == 4
    assert len(draft(drafter, slot, [*past[:10], 500])) <= 2
    assert len(draft(drafter, slot, [*past[:10], 500], model_len=len(PROMPT) + 12)) == 0


def test_a_resumed_request_goes_on_where_it_was():
    past = list(range(10, 40))
    _, drafter = make_drafter(past)
    slot = drafter.open(np.concatenate([PROMPT, np.array(past[:12], np.int32)]).astype(np.int32))
    assert draft(drafter, slot, past[:13]) == past[13:17]


def test_slots_are_reused_and_skipped_rows_draft_nothing():
    past = list(range(10, 40))
    _, drafter = make_drafter(past, min_acceptance=0.0)
    first, second = drafter.open(PROMPT), drafter.open(PROMPT)
    drafter.close(first)
    assert drafter.open(PROMPT) == first
    rows = np.zeros((2, MODEL_LEN), np.int32)
    rows[:, :4] = [*PROMPT, 10]
    drafts = drafter.draft(rows, np.array([4, 4], np.int32), np.array([-1, second], np.int32), MODEL_LEN, 0.0)
    assert drafts == [[], past[1:5]]


answers = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=30), min_size=1, max_size=6)


@settings(max_examples=300, deadline=None)
@given(answers, st.integers(1, 9), st.randoms(use_true_random=False))
def test_random_histories_never_break_limits_or_accounting(all_answers, max_draft, random):
    index, drafter = make_drafter(max_draft=max_draft, min_acceptance=random.choice([0.0, 0.3]))
    for step, answer in enumerate(all_answers):
        drafts = generate(drafter, answer)
        assert all(len(proposed) <= max_draft for proposed in drafts)
        index.add(prompt_key(PROMPT), np.array(answer, np.int32), step)
        assert index.check_integrity() == ""
    stats = drafter.stats()
    assert stats.num_generated_tokens == sum(map(len, all_answers))
    assert stats.num_accepted_tokens <= stats.num_draft_tokens
    assert stats.num_steps + stats.num_accepted_tokens == stats.num_generated_tokens
