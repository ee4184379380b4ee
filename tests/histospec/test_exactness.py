"""Drafting changes no distribution: greedy output, samples against an exact law, log-probs against Hugging Face's."""

import itertools

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from examples.quickstart.policy import SHIPPED_POLICY
from tests.helpers.engine import engine, generate, hf_model, quickstart_prompts, remember, stats

pytestmark = pytest.mark.engine

VOCABULARY = 8
NUM_SAMPLES = 10_000
LAW_TOKENS = 3  # the law of the first three tokens is compared
PROMPT = [1, 2, 3, 4]
SAMPLINGS = ({"temperature": 1.0}, {"temperature": 0.7}, {"temperature": 1.0, "top_k": 5, "top_p": 0.9})


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory):
    """A random Qwen2 over 8 tokens, sharp enough that tokens differ in probability."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(3)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=0.15,
        eos_token_id=0,
        bos_token_id=None,
    )
    path = tmp_path_factory.mktemp("tiny")
    Qwen2ForCausalLM(config).save_pretrained(path)
    return path


def exact_law(path, temperature, top_k=VOCABULARY, top_p=1.0):
    """Probability of each of the 8**3 first-three-token answers to PROMPT, shape [8, 8, 8]."""
    answers = torch.tensor(list(itertools.product(range(VOCABULARY), repeat=LAW_TOKENS)))
    inputs = torch.cat([torch.tensor(PROMPT).expand(len(answers), -1), answers], dim=1)
    with torch.no_grad():
        logits = hf_model(path)(inputs).logits[:, len(PROMPT) - 1 : -1] / temperature
    logits[logits < logits.topk(top_k).values[..., -1:]] = -torch.inf
    probabilities, order = logits.softmax(-1).sort(descending=True)
    excluded = (probabilities.cumsum(-1) - probabilities >= top_p).gather(-1, order.argsort())
    logprobs = logits.masked_fill(excluded, -torch.inf).log_softmax(-1)
    return logprobs.gather(-1, answers[..., None]).sum(dim=(1, 2)).exp().reshape(3 * (VOCABULARY,)).double().numpy()


def chi_square_p_value(samples, law):
    counts = np.zeros(law.shape)
    np.add.at(counts, tuple(np.array(samples).T), 1)
    if counts[law == 0.0].any():
        return 0.0
    observed, expected = counts[law > 0.0], law[law > 0.0] / law.sum() * len(samples)
    rare = expected < 5
    if rare.any():
        observed = np.append(observed[~rare], observed[rare].sum())
        expected = np.append(expected[~rare], expected[rare].sum())
    return chisquare(observed, expected).pvalue


@pytest.mark.parametrize(
    ("drafted", "asynchronous"),
    [
        pytest.param(False, False, id="undrafted", marks=pytest.mark.slow),
        pytest.param(True, False, id="synchronous", marks=pytest.mark.slow),
        pytest.param(True, True, id="asynchronous"),
    ],
)
def test_samples_follow_the_models_exact_law(tiny_model, drafted, asynchronous):
    rhyme = {"spec": {"policy": "fixed", "min_acceptance": 0.0}} if drafted else None
    arguments = {"skip_tokenizer_init": True, "max_num_seqs": 256}
    with engine(tiny_model, rhyme, asynchronous=asynchronous, **arguments) as llm:
        for sampling in SAMPLINGS:
            if drafted:
                before = stats(llm)
                for output in generate(llm, [PROMPT] * 12, max_tokens=8, ignore_eos=True, **sampling):
                    remember(llm, PROMPT, output.token_ids)
            outputs = generate(llm, [PROMPT] * NUM_SAMPLES, max_tokens=LAW_TOKENS + 2, ignore_eos=True, **sampling)
            if drafted:
                after = stats(llm)
                tokens = after["num_draft_tokens"] - before["num_draft_tokens"]
                accepted = after["num_accepted_tokens"] - before["num_accepted_tokens"]
                assert tokens > NUM_SAMPLES
                assert NUM_SAMPLES / 5 < accepted < tokens
            samples = [list(output.token_ids)[:LAW_TOKENS] for output in outputs]
            assert chi_square_p_value(samples, exact_law(tiny_model, **sampling)) > 1e-3, sampling
            # The same test must notice a small distortion, or it proves nothing.
            distorted = sampling | {"temperature": 0.9 * sampling["temperature"]}
            assert chi_square_p_value(samples, exact_law(tiny_model, **distorted)) < 1e-6, sampling


@pytest.fixture(scope="module")
def prompts():
    return quickstart_prompts(12)


@pytest.fixture(scope="module")
def undrafted(prompts):
    """Greedy answers, and three sampled ones per prompt for the history."""
    with engine(SHIPPED_POLICY) as llm:
        greedy = generate(llm, prompts, temperature=0.0, max_tokens=200)
        history = [generate(llm, prompts, temperature=1.0, max_tokens=200) for _ in range(3)]
    return [list(output.token_ids) for output in greedy], history


@pytest.mark.parametrize("asynchronous", [False, True], ids=["synchronous", "asynchronous"])
def test_greedy_output_is_identical_and_logprobs_are_the_models(prompts, undrafted, asynchronous):
    greedy, history = undrafted
    rhyme = {"spec": {"policy": "fixed", "min_acceptance": 0.1}}
    with engine(SHIPPED_POLICY, rhyme, max_draft_tokens=12, asynchronous=asynchronous) as llm:
        for step, answers in enumerate(history):
            for prompt, answer in zip(prompts, answers, strict=True):
                remember(llm, prompt, answer.token_ids, step)
        drafted = generate(llm, prompts, temperature=0.0, max_tokens=200)
        sampled = generate(llm, prompts, temperature=1.0, max_tokens=200, logprobs=0)
        counts = stats(llm)
    assert [list(output.token_ids) for output in drafted] == greedy
    assert counts["drafting_off"] == 0
    assert counts["num_accepted_tokens"] > 300
    assert counts["num_accepted_tokens"] < counts["num_draft_tokens"]
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
