"""The drafter: what it drafts, for how long, whom it believes, and how it accounts for what vLLM verified."""

import numpy as np
import pytest

from tests.helpers.core import Batch, drafter, new_index, remember, tokens

PROMPT = [1, 2, 3]
PAST = list(range(10, 60))
ALONE = {"off": ("siblings", "common")}  # history only


def history_of(*answers, **arguments):
    index = new_index()
    remember(index, PROMPT, answers, **arguments)
    return index


def draft(one, slot, prompt, answer, model_len=512):
    row = np.zeros((1, 512), np.int32)
    context = [*prompt, *answer]
    row[0, : len(context)] = context
    return one.draft(row, tokens([len(context)]), tokens([slot]), model_len, 0.0)[0]


def drafts_of(one, answer, prompt=PROMPT):
    return [step[0] for step in Batch(one, [prompt], [answer]).run()]


def test_repeats_a_past_answer():
    answer = list(range(10, 40))
    one = drafter(history_of(answer), min_acceptance=0.0, max_draft_tokens=8, **ALONE)
    assert drafts_of(one, answer) == [answer[1:9], answer[10:18], answer[19:27], answer[28:30]]
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
    one = drafter(history_of(past, past), min_acceptance=0.5, **ALONE)
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
    assert len(drafts_of(one, PAST)) > 14
    for _ in range(60):
        good = drafts_of(one, PAST)
    assert len(good) < 12


def test_drafts_nothing_without_history():
    one = drafter(new_index())
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
    one = drafter(history_of(PAST), min_acceptance=0.0, max_draft_tokens=4, **ALONE)
    without = drafter(history_of(PAST), min_acceptance=0.0, max_draft_tokens=4, off=(*ALONE["off"], "rejoin"))
    steps = len(drafts_of(one, changed))
    assert steps <= 14, "each difference may cost a few steps, not the rest of the answer"
    assert steps <= len(drafts_of(without, changed))


def test_follows_the_majority_between_equals():
    past = [[10, 11, 12, 13, 24, 25], [10, 11, 12, 13, 24, 25], [10, 11, 12, 13, 34, 35]]
    one = drafter(history_of(*past), min_acceptance=0.0, max_draft_tokens=2, **ALONE)
    assert draft(one, one.open(tokens(PROMPT)), PROMPT, [10, 11, 12, 13]) == [24, 25]


def test_learns_whom_to_believe():
    """The token that is common everywhere, or the one of the prompt's own answer: whichever proves right."""
    rng = np.random.default_rng(0)
    common = [50, 51, 52, 53]

    def late_steps(own_answer_is_right):
        index = new_index()
        one = drafter(index, min_acceptance=0.3, off=["siblings"])
        steps = []
        for prompt in range(150):
            turns = [[*rng.integers(100, 10_000, 4).tolist(), *common[:3], 70 + prompt] for _ in range(5)]
            own = [token for turn in turns for token in turn]
            remember(index, [prompt], [own])
            usual = [53 if i % 8 == 7 else token for i, token in enumerate(own)]
            steps.append(len(drafts_of(one, own if own_answer_is_right else usual, [prompt])))
        return np.mean(steps[-30:])

    assert late_steps(own_answer_is_right=True) < 4
    assert late_steps(own_answer_is_right=False) < 6, "all but the first of five turns are foreseen"


def test_new_combinations_of_known_tokens_are_foreseen():
    """What follows depends on a token far back: no context that is counted has been seen, but its parts have."""
    rng = np.random.default_rng(1)
    one = drafter(new_index(), min_acceptance=0.5, off=["siblings"])
    steps = []
    for prompt in range(400):
        mode = int(rng.integers(2))
        answer = [20 + mode]
        for _ in range(12):
            answer += [*rng.integers(100, 110, 4).tolist(), 30, 40 + mode]
        steps.append(len(drafts_of(one, answer, [prompt])))
    assert np.mean(steps[-50:]) < 62, "of 72 tokens, 24 can be foreseen"


