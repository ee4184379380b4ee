"""A model with sliding windows: blocks behind a window are freed in time, and no earlier."""

import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM

from tests.helpers.engine import engine, generate, in_both_modes, remember, stats

pytestmark = pytest.mark.engine

WINDOW = 48  # tokens
VOCABULARY = 64


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    """A model of random weights that are large enough for every token in the window to count."""
    torch.manual_seed(1)
    config = MistralConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        sliding_window=WINDOW,
        max_position_embeddings=512,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=None,
    )
    path = tmp_path_factory.mktemp("sliding")
    MistralForCausalLM(config).save_pretrained(path)
    return path


@in_both_modes
def test_rejected_drafts_free_no_block_of_the_window(policy, asynchronous):
    """Without prefix caching, a block that is freed too early is the next one that is used."""
    arguments = {
        "max_model_len": 400,
        "block_size": 16,
        "num_gpu_blocks_override": 60,
        "enable_prefix_caching": False,
        "skip_tokenizer_init": True,
        "asynchronous": asynchronous,
    }
    sampling = {"temperature": 0.0, "max_tokens": 200, "ignore_eos": True, "logprobs": 0}
    prompts = [[(7 * row + 3 * place) % VOCABULARY for place in range(20 + 9 * row)] for row in range(6)]
    with engine(policy, **arguments) as llm:
        expected = generate(llm, prompts, **sampling)
    settings = {"spec": {"policy": "fixed", "min_acceptance": 0.0}}
    with engine(policy, settings, 24, **arguments) as llm:
        for prompt, answer in zip(prompts, expected, strict=True):
            wrong = [(token + (place % 5 == 0)) % VOCABULARY for place, token in enumerate(answer.token_ids)]
            remember(llm, prompt, wrong)
        found = generate(llm, prompts, **sampling)
        counts = stats(llm)
    assert 0 < counts["num_accepted_tokens"] < counts["num_draft_tokens"]
    for one, other in zip(found, expected, strict=True):
        logprobs = [
            [step[token].logprob for step, token in zip(each.logprobs, each.token_ids, strict=True)]
            for each in (one, other)
        ]
        assert list(one.token_ids) == list(other.token_ids)
        assert logprobs[0] == pytest.approx(logprobs[1], abs=1e-4)
