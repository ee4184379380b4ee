"""One shard of the history: replacing, rewards, changes, window and budget, against a plain oracle."""

import math
import tracemalloc

import numpy as np
import pytest

from rhyme_verl.history import store
from rhyme_verl.history.store import ANSWER_OVERHEAD_BYTES, PROMPT_OVERHEAD_BYTES, HistoryShard
from rhyme_verl.request_id import RequestTag
from tests.helpers.answers import add
from tests.helpers.core import new_index


def tokens(*values):
    return np.array(values, np.int32)


def roomy(window_epochs=3):
    return HistoryShard(window_epochs, budget_bytes=1 << 40)


def named(rollout, sample=0):
    """The id of an answer of a rollout."""
    return RequestTag((f"uid {rollout}", sample), 1).answer_key


def held(shard, prompt_key):
    """Answers of a prompt: id -> (rollout, tokens)."""
    batch = shard.changes(prompt_key, since_version=-1)
    if batch is None:
        return {}
    texts = np.split(batch.tokens, np.cumsum(batch.lengths)[:-1])
    return {
        int(answer_id): (int(rollout), text.tolist())
        for answer_id, rollout, text in zip(batch.ids, batch.rollouts, texts, strict=True)
    }


def test_a_later_turn_replaces_the_same_answer():
    shard = roomy()
    add(shard, 1, 10, 0, tokens(5, 6))
    add(shard, 1, 11, 0, tokens(7))
    add(shard, 1, 10, 1, tokens(5, 6, 8, 9))
    assert held(shard, 1) == {10: (0, [5, 6, 8, 9]), 11: (0, [7])}
    assert [answer.step for _, answer in shard.answers()] == [1, 0]
    counters = shard.counters()
    assert (counters.prompts, counters.answers, counters.tokens) == (1, 2, 5)
    shard.check_integrity()


def test_a_part_that_comes_late_does_not_replace_the_whole_answer():
    shard = roomy()
    add(shard, 1, 10, 5, np.arange(1250))
    seen = shard.changes(1, 0).version
    add(shard, 1, 10, 4, np.arange(900))
    add(shard, 1, 10, 5, np.arange(1250))  # sent twice
    assert [(answer.step, answer.num_tokens) for _, answer in shard.answers()] == [(5, 1250)]
    assert shard.changes(1, seen) is None
    shard.check_integrity()


def test_an_answer_that_is_generated_anew_replaces_a_longer_one_with_its_reward():
    """verl issues groups that were in flight again after a resumption, under the same names."""
    shard = roomy()
    add(shard, 1, 10, 5, tokens(5, 6, 7, 8))
    shard.set_reward(1, 10, 1.0)
    add(shard, 1, 10, 6, tokens(5, 9))
    assert held(shard, 1) == {10: (5, [5, 9])}
    assert [math.isnan(answer.reward) for _, answer in shard.answers()] == [True], "that was the other text's"
    add(shard, 1, 10, 6, tokens(7))
    assert held(shard, 1) == {10: (5, [5, 9])}, "what a loop has left of it under the same weights"
    shard.set_reward(1, 10, 0.0)
    add(shard, 1, 10, 6, tokens(5, 9, 10))
    assert [(answer.num_tokens, answer.reward) for _, answer in shard.answers()] == [(3, 0.0)]
    shard.check_integrity()


def test_changes_are_what_came_after_a_version():
    shard = roomy()
    assert shard.changes(1, 0) is None
    add(shard, 1, 10, 0, tokens(5))
    add(shard, 1, 11, 0, tokens(6, 7))
    first = shard.changes(1, 0)
    assert first.ids.tolist() == [10, 11]
    assert first.tokens.tolist() == [5, 6, 7]
    assert first.lengths.tolist() == [1, 2]
    assert (first.tokens.dtype, first.lengths.dtype, first.rollouts.dtype) == (np.int32, np.int32, np.int64)
    assert first.ids.dtype == np.uint64
    add(shard, 2, 12, 0, tokens(1))
    assert shard.changes(1, first.version) is None
    shard.set_reward(1, 11, 0.5)
    assert shard.changes(1, first.version) is None, "engines need no rewards"
    add(shard, 1, 11, 1, tokens(6, 8))
    second = shard.changes(1, first.version)
    assert (second.ids.tolist(), second.tokens.tolist()) == ([11], [6, 8])
    assert shard.changes(1, second.version) is None


def test_a_shard_started_later_reports_everything_to_those_who_knew_its_predecessor():
    old = HistoryShard(3, 1 << 40, first_version=1000)
    add(old, 1, 10, 0, tokens(5))
    seen = old.changes(1, 0).version
    new = HistoryShard(3, 1 << 40, first_version=2000)
    new.add(1, next(old.answers())[1])
    assert new.changes(1, seen).ids.tolist() == [10]