def test_predicted_acceptance_is_the_observed_one():
    rng = np.random.default_rng(2)
    index = new_index()
    one = drafter(index, min_acceptance=0.05, off=["siblings"])
    base = rng.integers(10, 2000, (80, 120))
    for epoch in range(12):
        for prompt, past in enumerate(base):
            answer = np.where(rng.random(120) < 0.85, past, rng.integers(10, 2000, 120)).tolist()
            drafts_of(one, answer, [prompt])
            remember(index, [prompt], [answer], epoch)
        if epoch == 5:
            early = one.stats()
    late = one.stats()
    names = ("tokens_by_prediction", "accepted_by_prediction", "sum_by_prediction")
    count, accepted, predicted = (np.array(getattr(late, name)) - getattr(early, name) for name in names)
    known = count > 50
    observed, predicted, count = accepted[known] / count[known], predicted[known] / count[known], count[known]
    assert len(observed) > 4
    assert np.all(np.abs(observed - predicted) < 0.05 + 3 * np.sqrt(observed * (1 - observed) / count))
    assert sum(late.tokens_by_prediction) >= late.num_accepted_tokens


def test_siblings_draft_for_each_other_from_the_first_epoch_on():
    answer = [*range(100, 160)]
    one = drafter(new_index(), min_acceptance=0.0, off=["common"])
    ahead = Batch(one, [PROMPT], [answer])
    for _ in range(40):
        ahead.step()
    behind = Batch(one, [PROMPT], [answer])
    assert len(behind.run()) < 25
    alone = drafter(new_index(), min_acceptance=0.0, **ALONE)
    assert len(drafts_of(alone, answer)) == 59


def test_a_request_drafts_from_its_own_prompt_and_repetitions():
    prompt = [*range(10, 40)]
    one = drafter(new_index(), min_acceptance=0.0, off=["common"])
    assert len(drafts_of(one, [5, 12, 13, 14, *range(15, 40)], prompt)) < 12


def test_finished_siblings_are_forgotten_when_memory_runs_out_or_their_history_comes():
    rng = np.random.default_rng(0)
    index = new_index()
    one = drafter(index, min_acceptance=0.0, off=["common"], max_live_tokens=1000)
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

    one = drafter(new_index(), min_acceptance=0.5, off=["siblings"])
    steps = [len(drafts_of(one, answer(), [prompt])) for prompt in range(40)]
    assert steps[0] > 40
    assert np.mean(steps[20:]) < 30


def test_history_that_arrives_during_the_answer_is_used_at_once():
    index = new_index()
    one = drafter(index, min_acceptance=0.0, **ALONE)
    slot = one.open(tokens(PROMPT))
    assert draft(one, slot, PROMPT, PAST[:10]) == []
    remember(index, PROMPT, [PAST])
    assert draft(one, slot, PROMPT, PAST[:11])[:4] == PAST[11:15]
    remember(index, PROMPT, [[*PAST[:15], 99, 98]], 1)
    assert set(draft(one, slot, PROMPT, PAST[:12])) <= {*PAST, 99, 98}


def test_a_resumed_request_goes_on_where_it_was():
    one = drafter(history_of(PAST), max_draft_tokens=4, min_acceptance=0.0, **ALONE)
    slot = one.open(tokens([*PROMPT, *PAST[:12]]))
    assert draft(one, slot, PROMPT, PAST[:13]) == PAST[13:17]


def test_history_that_arrives_after_a_request_was_resumed_elsewhere_is_used_at_once():
    index = new_index()
    one = drafter(index, max_draft_tokens=4, min_acceptance=0.0, off=["common"])
    slot = one.open(tokens([*PROMPT, *PAST[:12]]), first_prompt_tokens=len(PROMPT))
    assert draft(one, slot, PROMPT, PAST[:13]) == []
    sibling = one.open(tokens(PROMPT))
    assert draft(one, sibling, PROMPT, PAST[:3]) == PAST[3:7], "a sibling meets it"
    other = [7, *PAST[1:20]]
    assert draft(one, slot, PROMPT, [*PAST[:13], 99]) == []
    remember(index, PROMPT, [[*PAST[:13], 99, *other]])
    assert draft(one, slot, PROMPT, [*PAST[:13], 99, 7]) == other[1:5]
    assert one.check_integrity() == ""


