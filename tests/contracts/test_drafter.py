"""What every drafter has to keep, however it predicts; the proposer and the benchmarks rely on nothing else.

To try a drafter of your own, add it to DRAFTERS: a function from an index and settings to an object with the methods of
`rhyme_verl._core.Drafter`. Exactness needs no contract here, since rejection sampling guarantees it for any draft;
tests/histospec/test_exactness.py checks that.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.core import Batch, drafter, new_index, remember, tokens

DRAFTERS = {
    "fixed": lambda index, **spec: drafter(index, policy="fixed", **spec),
    "cost_aware": lambda index, **spec: drafter(index, policy="cost_aware", **spec),
    "history only": lambda index, **spec: drafter(index, off=["siblings", "common"], **spec),
    "no rejoining": lambda index, **spec: drafter(index, off=["rejoin"], **spec),
}
PROMPT = [1, 2, 3]
PAST = list(range(10, 50))

pytestmark = pytest.mark.parametrize("make", DRAFTERS.values(), ids=DRAFTERS)


def with_history(make, **spec):
    index = new_index()
    remember(index, PROMPT, [PAST])
    return make(index, min_acceptance=0.0, max_draft_tokens=4, **spec)


def draft(subject, slot, context, model_len=512):
    rows = np.zeros((1, len(context)), np.int32)
    rows[0] = context
    return subject.draft(rows, tokens([len(context)]), tokens([slot]), model_len, 0.0)[0]


def test_a_draft_ends_within_the_models_length(make):
    subject = with_history(make)
    slot = subject.open(tokens(PROMPT))
    for num_known in range(1, 12):
        proposed = draft(subject, slot, [*PROMPT, *PAST[:num_known]], model_len=len(PROMPT) + 13)
        assert len(proposed) <= 12 - num_known


def test_slots_are_reused_and_rows_without_a_slot_get_no_draft(make):
    subject = with_history(make)
    first, second = subject.open(tokens(PROMPT)), subject.open(tokens(PROMPT))
    subject.close(first)
    with pytest.raises(ValueError, match="not open"):
        subject.close(first)
    assert subject.open(tokens(PROMPT)) == first
    rows = np.zeros((2, 8), np.int32)
    rows[:, :4] = [*PROMPT, 10]
    skipped, _ = subject.draft(rows, tokens([4, 4]), tokens([-1, second]), 512, 0.0)
    assert skipped == []
    with pytest.raises(ValueError, match="not open"):
        subject.draft(rows, tokens([4, 4]), tokens([-1, 99]), 512, 0.0)
    with pytest.raises(ValueError, match="outside its row"):
        subject.draft(rows, tokens([4, 9]), tokens([-1, second]), 512, 0.0)


def test_impossible_token_ids_and_rows_are_refused(make):
    subject = with_history(make)
    slot = subject.open(tokens(PROMPT))
    with pytest.raises(ValueError, match=">= 0"):
        subject.open(tokens([1, -1]))
    with pytest.raises(ValueError, match=">= 0"):
        draft(subject, slot, [*PROMPT, 10, -1])
    rows = np.zeros((2, 8), np.int32)
    with pytest.raises(ValueError, match="same slot"):
        subject.draft(rows, tokens([4, 4]), tokens([slot, slot]), 512, 0.0)


texts = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=30), min_size=1, max_size=8)


@settings(max_examples=100, deadline=None)
@given(texts, st.integers(1, 9), st.integers(1, 4), st.sampled_from([0.0, 0.3]), st.randoms(use_true_random=False))
def test_random_histories_never_break_limits_or_accounting(make, answers, max_draft, at_once, floor, random):
    index = new_index()
    subject = make(index, max_draft_tokens=max_draft, min_acceptance=floor)
    for start in range(0, len(answers), at_once):
        group = answers[start : start + at_once]
        prompts = [random.choice([PROMPT, [4, 5]]) for _ in group]
        for drafts in Batch(subject, prompts, group).run():
            assert all(len(proposed) <= max_draft for proposed in drafts)
        remember(index, PROMPT, group, start)
        assert index.check_integrity() == subject.check_integrity() == ""
    stats = subject.stats()
    assert stats.num_generated_tokens == sum(map(len, answers))
    assert stats.num_accepted_tokens <= stats.num_draft_tokens
    assert stats.num_steps + stats.num_accepted_tokens == stats.num_generated_tokens