def test_a_shard_whose_clock_was_set_back_reports_everything_to_those_who_knew_its_predecessor():
    old = HistoryShard(3, 1 << 40, first_version=2000)
    add(old, 1, 10, 0, tokens(5))
    seen = old.changes(1, 0).version
    new = HistoryShard(3, 1 << 40, first_version=1000)
    add(new, 1, 11, 1, tokens(6))
    assert new.changes(1, seen).ids.tolist() == [11]


def test_a_reward_finds_its_answer_or_waits_for_it(monkeypatch):
    shard = roomy()
    shard.set_reward(1, 10, 1.0)
    shard.set_reward(1, 99, 0.25)
    assert len(shard._waiting_rewards) == 2
    add(shard, 1, 10, 0, tokens(5))
    add(shard, 1, 11, 0, tokens(6))
    shard.set_reward(1, 11, 0.5)
    assert [answer.reward for _, answer in shard.answers()] == [1.0, 0.5]
    assert len(shard._waiting_rewards) == 1
    add(shard, 1, 11, 1, tokens(6, 7))  # its end comes after its reward
    assert [answer.reward for _, answer in shard.answers()] == [1.0, 0.5]
    monkeypatch.setattr(store, "MAX_WAITING_REWARDS", 3)
    for answer_id in range(5):
        shard.set_reward(2, answer_id, 0.0)
    assert len(shard._waiting_rewards) == 3


def test_a_prompt_keeps_its_latest_rollouts_whatever_versions_their_answers_end_under():
    shard = roomy(window_epochs=2)
    for rollout in range(3):
        for sample in range(8):
            add(shard, 1, named(rollout, sample), 10 * rollout + sample % 3, tokens(rollout, sample))
    add(shard, 2, named(0), 0, tokens(1))  # another prompt's first rollout stays
    assert held(shard, 1) == {
        named(rollout, sample): (10 * rollout, [rollout, sample]) for rollout in (1, 2) for sample in range(8)
    }
    assert len(held(shard, 2)) == 1
    assert shard.counters().evicted_tokens == 0, "only the budget evicts"
    add(shard, 1, named(0, 8), 30, tokens(7))  # late, of a rollout that has left
    assert named(0, 8) not in held(shard, 1) and len(held(shard, 1)) == 16
    shard.check_integrity()


def test_rollouts_of_one_version_are_two_and_the_engine_orders_them_as_the_store_does():
    shard, index = roomy(window_epochs=2), new_index(window_epochs=2)
    for rollout in "abc":
        add(shard, 1, named(rollout), 5, tokens(4, 5, 6))
        add(shard, 1, named(rollout, 1), 6, tokens(4, 5))
        batch = shard.changes(1, 0)
        index.update(1, batch.tokens, batch.lengths, batch.rollouts, batch.ids)
        assert index.stats().num_answers == shard.counters().answers == {"a": 2, "b": 4, "c": 4}[rollout]
    assert [held(shard, 1)[named(rollout)][0] for rollout in "bc"] == [6, 7]


def test_a_resumed_shard_tells_rollouts_apart_as_before():
    old, new = roomy(window_epochs=2), roomy(window_epochs=2)
    for rollout, step in (("a", 3), ("b", 3), ("c", 4)):
        add(old, 1, named(rollout), step, tokens(1))
        add(old, 1, named(rollout, 1), step + 1, tokens(2))
    for key, answer in list(old.answers()):
        new.add(key, answer)
    assert held(new, 1).keys() == held(old, 1).keys()
    add(new, 1, named("c", 2), 5, tokens(3))
    assert len(held(new, 1)) == 5


def test_over_the_budget_the_prompt_with_most_answers_loses_its_oldest_one():
    size = 4 * 100 + ANSWER_OVERHEAD_BYTES
    shard = HistoryShard(3, budget_bytes=6 * size + 3 * PROMPT_OVERHEAD_BYTES)
    for prompt, step, rollout in ((1, 7, 10), (1, 5, 11), (2, 5, 20), (3, 4, 30), (3, 6, 31), (1, 6, 12)):
        add(shard, prompt, named(rollout), step, tokens(*range(100)))
    assert shard.counters().evicted_tokens == 0
    add(shard, 2, named(21), 9, tokens(*range(100)))
    kept = [[11, 12], [20, 21], [30, 31]]
    assert [list(held(shard, prompt)) for prompt in (1, 2, 3)] == [list(map(named, rollouts)) for rollouts in kept]
    add(shard, 2, named(22), 9, tokens(*range(100)))  # its own, not those of prompts with fewer answers
    kept[1] = [21, 22]
    assert [list(held(shard, prompt)) for prompt in (1, 2, 3)] == [list(map(named, rollouts)) for rollouts in kept]
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
                assert {rollout for rollout, _ in known.values()} == {epoch - 1}
            for sample in range(samples):
                add(shard, prompt, named(epoch, sample), epoch, np.zeros(length, np.int32))
    shard.check_integrity()


