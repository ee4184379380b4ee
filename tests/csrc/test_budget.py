"""The step-cost model and the draft budget that spends by it."""

import numpy as np
import pytest
from rhyme_verl._core import DraftBudget, StepCost

from tests.helpers.core import drafter as new_drafter
from tests.helpers.core import new_index, remember


def learnt(seconds, sizes=(1, 2, 4, 8, 16, 32, 64, 128, 256, 512), sampling=0.0):
    cost = StepCost()
    for size in sizes:
        for _ in range(20):
            cost.observe(size, False, seconds(size))
            cost.observe(size, True, seconds(size) + sampling)
    return cost


def threshold(budget, num_rows, cost, **options):
    return budget.choose(num_rows, cost, **options)[0]


def test_cost_is_interpolated_extrapolated_and_never_falls():
    cost = learnt(lambda n: 0.010 + 0.001 * n)
    for size in (1, 3, 24, 200, 512, 1024):
        assert cost.seconds(size, False) == pytest.approx(0.010 + 0.001 * size, rel=0.01)
    noisy = learnt(lambda n: 0.020 if n == 8 else 0.010)
    costs = [noisy.seconds(size, True) for size in range(1, 600)]
    assert costs == sorted(costs)


def test_smaller_steps_than_any_seen_cost_less_but_not_nothing():
    cost = learnt(lambda n: 0.010 + 0.001 * n, sizes=(64, 128))
    assert cost.seconds(32, False) == pytest.approx(0.042, rel=0.01)
    assert cost.seconds(1, False) == pytest.approx(0.5 * cost.seconds(64, False))


def test_a_drafted_step_of_unknown_cost_is_expected_to_wait_as_others_did():
    cost = StepCost()
    for _ in range(20):
        for size in (64, 192):
            cost.observe(size, False, 0.010)
    cost.observe_wait(64, 0.002)
    assert cost.seconds(64, True) == pytest.approx(0.012)
    assert cost.seconds(192, True) == pytest.approx(0.014), "a larger step waits longer"
    for _ in range(20):
        cost.observe(64, True, 0.011)
    assert cost.seconds(64, True) == pytest.approx(0.011), "what was measured counts"


def test_one_stall_does_not_spoil_the_estimate():
    cost = learnt(lambda n: 0.010)
    cost.observe(16, False, 30.0)
    assert cost.seconds(16, False) < 0.012


def test_a_small_step_that_was_held_up_says_nothing_about_larger_ones():
    cost = learnt(lambda n: 0.001 * n, sizes=(8, 16, 32))
    for drafted in (False, True):
        for _ in range(5):
            cost.observe(2, drafted, 12.0)  # the engine was paused before what followed it
        assert cost.seconds(2, drafted) <= cost.seconds(8, drafted)
        assert cost.seconds(16, drafted) == pytest.approx(0.016, rel=0.01)


def test_a_slow_first_step_is_forgiven():
    cost = StepCost()
    for seconds in (2.0, 0.010, 0.011, 0.010):
        cost.observe(16, True, seconds)
    assert cost.seconds(16, True) == pytest.approx(0.010, rel=0.05)


def test_a_drafted_step_smaller_than_any_seen_is_tried():
    cost = StepCost()
    for _ in range(20):
        cost.observe(64, False, 0.064)
        cost.observe(8, False, 0.010)
        cost.observe(512, True, 0.512)
    assert cost.seconds(12, True) == pytest.approx(cost.seconds(12, False))