@pytest.mark.parametrize("before", ["nothing", "history", "siblings"])
def test_a_prompt_that_begins_with_another_has_its_own_history(before):
    index = new_index()
    one = drafter(index, max_draft_tokens=4, min_acceptance=0.0, off=["common"])
    if before == "history":
        remember(index, PROMPT, [range(300, 340)])
    elif before == "siblings":
        drafts_of(one, range(300, 340))
    longer = [*PROMPT, 4, 5]
    slot = one.open(tokens(longer), first_prompt_tokens=len(longer))
    assert draft(one, slot, longer, PAST[:10]) == []
    remember(index, longer, [PAST])
    assert draft(one, slot, longer, PAST[:11]) == PAST[11:15]
    assert one.check_integrity() == ""


def test_a_preempted_request_is_rebuilt_when_it_returns():
    one = drafter(history_of(PAST), max_draft_tokens=4, min_acceptance=0.0, **ALONE)
    slot = one.open(tokens(PROMPT))
    draft(one, slot, PROMPT, PAST[:12])
    one.close(slot)
    before = one.stats().num_generated_tokens
    slot = one.open(tokens(PROMPT))
    assert draft(one, slot, PROMPT, PAST[:13]) == PAST[13:17]
    assert one.stats().num_generated_tokens == before + 1


def test_a_later_turn_goes_on_in_the_history_of_its_first_prompt():
    trajectory = [*PAST[:20], 900, 901, 902, *PAST[20:]]  # turn 1, a tool's output, turn 2
    one = drafter(history_of(trajectory), max_draft_tokens=4, min_acceptance=0.0, **ALONE)
    second_turn = [*PROMPT, *trajectory[:23]]
    slot = one.open(tokens(second_turn))
    assert draft(one, slot, second_turn, PAST[20:21]) == PAST[21:25]


def test_siblings_meet_in_later_turns_too():
    one = drafter(new_index(), min_acceptance=0.0, off=["common"])
    turn_one, tool, turn_two = PAST[:20], [900, 901], PAST[20:]
    drafts_of(one, turn_one)
    drafts_of(one, turn_two, [*PROMPT, *turn_one, *tool])
    other = [*PROMPT, *range(300, 320), *tool]
    assert len(drafts_of(one, turn_two, other)) < 15


def test_threads_draft_what_one_thread_drafts():
    rng = np.random.default_rng(5)
    base = rng.integers(10, 500, (64, 80))

    def drafts(num_threads):
        index = new_index()
        for prompt, past in enumerate(base):
            remember(index, [prompt], [past.tolist()])
        one = drafter(index, num_threads=num_threads, min_acceptance=0.1)
        truths = np.where(np.random.default_rng(6).random(base.shape) < 0.9, base, 7)
        return Batch(one, [[prompt] for prompt in range(64)], truths.tolist()).run()

    assert drafts(3) == drafts(1)


def test_a_draft_that_was_not_verified_is_not_counted():
    one = drafter(history_of(PAST), min_acceptance=0.0, max_draft_tokens=4, **ALONE)
    slot = one.open(tokens(PROMPT))
    rows = np.zeros((1, 64), np.int32)
    rows[0, : 3 + 20] = [*PROMPT, *PAST[:20]]
    assert one.draft(rows, tokens([4]), tokens([slot]), 512, 0.0) == [PAST[1:5]]
    one.draft(rows, tokens([4]), tokens([-1]), 512, 0.0)  # the row was left out of a step
    one.draft(rows, tokens([5]), tokens([slot]), 512, 0.0)
    assert (one.stats().num_drafts, one.stats().num_generated_tokens) == (0, 2)


@pytest.mark.parametrize("joining", [0, 16])
def test_drafting_begins_where_prompts_join_in_every_step(joining):
    text = list(range(10, 400))
    one = drafter(history_of(text), policy="cost_aware", **ALONE)
    batch = Batch(one, [PROMPT] * 32, [text] * 32)
    drafted = [0]
    for step in range(20):
        scheduled = len(batch.slots) + drafted[-1] + joining
        drafts = one.draft(batch.rows, batch.lengths, batch.slots, 512, step * 0.01, step_tokens=scheduled)
        drafted.append(sum(map(len, drafts)))
        batch.lengths += 1
    assert drafted[-1] > 0


def test_saved_seconds_are_undrafted_steps_spared_less_what_drafts_cost():
    """Undrafted steps take 1 s, steps with drafts 1.5 s: 20 tokens by drafts of 4 take 6 s, not 20."""
    answer = list(range(10, 31))
    one = drafter(history_of(answer), min_acceptance=0.0, max_draft_tokens=4, **ALONE)
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
