"""The history index against a brute-force matcher, its window and its bounds, and against concurrent drafting."""

import subprocess
import sys
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rhyme_verl._core import prompt_key

from tests.helpers.core import Batch, drafter, new_index, remember, tokens

END = -1
PROMPT = [9, 9]

GRAM = list(range(50, 57))  # with one more token, what has to agree
WORDS = ([0, 1, 1, 0, 1], [1, 0, 0, 1, 0])  # of which answers and contexts consist, so that grams come again
answer_texts = st.lists(st.sampled_from(WORDS), max_size=5).map(lambda words: sum(words, []))
batches = st.lists(st.lists(st.tuples(answer_texts, st.integers(-1, 1)), min_size=1, max_size=4), max_size=4)


def brute_force_matches(kept, context, gram, limit=32):
    found = []
    for answer in reversed(kept):
        for place in range(len(answer), gram - 1, -1):
            length = 0
            while length < min(place, len(context), limit) and answer[place - 1 - length] == context[-1 - length]:
                length += 1
            if length >= gram:
                found.append((answer[place] if place < len(answer) else END, length))
    return found


@settings(max_examples=300, deadline=None)
@given(batches, answer_texts)
def test_finds_the_suffix_in_every_kept_answer_newest_first(all_batches, context):
    index = new_index(window_epochs=3)
    step, filed = 3, []
    for batch in all_batches:
        steps = []
        for answer, gap in batch:
            step = max(0, step + gap)
            steps.append(step)
            if answer:
                filed.append((step, answer))
        remember(index, PROMPT, [answer for answer, _ in batch], steps)
        filed.sort(key=lambda one: one[0])  # stable: a late answer comes after those of its step
        newest = sorted({step for step, _ in filed})[-3:]
        filed = [(step, answer) for step, answer in filed if step in newest]
        assert index.check_integrity() == ""
    kept = [answer for _, answer in filed]
    expected = brute_force_matches(kept, context, gram=8)
    found = index.find_suffix(tokens(PROMPT), tokens(context), max_matches=len(expected) + 1)
    num_places = sum(max(0, len(one) - 7) for one in kept)
    assert found == (expected if num_places <= 32 else expected[: len(found)])  # a search looks at 32 places
    assert index.stats().num_tokens == sum(map(len, kept))


def test_keeps_the_window_of_newest_steps():
    index = new_index(window_epochs=2)
    for step in range(5):
        remember(index, PROMPT, [[step, *GRAM, 8]] * 3, step)
    assert index.stats().num_answers == 6
    assert index.find_suffix(tokens(PROMPT), tokens([2, *GRAM])) == []
    assert index.find_suffix(tokens(PROMPT), tokens([3, *GRAM])) == [(8, 8)] * 3


def test_keeps_the_token_bound_of_a_prompt_and_drops_its_oldest_answers():
    index = new_index(max_tokens_per_prompt=25)
    for first in range(4):
        remember(index, PROMPT, [[first, *GRAM, 6, 7]])
    assert index.stats().num_tokens == 20
    assert index.find_suffix(tokens(PROMPT), tokens([1, *GRAM])) == []
    assert index.find_suffix(tokens(PROMPT), tokens([2, *GRAM])) == [(6, 8)]


def test_an_answer_with_a_known_id_replaces_the_earlier_one():
    index = new_index()
    remember(index, PROMPT, [[1, *GRAM, 3], [1, *GRAM, 4]], ids=[11, 12])
    remember(index, PROMPT, [[1, *GRAM, 5]], ids=[11])
    assert index.find_suffix(tokens(PROMPT), tokens([1, *GRAM])) == [(5, 8), (4, 8)]


def test_memory_is_bounded_and_the_least_recently_updated_prompts_go():
    index = new_index(max_bytes=64_000)
    for prompt in range(40):
        remember(index, [prompt], [list(range(500))])
        remember(index, [0], [list(range(100))])  # kept alive by updates
        assert index.stats().num_bytes <= 64_000
        assert index.check_integrity() == ""
    stats = index.stats()
    assert stats.num_evicted_tokens > 500 * 20
    assert index.find_suffix(tokens([0]), tokens(range(10)))
    assert not index.find_suffix(tokens([1]), tokens(range(10)))
    assert index.find_suffix(tokens([39]), tokens(range(10)))


