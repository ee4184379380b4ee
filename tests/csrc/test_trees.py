"""Drafts as trees: their order and shape, what is accepted of them, and when a tree is worth its price."""

import heapq

import numpy as np
import pytest
from rhyme_verl._core import DraftBudget, StepCost

from benchmarks.drafting.trees import TreeDraft
from rhyme_verl.config import RhymeConfig, SpecConfig
from rhyme_verl.histospec.from_config import make_drafter
from tests.helpers.core import Batch, new_index, remember, tokens

PROMPT = [1, 2, 3]
K = 24
PATH = list(range(-1, K - 1))


def tree_drafter(index, off=(), trees=True, vocab_size=None, **spec):
    config = RhymeConfig(spec=SpecConfig(**{"policy": "fixed", "max_draft_tokens": K, "min_acceptance": 0.01} | spec))
    return make_drafter(index, config, vocab_size=vocab_size, trees=trees, **dict.fromkeys(off, False))


class Trees(Batch):
    """Plays the part of an engine that verifies trees; a step takes `seconds(rows, drafted, branches)`."""

    def __init__(self, one, prompts, truths, seconds=lambda rows, drafted, branches: 0.0, now=0.0):
        super().__init__(one, prompts, truths, model_len=1024)
        self.seconds, self.now = seconds, now

    def step(self, max_step_tokens=1 << 30):
        parents = np.full((len(self.slots), 127), 99, np.int16)
        drafts = self.drafter.draft(
            self.rows, self.lengths, self.slots, self.model_len, self.now,
            max_step_tokens=max_step_tokens, parents=parents,
        )  # fmt: skip
        trees = [TreeDraft(draft, row[: len(draft)]) for draft, row in zip(drafts, parents, strict=True)]
        self.now += self.seconds(len(trees), sum(map(len, trees)), any(tree.branches for tree in trees))
        for row, tree in enumerate(trees):
            rest = self.truths[row][self.lengths[row] :].tolist()
            accepted = len(tree.walk(rest[:-1]))
            self.lengths[row] = min(self.lengths[row] + accepted + 1, len(self.truths[row]))
        return trees


def forked(rng, count=6, length=60):
    """Answers that part in many places: random walks over a graph with up to three successors per token."""
    after = rng.integers(10, 40, (40, 3))
    answers = []
    for _ in range(count):
        answer = [int(rng.integers(10, 40))]
        while len(answer) < length:
            answer.append(int(after[answer[-1], rng.choice(3, p=(0.6, 0.3, 0.1))]))
        answers.append(answer)
    return answers


def trained(seed, off=("siblings",), **spec):
    """A drafter of trees that has seen forked answers, and one more answer."""
    rng = np.random.default_rng(seed)
    *past, truth = forked(rng, 20)
    one = tree_drafter(new_index(), off, **spec)
    for number, answer in enumerate(past):
        Trees(one, [[100 + number]], [answer]).run()
    return one, truth


def tree_after(one, context):
    """(token, parent, likelihood) of each token that is drafted after `context`; nothing is learnt."""
    slot = one.open(tokens(context[:1]))
    one.set_context(slot, tokens(context[:-1]), tokens([]))
    arrays = tokens([slot]), tokens([context[-1:]]), tokens([K]), tokens([])
    drafts, parents = np.zeros((1, K), np.int32), np.zeros((1, K), np.int16)
    one.draft_first(*arrays, drafts, tokens([0]), 0.0, max_step_tokens=1 << 30, max_sampled_rows=0, parents=parents)
    found = one.draft_of(slot)
    assert [(token, parent) for token, parent, _ in found] == list(
        zip(drafts[0, : len(found)].tolist(), parents[0, : len(found)].tolist(), strict=True)
    )
    one.close(slot)
    return found


@pytest.mark.parametrize("seed", range(5))
def test_the_most_likely_tokens_are_drafted_first(seed):
    """Against a search in Python that asks what follows each path on its own."""
    one, truth = trained(seed)
    context = [*PROMPT, *truth[:20]]
    found = tree_after(one, context)
    size, floor = len(found), np.float32(0.01)
    trunk = next((i for i, (_, parent, _) in enumerate(found) if parent != i - 1), size)
    assert size == K > trunk > 0

    def children(path):
        return [(np.float32(p), token) for token, parent, p in tree_after(one, [*context, *path]) if parent == -1]

    def candidates(path, likelihood):
        return [(-(likelihood * p), (*path, token)) for p, token in children(path) if likelihood * p >= floor]

    expected, longest, path, likelihood = [], [], (), np.float32(1)
    while found_next := candidates(path, likelihood):
        (likelihood, path), likelihood = found_next[0], -found_next[0][0]
        longest.append((path, likelihood))
    frontier = candidates((), np.float32(1))
    heapq.heapify(frontier)
    while frontier:
        likelihood, path = heapq.heappop(frontier)
        expected.append((path, -likelihood))
        for one_more in candidates(path, -likelihood):
            heapq.heappush(frontier, one_more)
    expected = longest + [entry for entry in expected if entry not in longest]
    paths = []
    for token, parent, likelihood in found:
        before = paths[parent][0] if parent >= 0 else ()
        paths.append(((*before, token), np.float32(likelihood)))
    assert [likelihood for _, likelihood in paths] == [likelihood for _, likelihood in expected[:size]]
    assert dict(paths) == dict(expected[:size])


