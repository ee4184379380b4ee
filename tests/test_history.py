"""The history index against a brute-force matcher."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from rhyme_verl._core import HistoryIndex, prompt_key

END = -1
PROMPT = np.array([9, 9], np.int32)

tokens = st.lists(st.integers(0, 2), max_size=14)
answers = st.lists(st.tuples(tokens, st.integers(0, 1)), max_size=6)  # (answer, steps passed since the one before)


def make_index(gram=2, window=3, max_tokens=1000):
    return HistoryIndex(gram_tokens=gram, window_epochs=window, max_tokens_per_prompt=max_tokens)


def add_all(index, answers_with_gaps):
    """Add answers with rising steps; return those a window of 3 steps keeps, by brute force."""
    step, filed = 0, []
    for answer, gap in answers_with_gaps:
        step += gap
        index.add(prompt_key(PROMPT), np.array(answer, np.int32), step)
        if answer:
            filed.append((step, answer))
    newest_steps = sorted({step for step, _ in filed})[-3:]
    return [answer for step, answer in filed if step in newest_steps]


def brute_force_matches(kept, context, gram, limit=64):
    found = []
    for answer in reversed(kept):
        for place in range(len(answer), gram - 1, -1):
            length = 0
            while length < min(place, len(context), limit) and answer[place - 1 - length] == context[-1 - length]:
                length += 1
            if length >= gram:
                found.append((answer[place] if place < len(answer) else END, length))
    return found


@settings(max_examples=400, deadline=None)
@given(answers, tokens)
def test_finds_every_occurrence_of_the_suffix_newest_first(answers_with_gaps, context):
    index = make_index()
    kept = add_all(index, answers_with_gaps)
    assert index.check_integrity() == ""
    expected = brute_force_matches(kept, context, gram=2)
    found = index.find_suffix(PROMPT, np.array(context, np.int32), max_matches=len(expected) + 1)
    if sum(map(len, kept)) <= 64:  # one search looks at 64 places
        assert found == expected
    else:
        assert found == expected[: len(found)]


def test_keeps_the_window_of_newest_steps():
    index = make_index(window=2)
    for step in range(5):
        for _ in range(3):
            index.add(prompt_key(PROMPT), np.array([step, 7, 8], np.int32), step)
    assert index.stats().num_answers == 6
    assert index.find_suffix(PROMPT, np.array([2, 7], np.int32)) == []
    assert index.find_suffix(PROMPT, np.array([3, 7], np.int32)) == [(8, 2)] * 3


def test_keeps_the_token_bound_and_drops_the_oldest_answers():
    index = make_index(max_tokens=10)
    for first in range(4):
        index.add(prompt_key(PROMPT), np.array([first, 5, 6, 7], np.int32), 0)
    assert index.stats().num_tokens == 8
    assert index.find_suffix(PROMPT, np.array([1, 5], np.int32)) == []
    assert index.find_suffix(PROMPT, np.array([2, 5], np.int32)) == [(6, 2)]


def test_a_longer_prompt_finds_the_history_of_its_known_beginning():
    index = make_index()
    index.add(prompt_key(PROMPT), np.array([1, 2, 3], np.int32), 0)
    resumed = np.concatenate([PROMPT, np.array([1, 2], np.int32)]).astype(np.int32)
    assert index.find_suffix(resumed, np.array([1, 2], np.int32)) == [(3, 2)]
    assert index.find_suffix(PROMPT[:1], np.array([1, 2], np.int32)) == []


def test_prompts_do_not_share_history():
    index = make_index()
    other = np.array([8, 9], np.int32)
    index.add(prompt_key(PROMPT), np.array([1, 2, 3], np.int32), 0)
    assert index.find_suffix(other, np.array([1, 2], np.int32)) == []
    assert prompt_key(other) != prompt_key(other[::-1].copy())