@pytest.mark.parametrize("share", [0.9, 0.5])
@pytest.mark.parametrize("is_shuffled", [False, True])
def test_prompts_return_to_answers_if_the_budget_holds_less_than_one_of_each(share, is_shuffled):
    num_prompts, samples, length = 200, 4, 50
    shard = HistoryShard(3, int(share * num_prompts * (4 * length + ANSWER_OVERHEAD_BYTES + PROMPT_OVERHEAD_BYTES)))
    for epoch in range(5):
        order = np.random.default_rng(epoch if is_shuffled else 0).permutation(num_prompts).tolist()
        returned = 0
        for prompt in order:
            returned += bool(held(shard, prompt))
            for sample in range(samples):
                add(shard, prompt, named((epoch, prompt), sample), epoch, np.zeros(length, np.int32))
        assert returned >= 0.7 * share * num_prompts or epoch == 0
    shard.check_integrity()


def test_prompts_that_never_return_leave():
    shard = HistoryShard(3, budget_bytes=10 * (4 + ANSWER_OVERHEAD_BYTES + PROMPT_OVERHEAD_BYTES))
    for prompt in range(300):
        add(shard, prompt, named(prompt), prompt, tokens(1))
    kept = [prompt for prompt in range(300) if held(shard, prompt)]
    assert len(kept) == 10 and min(kept) > 100


@pytest.mark.parametrize("limit", [1, 5, 12, 1000])
def test_an_engine_gets_the_answers_that_it_keeps(limit):
    shards = [roomy(), HistoryShard(3, budget_bytes=1 << 40, max_prompt_tokens=limit)]
    indices = [new_index(max_tokens_per_prompt=limit) for _ in shards]
    rng, seen = np.random.default_rng(0), 0
    for rollout in range(6):
        for sample in range(3):
            text = tokens(*range(rng.integers(1, 6)))
            for shard in shards:
                add(shard, 1, named(rollout, sample), rollout, text)
        whole, batch = [shard.changes(1, seen) for shard in shards]
        seen = batch.version
        assert whole.version == seen and (len(batch) == 1 or batch.lengths.sum() <= limit)
        for index, one in zip(indices, (whole, batch), strict=True):
            index.update(1, one.tokens, one.lengths, one.rollouts, one.ids)
        everything, sent = [index.stats() for index in indices]
        assert sent.num_answers >= everything.num_answers
        assert limit >= sent.num_tokens >= everything.num_tokens, "an earlier answer may fill what is left"


def test_an_answer_larger_than_the_budget_is_not_kept():
    shard = HistoryShard(3, budget_bytes=2000)
    add(shard, 1, 1, 0, tokens(*range(10_000)))
    assert shard.counters().bytes == 0
    assert shard.counters().evicted_tokens == 10_000
    add(shard, 1, 2, 0, tokens(1))
    assert held(shard, 1) == {2: (0, [1])}


@pytest.mark.parametrize("seed", range(5))
def test_random_traffic_keeps_the_tables_consistent_and_within_bounds(seed):
    rng = np.random.default_rng(seed)
    shard = HistoryShard(window_epochs=2, budget_bytes=8_000)
    oracle = {}
    for _ in range(600):
        prompt, answer_id = int(rng.integers(6)), named(int(rng.integers(8)), int(rng.integers(5)))
        step = int(rng.integers(12))
        text = tokens(*rng.integers(0, 50, rng.integers(1, 80)))
        if rng.random() < 0.2:
            shard.set_reward(prompt, answer_id, 1.0)
            continue
        add(shard, prompt, answer_id, step, text)
        oracle.setdefault((prompt, answer_id), []).append(text.tolist())
        shard.check_integrity()
        for key in range(6):
            found = held(shard, key)
            assert all(answer in oracle[key, name] for name, (_, answer) in found.items())
            rollouts = {name >> 32: rollout for name, (rollout, _) in found.items()}
            assert len(set(rollouts.values())) == len(rollouts) <= 2
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
                add(shard, prompt, named(step, sample), 1000 + step, np.zeros(length, np.int32))
    taken = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert taken <= shard.counters().bytes <= 2 * taken