def test_where_one_token_is_known_to_follow_a_tree_is_the_path():
    past = list(range(10, 60))
    index = new_index()
    remember(index, PROMPT, [past])
    path = Batch(tree_drafter(index, trees=False), [PROMPT], [past])
    tree = Trees(tree_drafter(index), [PROMPT], [past])
    while not path.done:
        assert tree.step() == path.step()
    assert tree.done


@pytest.mark.parametrize("seed", range(3))
def test_the_trunk_is_the_path_that_is_drafted_without_trees(seed):
    index = new_index()
    answers = forked(np.random.default_rng(seed))
    remember(index, PROMPT, answers)
    (path,) = Batch(tree_drafter(index, trees=False), [PROMPT], [answers[0]]).step()
    (tree,) = Trees(tree_drafter(index), [PROMPT], [answers[0]]).step()
    assert len(path) > 2
    assert tree[: len(path)] == path
    assert tree.parents[: len(path)] == PATH[: len(path)]


@pytest.mark.parametrize("policy", ["fixed", "cost_aware"])
@pytest.mark.parametrize("most", [1 << 30, 20, 5, 0])
def test_every_draft_is_a_tree_within_its_bounds(policy, most):
    rng = np.random.default_rng(7)
    index = new_index()
    answers = forked(rng, 12)
    remember(index, PROMPT, answers[:4])
    one = tree_drafter(index, policy=policy, vocab_size=38)
    batch = Trees(one, [PROMPT] * 4, answers[4:8], lambda rows, drafted, branches: 0.01 + 1e-5 * (rows + drafted))
    sizes = []
    while not batch.done:
        trees = batch.step(most)
        sizes.append(sum(map(len, trees)))
        assert not sizes[-1] or 4 + sizes[-1] <= most
        for slot, tree in zip(batch.slots.tolist(), trees, strict=True):
            assert len(tree) <= K
            assert all(-1 <= parent < i for i, parent in enumerate(tree.parents))
            assert len(set(zip(tree.parents, tree, strict=True))) == len(tree), "siblings differ"
            assert max(tree, default=0) < 38
            likelihoods = [likelihood for _, _, likelihood in one.draft_of(slot)]
            assert all(likelihoods[i] <= likelihoods[p] for i, p in enumerate(tree.parents) if p >= 0)
            trunk = next((i for i, parent in enumerate(tree.parents) if parent != i - 1), len(tree))
            assert likelihoods[trunk:] == sorted(likelihoods[trunk:], reverse=True)
            assert min(likelihoods, default=1) >= 0.01
        assert one.check_integrity() == ""
    assert (max(sizes) > 4) == (most > 5)


def test_a_path_may_leave_the_trunk():
    """Two of three earlier answers say 14 after 13; this one says 34, which is on a branch."""
    index = new_index()
    remember(index, PROMPT, [[10, 11, 12, 13, 14, 15, 16, 17]] * 2 + [[10, 11, 12, 13, 34, 35, 36, 37]])
    truth = [10, 11, 12, 13, 34, 35, 36, 37]
    alone = ("siblings", "common")
    tree = Trees(tree_drafter(index, alone, min_acceptance=0.0), [PROMPT], [truth])
    (draft,) = tree.step()
    trunk = [11, 12, 13, 14, 15, 16, 17]
    assert draft[:7] == trunk
    assert draft[7] == 34
    assert draft.walk(truth[1:]) == [0, 1, 2, 7, 10, 15]
    tree.step()
    stats = tree.drafter.stats()
    assert (stats.num_drafts, stats.num_accepted_tokens) == (1, 6)
    path = Batch(tree_drafter(index, alone, trees=False, min_acceptance=0.0), [PROMPT], [truth])
    path.step()
    path.step()
    assert path.drafter.stats().num_accepted_tokens == 3