def test_a_drafted_step_between_what_is_known_costs_something_in_between():
    cost = StepCost()
    for _ in range(20):
        cost.observe(64, False, 0.012)
        cost.observe(1024, True, 0.100)
    assert cost.seconds(64 + 960 // 4, True) == pytest.approx(0.034)


def test_a_size_that_seemed_too_dear_is_tried_again_and_believed_at_once():
    cost = StepCost()
    for _ in range(20):
        cost.observe(16, True, 0.010)
        cost.observe(64, True, 0.050)  # while the machine was busy
    for _ in range(100):
        cost.observe(16, True, 0.010)
    assert cost.seconds(64, True) > 0.040
    for _ in range(4000):
        cost.observe(16, True, 0.010)
    assert cost.seconds(64, True) == pytest.approx(0.010, rel=0.05)
    cost.observe(64, True, 0.030)
    assert cost.seconds(64, True) == pytest.approx(0.030, rel=0.05)


def test_rows_that_sampling_pads_have_a_price_of_their_own():
    cost, rng = StepCost(), np.random.default_rng(2)
    for _ in range(2000):
        rows, tokens = int(rng.choice([8, 16, 32])), int(rng.integers(1, 40))
        sampled = rows * (1 + int(rng.integers(1, 25)))
        sampled = max(sampled, rows + tokens)
        cost.observe(rows, False, 0.010 + 1e-4 * rows)
        cost.observe(rows + tokens, True, 0.010 + 1e-4 * (rows + tokens) + 5e-5 * (sampled - rows - tokens), sampled)
    for sampled in (40, 200, 600):
        true = 0.010 + 1e-4 * 40 + 5e-5 * (sampled - 40)
        assert cost.seconds(40, True, sampled) == pytest.approx(true, rel=0.05)
    # One row drafts 24 tokens that are sure, of 32 rows: worth it if only scheduled tokens count.
    budget = DraftBudget()
    for place in range(1, 25):
        budget.add(0.99, place=place)
    assert threshold(budget, 32, cost) < 1.0 == threshold(budget, 32, cost, pads_rows=True)


def test_noise_and_stalls_do_not_end_drafting_that_pays():
    """64 rows, padded: against the best threshold for the true cost, and against no drafts."""
    rng, cost, rows = np.random.default_rng(3), StepCost(), 64
    spent, best, undrafted = np.zeros(2), np.zeros(2), np.zeros(2)  # expected tokens, true seconds
    for step in range(600):
        lengths = np.arange(1, 17)
        likelihoods = rng.beta(3.0, 1.0, rows)[:, None] ** lengths
        budget = DraftBudget()
        for row in likelihoods:
            for place, likelihood in enumerate(row, start=1):
                budget.add(likelihood, place=place)

        def outcome(lowest, likelihoods=likelihoods):
            kept = likelihoods >= lowest
            tokens = rows + int(kept.sum())
            sampled = max(tokens, rows * (1 + int(kept.sum(axis=1).max())))
            seconds = 0.012 + 3e-5 * max(0, tokens - 128) + 2e-6 * (sampled - tokens)
            return tokens, sampled, np.array([rows + likelihoods[kept].sum(), seconds])

        lowest = 2.0 if step < 4 or step % 64 == 0 else threshold(budget, rows, cost, pads_rows=True)
        tokens, sampled, spends = outcome(lowest)
        seconds = spends[1] * rng.lognormal(0.0, 0.3) + (30.0 if rng.random() < 0.003 else 0.0)
        cost.observe(tokens, tokens > rows, seconds, sampled)
        if step >= 300:
            candidates = [outcome(t)[2] for t in (2.0, 0.9, 0.7, 0.5, 0.3, 0.2, 0.1, 0.05)]
            spent += spends
            best += max(candidates, key=lambda found: found[0] / found[1])
            undrafted += candidates[0]
    rate, most, least = (tokens / seconds for tokens, seconds in (spent, best, undrafted))
    assert most > 1.5 * least
    assert rate > 0.9 * most


def budget_of(likelihoods):
    budget = DraftBudget()
    for likelihood in likelihoods:
        budget.add(likelihood)
    return budget


def test_free_verification_takes_every_draft_and_dear_verification_none():
    likelihoods = [0.9, 0.5, 0.2, 0.05]
    assert threshold(budget_of(likelihoods), 4, learnt(lambda n: 0.010)) <= 0.05
    assert threshold(budget_of(likelihoods), 4, learnt(lambda n: 0.001 * n)) > 0.9
    assert threshold(budget_of(likelihoods), 4, StepCost()) <= 0.05, "nothing known yet: try"


def test_under_a_bound_the_tokens_that_are_worth_most_are_taken():
    free = learnt(lambda n: 0.010)
    budget = budget_of([0.9] * 3 + [0.5] * 4 + [0.1] * 5)
    assert budget.choose(4, free, max_tokens=0) == (1.0, 0), "nothing is allowed"
    lowest, spare = budget.choose(4, free, max_tokens=5)
    assert 0.5 < lowest <= 0.9, "all of the best"
    assert spare == 2, "and two of the next"
    lowest, spare = budget.choose(4, free, max_tokens=7)
    assert 0.1 < lowest <= 0.5 and spare == 0
    assert budget.choose(4, free, max_tokens=100) == budget.choose(4, free)
    dear = learnt(lambda n: 0.010 if n <= 7 else 0.1)
    assert budget.choose(4, dear, max_tokens=5)[1] == 0, "not beyond what pays"


def test_the_threshold_is_where_expected_tokens_per_second_peak():
    cost = learnt(lambda n: 0.010 + 0.0005 * n)
    rng = np.random.default_rng(1)
    for _ in range(50):
        rows = int(rng.integers(1, 40))
        likelihoods = np.sort(rng.random(rows * 5))[::-1]
        lowest = threshold(budget_of(likelihoods.tolist()), rows, cost)
        kept = likelihoods[likelihoods >= lowest]
        counts = np.arange(len(likelihoods) + 1)
        rates = (rows + np.append(0, np.cumsum(likelihoods))) / (0.010 + 0.0005 * (rows + counts))
        chosen = (rows + kept.sum()) / (0.010 + 0.0005 * (rows + len(kept)))
        assert chosen >= 0.97 * rates.max()


@pytest.mark.parametrize(("seconds", "drafts"), [(lambda n: 0.010, True), (lambda n: 0.0005 * n, False)])
@pytest.mark.parametrize("joining", [0, 5], ids=["", "prompts join"])
def test_the_drafter_stops_drafting_where_it_does_not_pay(seconds, drafts, joining):
    """Seven tenths of a past answer are right; a batch of 16 under a free and under a proportional step cost.

    In every drafted step a prompt of `joining` tokens is prefilled for an answer that ends at once.
    """
    index = new_index()
    prompt = np.array([1, 2, 3], np.int32)
    rng = np.random.default_rng(0)
    past = rng.integers(10, 500, 400)
    remember(index, prompt, [past])
    drafter = new_drafter(index, policy="cost_aware", max_draft_tokens=8, off=["siblings", "common"])
    truth = np.where(rng.random((16, 400)) < 0.7, past, 600)
    slots = np.array([drafter.open(prompt) for _ in range(16)], np.int32)
    rows = np.concatenate([np.tile(prompt, (16, 1)), truth], axis=1).astype(np.int32)
    lengths, now, late, step_tokens = np.full(16, 4, np.int32), 0.0, [], 16
    while lengths.max() < 380:
        drafted = drafter.draft(rows, lengths, slots, 1000, now, step_tokens=step_tokens)
        if lengths.max() > 200:
            late.append(sum(map(len, drafted)))
        step_tokens = 16 + sum(map(len, drafted))
        if joining and step_tokens > 16:
            drafter.close(drafter.open(prompt))
            step_tokens += joining
        now += seconds(step_tokens)
        for row, draft in enumerate(drafted):
            accepted = 0
            while accepted < len(draft) and draft[accepted] == rows[row, lengths[row] + accepted]:
                accepted += 1
            lengths[row] += accepted + 1
    assert (np.mean(late) > 8) == drafts
    assert (np.mean(late) < 2) != drafts
