"""Drafts that are trees, in vLLM's CPU engine: answers and log-probs are the model's, and faults are noticed."""

import pytest
import torch

from rhyme_verl.histospec.tree.cpu_attention import TreeAttention
from rhyme_verl.histospec.tree.tree import RowTree
from tests.helpers.engine import engine, generate, hf_model, proposer_of, quickstart_prompts, remember, stats
from tests.histospec.test_exactness import (
    LAW_TOKENS,
    NUM_SAMPLES,
    PROMPT,
    SAMPLINGS,
    chi_square_p_value,
    exact_law,
    tiny_model,  # noqa: F401
)
from tools.cpu_job.policy import SHIPPED_POLICY

pytestmark = pytest.mark.engine

RHYME = {"spec": {"policy": "fixed", "min_acceptance": 0.01, "trees": True}}
TREE = RowTree(start=5, computed=10, tokens=[7, 8, 9, 7], parents=[-1, 0, -1, 2])  # 7 8 and 9 7


def test_a_tree_is_walked_and_knows_places_and_ancestors():
    assert TREE.positions().tolist() == [11, 12, 11, 12]
    assert TREE.ancestors().int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 0, 0, 1, 0],
        [1, 0, 0, 1, 1],
    ]
    assert TREE.walk([9, 1, 1, 7, 3]) == ([9, 7, 3], [2, 3])
    assert TREE.walk([7, 7, 1, 1, 1]) == ([7, 7], [0])
    assert TREE.walk([1, 2, 3, 4, 5]) == ([1], [])
    assert TREE.branches
    assert not RowTree(0, 0, [7, 8], [-1, 0]).branches


@pytest.fixture(scope="module")
def prompts():
    return quickstart_prompts(12)


@pytest.fixture(scope="module")
def undrafted(prompts):
    """Greedy answers, and three sampled ones per prompt for the history."""
    with engine(SHIPPED_POLICY) as llm:
        greedy = generate(llm, prompts, temperature=0.0, max_tokens=120)
        history = [generate(llm, prompts, temperature=1.0, max_tokens=120) for _ in range(3)]
    return [list(output.token_ids) for output in greedy], history


def drafted(prompts, history, fault=None):
    """Greedy answers with trees; what was verified; and sampled answers with log-probs."""
    with engine(SHIPPED_POLICY, RHYME, max_draft_tokens=32) as llm:
        for step, answers in enumerate(history):
            for prompt, answer in zip(prompts, answers, strict=True):
                remember(llm, prompt, answer.token_ids, step)
        verifier = proposer_of(llm)._verifier
        seen = {"trees": 0, "moves": 0}
        for layer in verifier._layers[:1]:
            move = layer.move

            def counted(row, sources, targets, move=move):
                seen["moves"] += len(sources)
                move(row, sources, targets)

            layer.move = counted
        prepare = verifier._runner._prepare_inputs

        def prepared(*arguments, **others):
            result = prepare(*arguments, **others)
            seen["trees"] += len(verifier._step)
            return result

        verifier._runner._prepare_inputs = prepared
        if fault:
            fault(verifier)
        greedy = [list(one.token_ids) for one in generate(llm, prompts, temperature=0.0, max_tokens=120)]
        sampled = None if fault else generate(llm, prompts, temperature=1.0, max_tokens=120, logprobs=0)
        counts = stats(llm)
        assert counts["drafting_off"] == 0
    return greedy, {**counts, **seen}, sampled


def test_greedy_answers_are_the_undrafted_ones_and_logprobs_are_the_models(prompts, undrafted):
    greedy, history = undrafted
    found, counts, sampled = drafted(prompts, history)
    assert found == greedy
    assert counts["trees"] > 100
    assert counts["moves"] > 50
    assert counts["num_accepted_tokens"] > 300
    model = hf_model(SHIPPED_POLICY)
    for prompt, output in zip(prompts, sampled, strict=True):
        ids = torch.tensor([*prompt, *output.token_ids])
        with torch.no_grad():
            logprobs = model(ids[None]).logits[0].log_softmax(-1)[len(prompt) - 1 : -1]
        expected = logprobs.gather(-1, ids[len(prompt) :, None])[:, 0]
        reported = torch.tensor(
            [step[token].logprob for step, token in zip(output.logprobs, output.token_ids, strict=True)]
        )
        torch.testing.assert_close(reported, expected, atol=1e-4, rtol=0)


def nothing_moves(verifier):
    for layer in verifier._layers:
        layer.move = lambda row, sources, targets: None


def positions_by_slot(verifier):
    verifier._fault.setattr(
        RowTree, "positions", lambda tree: torch.arange(tree.computed + 1, tree.computed + 1 + len(tree.tokens))
    )


def causal_mask(verifier):
    verifier._fault.setattr(
        RowTree, "ancestors", lambda tree: torch.ones(1 + len(tree.tokens), 1 + len(tree.tokens)).tril().bool()
    )


@pytest.mark.parametrize("fault", [nothing_moves, positions_by_slot, causal_mask])
def test_a_fault_would_be_noticed(prompts, undrafted, monkeypatch, fault):
    greedy, history = undrafted

    def plant(verifier):
        verifier._fault = monkeypatch
        fault(verifier)

    found, counts, _ = drafted(prompts, history, plant)
    assert counts["trees"] > 100
    assert found != greedy


def test_samples_follow_the_models_exact_law(tiny_model):  # noqa: F811
    arguments = {"skip_tokenizer_init": True, "max_num_seqs": 256}
    with engine(tiny_model, RHYME, max_draft_tokens=24, **arguments) as llm:
        for sampling in SAMPLINGS:
            for output in generate(llm, [PROMPT] * 12, max_tokens=8, ignore_eos=True, **sampling):
                remember(llm, PROMPT, output.token_ids)
            before = stats(llm)
            outputs = generate(llm, [PROMPT] * NUM_SAMPLES, max_tokens=LAW_TOKENS + 2, ignore_eos=True, **sampling)
            accepted = stats(llm)["num_accepted_tokens"] - before["num_accepted_tokens"]
            assert accepted > NUM_SAMPLES / 4
            samples = [list(output.token_ids)[:LAW_TOKENS] for output in outputs]
            assert chi_square_p_value(samples, exact_law(tiny_model, **sampling)) > 1e-3, sampling


def test_requests_that_cannot_be_walked_get_paths(prompts, undrafted):
    greedy, history = undrafted
    with engine(SHIPPED_POLICY, RHYME, max_draft_tokens=32) as llm:
        for prompt, answer in zip(prompts, history[0], strict=True):
            remember(llm, prompt, answer.token_ids)
        answers = generate(llm, prompts[:4], temperature=0.0, max_tokens=40, repetition_penalty=1.2)
        assert stats(llm)["drafting_off"] == 0
        assert stats(llm)["num_accepted_tokens"] > 0
    with engine(SHIPPED_POLICY) as llm:
        expected = generate(llm, prompts[:4], temperature=0.0, max_tokens=40, repetition_penalty=1.2)
    assert [one.token_ids for one in answers] == [one.token_ids for one in expected]


def test_attention_with_a_window_is_refused():
    class Layer:
        class impl:
            sliding_window, alibi_slopes, logits_soft_cap, sinks, kv_cache_dtype = 64, None, 0, None, "auto"

    with pytest.raises(RuntimeError, match="spec.trees"):
        TreeAttention(Layer, dict)