def test_all_children_that_could_be_accepted_are_counted_with_their_probability():
    one, truth = trained(3, policy="fixed")
    before = one.stats()
    Trees(one, [PROMPT], [truth]).run()
    after = one.stats()
    accepted = sum(after.accepted_by_prediction) - sum(before.accepted_by_prediction)
    verified = sum(after.tokens_by_prediction) - sum(before.tokens_by_prediction)
    last = 1  # the answer's last token is not accepted, although it was drafted
    assert accepted == after.num_accepted_tokens - before.num_accepted_tokens + last
    assert verified > 1.5 * accepted, "rivals that were not accepted count as well"


def test_predicted_acceptance_of_branches_is_the_observed_one():
    one, _ = trained(0)
    early = one.stats()
    rng = np.random.default_rng(0)
    for number, answer in enumerate(forked(rng, 120)):
        Trees(one, [[200 + number]], [answer]).run()
    late = one.stats()
    names = ("tokens_by_prediction", "accepted_by_prediction", "sum_by_prediction")
    count, accepted, predicted = (np.array(getattr(late, name)) - getattr(early, name) for name in names)
    known = count > 200
    assert known.sum() >= 4
    observed = accepted[known] / count[known]
    error = 3 * np.sqrt(observed * (1 - observed) / count[known])
    assert np.all(np.abs(observed - predicted[known] / count[known]) < 0.05 + error)


def test_the_price_of_branching_is_learnt_apart_from_that_of_tokens():
    cost = StepCost()
    for _ in range(300):
        for size in (4, 8, 16, 32):
            cost.observe(size, True, 0.010 + 1e-4 * size)
        cost.observe(16, True, 0.0126, branches=True)
        cost.observe(24, True, 0.0134, branches=True)
    assert cost.seconds(16, True) == pytest.approx(0.0116, rel=0.02)
    assert cost.seconds(16, True, branches=True) - cost.seconds(16, True) == pytest.approx(0.001, rel=0.3)
    assert cost.seconds(8, False, branches=True) == 0.0, "undrafted steps have not been seen"
    for _ in range(4000):
        cost.observe(16, True, 0.0116)
    assert cost.seconds(16, True, branches=True) - cost.seconds(16, True) < 1e-4, "in time, trees are tried again"


def test_a_tree_must_earn_its_price():
    cost = StepCost()
    for _ in range(300):
        for size in (1, 2, 4, 8, 16, 32):
            cost.observe(size, False, 0.010)
            cost.observe(size, True, 0.010)
        cost.observe(8, True, 0.011, branches=True)
    budget = DraftBudget()
    budget.add(0.5)
    assert budget.choose(1, cost)[0] < 0.5
    assert budget.choose(1, cost, branches=True)[0] < 0.5, "50 % more tokens in 10 % more time"
    little = DraftBudget()
    little.add(0.1)
    assert little.choose(1, cost)[0] < 0.1
    assert little.choose(1, cost, branches=True)[0] > 6, "10 % more tokens in 10 % more time: nothing is drafted"


@pytest.mark.parametrize(("price", "least", "most"), [(0.0, 0.9, 1.0), (0.006, 0.9, 1.0), (0.01, 0.0, 0.1)])
def test_trees_are_drafted_where_they_pay(price, least, most):
    """Answers take 8.9 s with trees, and 0.006 s per step more; with paths, 16.5 s."""
    rng = np.random.default_rng(1)
    one = tree_drafter(new_index(), policy="cost_aware", min_acceptance=0.02)
    now, branched, steps = 0.0, 0, 0
    for number, answer in enumerate(forked(rng, 120)):
        batch = Trees(one, [[100 + number]], [answer], lambda rows, drafted, branches: 0.01 + price * branches, now)
        while not batch.done:
            (tree,) = batch.step()
            if number >= 60:
                branched += tree.branches
                steps += 1
        one.close(batch.slots[0])
        now = batch.now
    assert least <= branched / steps <= most


def test_parents_are_for_trees_and_trees_need_them():
    row, arrays = np.zeros((1, 9), np.int32), (tokens([3]), tokens([-1]), 9, 0.0)
    tree, path = tree_drafter(new_index()), tree_drafter(new_index(), trees=False)
    for one, parents in ((tree, None), (path, np.zeros((1, 8), np.int16)), (tree, np.zeros((0, 8), np.int16))):
        with pytest.raises(ValueError, match="parents"):
            one.draft(row, *arrays, parents=parents)
    with pytest.raises(TypeError):
        tree.draft(row, *arrays, parents=np.zeros((1, 8), np.int32))
    assert tree.draft(row, *arrays, parents=np.zeros((1, 8), np.int16)) == [[]]
