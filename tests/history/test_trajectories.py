"""Requests of one trajectory are recognised by what they say."""

import numpy as np

from rhyme_verl.history import trajectories
from rhyme_verl.history.trajectories import ServedTrajectories, prefix_hashes

ROOT = [1, 2, 3]


def tokens(*values):
    return np.array(values, np.int32)


def test_a_later_turn_continues_the_trajectory_it_begins_with():
    known = ServedTrajectories()
    first = known.begin(tokens(*ROOT))
    known.end(first, tokens(*ROOT, 10, 11))
    later = known.begin(tokens(*ROOT, 10, 11, 90, 91))  # 90, 91: the tool's answer
    assert later is first
    known.end(later, tokens(*ROOT, 10, 11, 90, 91, 12))
    third = known.begin(tokens(*ROOT, 10, 11, 90, 91, 12, 92))
    assert (third.answer_id, third.root_len, third.prompt_key) == (first.answer_id, 3, first.prompt_key)


def test_a_resumed_request_continues_from_exactly_what_was_aborted():
    known = ServedTrajectories()
    first = known.begin(tokens(*ROOT))
    known.end(first, tokens(*ROOT, 10, 11))
    assert known.begin(tokens(*ROOT, 10, 11)).answer_id == first.answer_id


def test_siblings_and_other_prompts_are_trajectories_of_their_own():
    known = ServedTrajectories()
    first = known.begin(tokens(*ROOT))
    sibling = known.begin(tokens(*ROOT))
    assert first.answer_id != sibling.answer_id
    assert first.prompt_key == sibling.prompt_key
    known.end(first, tokens(*ROOT, 10, 11))
    known.end(sibling, tokens(*ROOT, 10, 12))
    assert known.begin(tokens(*ROOT, 10, 12, 5)).answer_id == sibling.answer_id
    other = known.begin(tokens(*ROOT, 10))  # longer, but not by the whole answer
    assert other.root_len == 4
    assert other.prompt_key != first.prompt_key
    assert known.begin(tokens(*ROOT, 10, 11, 5)).answer_id == first.answer_id


def test_two_siblings_that_said_the_same_are_continued_once_each():
    known = ServedTrajectories()
    both = [known.begin(tokens(*ROOT)) for _ in range(2)]
    for trajectory in both:
        known.end(trajectory, tokens(*ROOT, 10))
    later = [known.begin(tokens(*ROOT, 10, 5)) for _ in range(3)]
    assert {one.answer_id for one in later[:2]} == {one.answer_id for one in both}
    assert later[2].root_len == 5


def test_the_longest_continuation_is_taken():
    known = ServedTrajectories()
    short, long = known.begin(tokens(*ROOT)), known.begin(tokens(*ROOT))
    known.end(short, tokens(*ROOT, 10))
    known.end(long, tokens(*ROOT, 10, 11, 12))
    assert known.begin(tokens(*ROOT, 10, 11, 12, 13)).answer_id == long.answer_id


def test_memory_is_bounded_and_what_ended_longest_ago_goes_first(monkeypatch):
    monkeypatch.setattr(trajectories, "MAX_CONTEXTS", 3)
    monkeypatch.setattr(trajectories, "MAX_ALIKE", 2)
    known = ServedTrajectories()
    begun = {}
    for root in (1, 2, 3, 4):
        begun[root] = known.begin(tokens(root))
        known.end(begun[root], tokens(root, 10))
    assert known.begin(tokens(1, 10, 5)).root_len == 3, "forgotten"
    known.end(known.begin(tokens(2, 10, 5)), tokens(2, 10, 5, 6))
    known.end(known.begin(tokens(5)), tokens(5, 10))
    assert known.begin(tokens(3, 10)).root_len == 2, "forgotten"
    assert known.begin(tokens(2, 10, 5, 6)).answer_id == begun[2].answer_id
    for _ in range(3):
        known.end(known.begin(tokens(6)), tokens(6, 10))
    assert [known.begin(tokens(6, 10)).root_len for _ in range(3)] == [1, 1, 2]


def test_prefix_hashes_tell_prefixes_apart_and_agree_across_sequences():
    rng = np.random.default_rng(0)
    text = rng.integers(0, 150_000, 5000).astype(np.int32)
    whole = prefix_hashes(text)
    assert len(set(whole.tolist())) == 5001
    assert prefix_hashes(text[:100]).tolist() == whole[:101].tolist()
    seen = {int(whole[-1])}
    for _ in range(2000):
        place, other = rng.integers(0, 5000, 2)
        changed = text.copy()
        changed[[place, other]] = changed[[other, place]]
        changed[place] ^= 1
        seen.add(int(prefix_hashes(changed)[-1]))
    assert len(seen) == 2001
