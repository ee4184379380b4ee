"""Texts of running answers: one per answer, within a hard bound, whatever turns, preemptions and evictions come."""

from multiprocessing import get_context

import numpy as np
import psutil
import pytest

from tests.helpers.core import Batch, drafter, new_index, remember, tokens

PROMPT = [*range(10, 110)]
MIB = 2**20


def in_new_process(function, *arguments):
    """What `function` returns there: memory is not that of the tests before."""
    with get_context("spawn").Pool(1) as pool:
        return pool.apply(function, arguments)


def random_tokens(rng, *shape):
    return (rng.zipf(1.3, shape) % 150_000).astype(np.int32)


class Answers:
    """Random answers to PROMPT that grow by some tokens per engine step."""

    def __init__(self, one, count, most):
        self.one = one
        self.rows = random_tokens(np.random.default_rng(0), count, len(PROMPT) + most)
        self.rows[:, : len(PROMPT)] = PROMPT
        self.lengths = np.full(count, len(PROMPT), np.int32)
        self.slots = np.full(count, -1, np.int32)

    def open(self):
        """Start all answers, or continue them as vLLM does after a preemption or a tool's output."""
        for slot in self.slots:
            if slot >= 0:
                self.one.close(slot)
        contexts = [self.rows[row, :length].copy() for row, length in enumerate(self.lengths)]
        self.slots = tokens([self.one.open(context) for context in contexts])

    def grow(self, count, at_once=64):
        for _ in range(count // at_once):
            self.lengths += at_once
            self.one.draft(self.rows, self.lengths, self.slots, self.rows.shape[1], 0.0)


def growth_over_turns(samples, turns, per_turn):
    one = drafter(new_index(), off=["common"])
    answers = Answers(one, samples, turns * per_turn)
    before = psutil.Process().memory_info().rss
    for _ in range(turns):
        answers.open()
        answers.grow(per_turn)
    assert one.check_integrity() == ""
    return (psutil.Process().memory_info().rss - before) / MIB, one.num_live_tokens


def test_an_answer_of_many_turns_is_kept_once():
    mib, live_tokens = in_new_process(growth_over_turns, 16, 20, 1536)
    assert live_tokens <= 16 * 20 * 1536 + len(PROMPT) + 256
    assert mib <= 40


def growth_by_preemptions(count, length):
    one = drafter(new_index(), off=["common"])
    answers = Answers(one, 2, length + 64 * count)
    answers.open()
    answers.grow(length, at_once=512)
    before, live_before = psutil.Process().memory_info().rss, one.num_live_tokens
    for _ in range(count):
        answers.open()
        answers.grow(64)
    assert one.check_integrity() == ""
    added = psutil.Process().memory_info().rss - before
    return added / MIB, one.num_live_tokens - live_before


def test_a_long_answer_that_is_preempted_often_is_kept_once():
    mib, live_tokens = in_new_process(growth_by_preemptions, 100, 32_768)
    assert live_tokens == 2 * 100 * 64
    assert mib <= 4


@pytest.mark.parametrize("most", [0, 1000, 20_000])
def test_texts_of_running_answers_are_bounded(most):
    one = drafter(new_index(), off=["common"], max_live_tokens=most)
    rng = np.random.default_rng(1)
    answers = random_tokens(rng, 12, 1500).tolist()
    batch = Batch(one, [PROMPT] * 6 + [[7, *PROMPT]] * 6, answers)
    largest = 0
    while not batch.done:
        batch.step()
        largest = max(largest, one.num_live_tokens)
        assert one.check_integrity() == ""
    bound = max(most, 2 * 256)  # of two empty groups
    assert bound / 2 < largest <= bound


def test_siblings_are_drafted_from_again_after_their_texts_were_dropped():
    answer = random_tokens(np.random.default_rng(2), 2000).tolist()
    one = drafter(new_index(), off=["common"], max_live_tokens=1500, min_acceptance=0.0)
    ahead = Batch(one, [PROMPT], [answer])
    ahead.run()
    assert one.num_live_tokens < 1500, "the first part is gone"
    behind = Batch(one, [PROMPT], [answer])
    assert 100 < len(behind.run()) < 1900


def test_a_running_request_uses_a_history_that_was_evicted_and_learnt_again():
    rng = np.random.default_rng(3)
    first, later, other = random_tokens(rng, 3, 400).tolist()
    index = new_index(max_bytes=20_000)
    one = drafter(index, off=["siblings", "common"], min_acceptance=0.0)
    remember(index, PROMPT, [first])
    batch = Batch(one, [PROMPT], [later])
    batch.step()
    remember(index, [1, 2, 3], [other])
    assert index.stats().num_prompts == 1, "the prompt's history is evicted"
    batch.step()
    remember(index, PROMPT, [later])
    assert len(batch.run()) < 50
