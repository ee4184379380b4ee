"""One shard of the history: replacing, rewards, changes, window and budget, against a plain oracle."""

import tracemalloc

import numpy as np
import pytest

from rhyme_verl.history import store
from rhyme_verl.history.store import ANSWER_OVERHEAD_BYTES, PROMPT_OVERHEAD_BYTES, HistoryShard


def tokens(*values):
    return np.array(values, np.int32)


def roomy(window_epochs=3):
    return HistoryShard(window_epochs, budget_bytes=1 << 40)


def held(shard, prompt_key):
    """Answers of a prompt: id -> (step, tokens)."""
    batch = shard.changes(prompt_key, since_version=-1)
    if batch is None:
        return {}
    texts = np.split(batch.tokens, np.cumsum(batch.lengths)[:-1])
    return {
        int(answer_id): (int(step), text.tolist())
        for answer_id, step, text in zip(batch.ids, batch.steps, texts, strict=True)
    }


def test_a_later_turn_replaces_the_same_answer():
    shard = roomy()
    shard.add(1, 10, 0, tokens(5, 6))
    shard.add(1, 11, 0, tokens(7))
    shard.add(1, 10, 1, tokens(5, 6, 8, 9))
    assert held(shard, 1) == {10: (1, [5, 6, 8, 9]), 11: (0, [7])}
    counters = shard.counters()
    assert (counters.prompts, counters.answers, counters.tokens) == (1, 2, 5)
    shard.check_integrity()


def test_changes_are_what_came_after_a_version():
    shard = roomy()
    assert shard.changes(1, 0) is None
    shard.add(1, 10, 0, tokens(5))
    shard.add(1, 11, 0, tokens(6, 7))
    first = shard.changes(1, 0)
    assert first.ids.tolist() == [10, 11]
    assert first.tokens.tolist() == [5, 6, 7]
    assert first.lengths.tolist() == [1, 2]
    assert (first.tokens.dtype, first.lengths.dtype, first.steps.dtype) == (np.int32, np.int32, np.int64)
    assert first.ids.dtype == np.uint64
    shard.add(2, 12, 0, tokens(1))
    assert shard.changes(1, first.version) is None
    shard.set_reward(1, 11, 0.5)
    assert shard.changes(1, first.version) is None, "engines need no rewards"
    shard.add(1, 11, 1, tokens(6, 8))
    second = shard.changes(1, first.version)
    assert (second.ids.tolist(), second.tokens.tolist()) == ([11], [6, 8])
    assert shard.changes(1, second.version) is None


def test_a_shard_started_later_reports_everything_to_those_who_knew_its_predecessor():
    old = HistoryShard(3, 1 << 40, first_version=1000)
    old.add(1, 10, 0, tokens(5))
    seen = old.changes(1, 0).version
    new = HistoryShard(3, 1 << 40, first_version=2000)
    new.restore(1, next(old.answers())[1])
    assert new.changes(1, seen).ids.tolist() == [10]


def test_a_shard_whose_clock_was_set_back_reports_everything_to_those_who_knew_its_predecessor():
    old = HistoryShard(3, 1 << 40, first_version=2000)
    old.add(1, 10, 0, tokens(5))
    seen = old.changes(1, 0).version
    new = HistoryShard(3, 1 << 40, first_version=1000)
    new.add(1, 11, 1, tokens(6))
    assert new.changes(1, seen).ids.tolist() == [11]


def test_a_reward_finds_its_answer_or_waits_for_it(monkeypatch):
    shard = roomy()
    shard.set_reward(1, 10, 1.0)
    shard.set_reward(1, 99, 0.25)
    assert shard.counters().rewards_unmatched == 2
    shard.add(1, 10, 0, tokens(5))
    shard.add(1, 11, 0, tokens(6))
    shard.set_reward(1, 11, 0.5)
    assert [answer.reward for _, answer in shard.answers()] == [1.0, 0.5]
    assert shard.counters().rewards_unmatched == 1
    shard.add(1, 11, 1, tokens(6, 7))  # its end comes after its reward
    assert [answer.reward for _, answer in shard.answers()] == [1.0, 0.5]
    monkeypatch.setattr(store, "MAX_WAITING_REWARDS", 3)
    for answer_id in range(5):
        shard.set_reward(2, answer_id, 0.0)
    assert len(shard._waiting_rewards) == 3
    assert shard.counters().rewards_unmatched == 6


def test_a_prompt_keeps_the_answers_of_its_latest_steps_only():
    shard = roomy(window_epochs=2)
    for step in (0, 4, 8):
        for sample in range(3):
            shard.add(1, 10 * step + sample, step, tokens(step, sample))
    shard.add(2, 99, 0, tokens(1))  # another prompt's first step stays
    assert sorted(step for step, _ in held(shard, 1).values()) == [4] * 3 + [8] * 3
    assert len(held(shard, 2)) == 1
    assert shard.counters().evicted_tokens == 0, "only the budget evicts"
    shard.add(1, 1000, 3, tokens(7))  # late, and older than all that is kept
    assert 1000 not in held(shard, 1)
    shard.check_integrity()