def test_what_requests_use_is_evicted_last():
    index = new_index(max_bytes=64_000)
    one = drafter(index)
    remember(index, [0], [list(range(100))])
    slot = one.open(tokens([0]))
    for prompt in range(1, 40):
        remember(index, [prompt], [list(range(500))])
        assert index.stats().num_bytes <= 64_000
    assert index.find_suffix(tokens([0]), tokens(range(10)))
    one.close(slot)
    remember(index, [40], [list(range(500))])
    assert not index.find_suffix(tokens([0]), tokens(range(10)))
    slots = [one.open(tokens([prompt])) for prompt in range(30, 41)]
    remember(index, [41], [list(range(2000))])
    assert index.stats().num_bytes <= 64_000, "even if all are used"
    assert len(slots) == 11 and index.check_integrity() == ""


def test_the_process_holds_what_the_histories_take_however_often_they_change():
    """Once per size, as an epoch does: arrays in the heap would leave holes of a third of the bound."""
    code = (
        "import numpy as np, psutil\n"
        "from tests.helpers.core import new_index, remember\n"
        "rng, index = np.random.default_rng(0), new_index(max_bytes=60_000_000)\n"
        "before = psutil.Process().memory_info().rss\n"
        "for epoch in range(8):\n"
        "    for prompt in range(40):\n"
        "        lengths = np.minimum(rng.lognormal(7.5, 1.0, 16), 16_000).astype(int)\n"
        "        remember(index, [prompt], [np.full(length, 7) for length in lengths], epoch)\n"
        "print((psutil.Process().memory_info().rss - before) / index.stats().num_bytes)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-2000:]
    assert float(result.stdout) < 1.15


def test_history_takes_at_most_32_bytes_a_token():
    index = new_index()
    rng = np.random.default_rng(0)
    for prompt in range(20):
        remember(index, [prompt], rng.integers(0, 1000, (8, 300)))
    assert index.stats().num_bytes <= 32 * index.stats().num_tokens


def test_a_longer_prompt_finds_the_history_of_its_known_beginning():
    index = new_index()
    remember(index, PROMPT, [[1, *GRAM, 3]])
    assert index.find_suffix(tokens([*PROMPT, 1, *GRAM]), tokens([1, *GRAM])) == [(3, 8)]
    assert index.find_suffix(tokens(PROMPT[:1]), tokens([1, *GRAM])) == []


def test_prompts_do_not_share_history():
    index = new_index()
    remember(index, PROMPT, [[1, *GRAM, 3]])
    assert index.find_suffix(tokens([8, 9]), tokens([1, *GRAM])) == []
    assert prompt_key(tokens([8, 9])) != prompt_key(tokens([9, 8]))


@pytest.mark.parametrize(
    ("lengths", "values", "message"),
    [([2], [1, 2, 3], "add up"), ([-1, 4], [1, 2, 3], "add up"), ([3], [1, -2, 3], ">= 0")],
)
def test_malformed_batches_are_refused(lengths, values, message):
    index, count = new_index(), len(lengths)
    with pytest.raises(ValueError, match=message):
        index.update(1, tokens(values), tokens(lengths), np.zeros(count, np.int64), np.zeros(count, np.uint64))
    with pytest.raises(ValueError, match="one value per answer"):
        index.update(1, tokens([1]), tokens([1]), np.zeros(2, np.int64), np.zeros(1, np.uint64))


def test_histories_change_under_a_running_drafter():
    """A thread replaces and evicts histories while requests follow them; drafts stay within what was remembered."""
    index = new_index(window_epochs=2, max_bytes=200_000)
    one = drafter(index, min_acceptance=0.0, off=["siblings", "common"])
    rng = np.random.default_rng(0)
    base = rng.integers(10, 200, 300)
    stop = threading.Event()

    def feed():
        step = 0
        while not stop.is_set():
            for prompt in range(20):
                remember(index, [prompt], [base, base[::2]], step, ids=[2 * step, 2 * step + 1])
            step += 1

    thread = threading.Thread(target=feed)
    thread.start()
    try:
        for _ in range(20):
            batch = Batch(one, [[prompt] for prompt in range(20)], [base] * 20)
            for drafts in batch.run():
                assert all(set(draft) <= set(base.tolist()) for draft in drafts)
    finally:
        stop.set()
        thread.join()
    assert one.stats().num_accepted_tokens > 1000
    assert index.check_integrity() == ""
