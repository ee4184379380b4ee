"""What rhyme's server asks of vLLM, for every kind of model that verl's users train."""

import importlib
import types

import pytest
from transformers import AutoTokenizer
from verl.workers.config import RolloutConfig

from examples.quickstart.policy import SHIPPED_POLICY
from rhyme_verl.history.vocabulary import vocabulary_of
from rhyme_verl.integration.rollout import RhymeHttpServer

pytestmark = pytest.mark.engine

# Models whose limits are in their config's text part.
MULTIMODAL = {
    "qwen2_vl": "Qwen2VLConfig",
    "qwen2_5_vl": "Qwen2_5_VLConfig",
    "qwen3_vl": "Qwen3VLConfig",
    "qwen3_vl_moe": "Qwen3VLMoeConfig",
    "qwen3_5": "Qwen3_5Config",
    "gemma3": "Gemma3Config",
    "internvl": "InternVLConfig",
    "glm4v": "Glm4vConfig",
}


def config_of(module):
    return getattr(importlib.import_module(f"transformers.models.{module}"), MULTIMODAL[module])()


def engine_kwargs(hf_config, given=None, rhyme=None, **rollout):
    """What the server passes to vLLM, after verl's own checks, as in a job's Ray actor."""
    server = object.__new__(RhymeHttpServer)
    server.config = RolloutConfig(name="rhyme", custom={"rhyme": rhyme or {}}, **rollout)
    server.model_config = types.SimpleNamespace(hf_config=hf_config)
    server.replica_world_size = 1
    server._validate_configs()
    kwargs = dict(given or {})
    server._preprocess_engine_kwargs(kwargs)
    return kwargs


@pytest.mark.parametrize("module", MULTIMODAL)
def test_models_whose_limits_are_in_their_text_config_start(module):
    kwargs = engine_kwargs(config_of(module))
    assert kwargs["speculative_config"]["method"] == "custom_class"
    assert "max_model_len" not in kwargs, "the model's length is verl's business"
    tokenizer = AutoTokenizer.from_pretrained(SHIPPED_POLICY)
    assert vocabulary_of(tokenizer, config_of(module)).size > 10_000


@pytest.mark.parametrize("given", [None, {"cudagraph_mode": "PIECEWISE"}, '{"cudagraph_mode": "NONE"}'])
def test_the_jobs_graphs_are_passed_on(given):
    """A mode that the job does not name is chosen in the worker (histospec/cuda_graphs.py)."""
    kwargs = engine_kwargs(config_of("qwen2_vl"), {"compilation_config": given} if given else None)
    assert kwargs.get("compilation_config") == given


@pytest.mark.parametrize("given", [None, {"own": 1}, '{"own": 1}'])
def test_the_jobs_own_additional_config_is_kept(given):
    kwargs = engine_kwargs(config_of("qwen2_vl"), {"additional_config": given})["additional_config"]
    assert kwargs.pop("rhyme")["spec"]["enabled"]
    assert kwargs == ({"own": 1} if given else {})