def test_over_the_budget_the_prompt_with_most_answers_loses_its_oldest_one():
    size = 4 * 100 + ANSWER_OVERHEAD_BYTES
    shard = HistoryShard(3, budget_bytes=6 * size + 3 * PROMPT_OVERHEAD_BYTES)
    for prompt, step, answer in ((1, 7, 10), (1, 5, 11), (2, 5, 20), (3, 4, 30), (3, 6, 31), (1, 6, 12)):
        shard.add(prompt, answer, step, tokens(*range(100)))
    assert shard.counters().evicted_tokens == 0
    shard.add(2, 21, 9, tokens(*range(100)))
    assert [sorted(held(shard, prompt)) for prompt in (1, 2, 3)] == [[10, 12], [20, 21], [30, 31]]
    shard.add(2, 22, 9, tokens(*range(100)))  # its own, not those of prompts with fewer answers
    assert [sorted(held(shard, prompt)) for prompt in (1, 2, 3)] == [[10, 12], [21, 22], [30, 31]]
    assert shard.counters().evicted_tokens == 200
    shard.check_integrity()


@pytest.mark.parametrize("share", [0.9, 0.5, 0.15])
def test_every_prompt_returns_to_answers_if_the_budget_holds_only_part_of_an_epoch(share):
    num_prompts, samples, length = 60, 16, 50
    epoch_bytes = num_prompts * (samples * (4 * length + ANSWER_OVERHEAD_BYTES) + PROMPT_OVERHEAD_BYTES)
    shard = HistoryShard(3, budget_bytes=int(share * epoch_bytes))
    for epoch in range(4):
        for prompt in np.random.default_rng(epoch).permutation(num_prompts).tolist():
            known = held(shard, prompt)
            if epoch:
                assert len(known) >= int(share * samples) - 1
                assert {step for step, _ in known.values()} == {epoch - 1}
            for sample in range(samples):
                shard.add(prompt, 100 * epoch + sample, epoch, np.zeros(length, np.int32))
    shard.check_integrity()


def test_prompts_that_never_return_leave_in_the_order_of_their_arrival():
    shard = HistoryShard(3, budget_bytes=10 * (4 + ANSWER_OVERHEAD_BYTES + PROMPT_OVERHEAD_BYTES))
    for prompt in range(30):
        shard.add(prompt, prompt, prompt, tokens(1))
    assert [prompt for prompt in range(30) if held(shard, prompt)] == list(range(20, 30))


def test_an_answer_larger_than_the_budget_is_not_kept():
    shard = HistoryShard(3, budget_bytes=2000)
    shard.add(1, 1, 0, tokens(*range(10_000)))
    assert shard.counters().bytes == 0
    assert shard.counters().evicted_tokens == 10_000
    shard.add(1, 2, 0, tokens(1))
    assert held(shard, 1) == {2: (0, [1])}


@pytest.mark.parametrize("seed", range(5))
def test_random_traffic_keeps_the_tables_consistent_and_within_bounds(seed):
    rng = np.random.default_rng(seed)
    shard = HistoryShard(window_epochs=2, budget_bytes=15_000)
    oracle = {}
    for _ in range(600):
        prompt, answer_id = int(rng.integers(6)), int(rng.integers(40))
        step = int(rng.integers(12))
        text = tokens(*rng.integers(0, 50, rng.integers(1, 80)))
        if rng.random() < 0.2:
            shard.set_reward(prompt, answer_id, 1.0)
            continue
        shard.add(prompt, answer_id, step, text)
        oracle[prompt, answer_id] = (step, text.tolist())
        shard.check_integrity()
        for key in range(6):
            found = held(shard, key)
            assert all(oracle[key, name] == answer for name, answer in found.items())
            assert len({step for step, _ in found.values()}) <= 2
    assert shard.counters().evicted_tokens > 0


@pytest.mark.parametrize("length", [1, 500])
def test_the_bytes_accounted_for_cover_the_memory_really_taken(length):
    keys = [int(key) for key in np.random.default_rng(0).integers(1 << 40, 1 << 62, 300)]
    tracemalloc.start()
    shard = roomy()
    before = tracemalloc.get_traced_memory()[0]
    for step in range(3):
        for prompt in keys:
            for sample in range(8):
                shard.add(prompt, (prompt + step) * 64 + sample, 1000 + step, np.zeros(length, np.int32))
    taken = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert taken <= shard.counters().bytes <= 2 * taken
