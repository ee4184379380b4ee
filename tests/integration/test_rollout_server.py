"""What rhyme's server asks of vLLM, for every kind of model that verl's users train, and what it makes of requests."""

import asyncio
import importlib
import logging
import os
import types

import numpy as np
import pytest
import ray
from rhyme_verl._core import prompt_key
from transformers import AutoTokenizer
from verl.workers.config import RolloutConfig
from verl.workers.rollout.replica import RolloutMode

from examples.quickstart.policy import SHIPPED_POLICY
from rhyme_verl.config import HistoryConfig, RhymeConfig
from rhyme_verl.histopipe.lengths_file import FILE
from rhyme_verl.histopipe.router import HistoPipeRouter
from rhyme_verl.histopipe.scheduler import Job
from rhyme_verl.history.server_history import ReplicaHistory
from rhyme_verl.history.vocabulary import vocabulary_of
from rhyme_verl.integration.engine_client import QuietEngine
from rhyme_verl.integration.rollout import RhymeHttpServer
from rhyme_verl.request_id import RequestTag
from rhyme_verl.telemetry.logs import LogOnce
from rhyme_verl.telemetry.rollout_stats import RolloutStats
from tests.helpers.async_engine import async_engine
from tests.helpers.checkpoints import save_checkpoint
from tests.helpers.engine import quickstart_prompts
from tests.helpers.ray_node import start_ray

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


def test_variables_that_would_keep_vllm_from_drafting_are_changed_for_its_engines(monkeypatch, caplog):
    monkeypatch.setenv("VLLM_PLUGINS", "mine")
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    engine_kwargs(config_of("qwen2_vl"), rhyme={"spec": {"enabled": False}})
    assert (os.environ["VLLM_PLUGINS"], os.environ["VLLM_USE_V2_MODEL_RUNNER"]) == ("mine", "1")
    with caplog.at_level("INFO"):
        for _ in range(2):
            engine_kwargs(config_of("qwen2_vl"))
    assert os.environ["VLLM_PLUGINS"] == "mine,rhyme_async_drafting,rhyme_cpu_sampling"
    assert os.environ["VLLM_USE_V2_MODEL_RUNNER"] == "0"
    assert caplog.text.count("HistoSpec needs other variables") == 1


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


@pytest.fixture(scope="module")
def cluster():
    start_ray(num_cpus=2)
    yield
    ray.shutdown()


def serving(engine):
    """A server as it is after its start, on a running engine."""
    server = object.__new__(RhymeHttpServer)
    server.config = RolloutConfig(name="rhyme", max_model_len=256, response_length=64)
    server.model_config = types.SimpleNamespace(lora_rank=0, lora={}, processor=None)
    server.engine = QuietEngine(engine)
    server.replica_rank, server.global_steps = 0, 3
    server._disaggregation_role, server._pd_decode_peers = "null", []
    server._admitting, server._submission_paused, server._rejecting = 0, False, False
    server._rhyme, server._log_once = RhymeConfig(), LogOnce(logging.getLogger("rhyme_verl"))
    server._stats = RolloutStats(None, 0)
    tokenizer = AutoTokenizer.from_pretrained(SHIPPED_POLICY)
    server._history = ReplicaHistory(HistoryConfig(), vocabulary_of(tokenizer, engine.model_config.hf_config))
    return server


def test_lengths_are_saved_before_verl_goes_on_after_a_checkpoint(cluster, tmp_path):
    server = object.__new__(RhymeHttpServer)
    server.replica_rank, server.rollout_mode, server.global_steps = 0, RolloutMode.HYBRID, 0
    server._history, server._stats = None, RolloutStats(None, 0)
    router = HistoPipeRouter.remote({"a": None}, {})
    settings = Job(batch_size=8, max_running=64, max_tokens=100, checkpoints=str(tmp_path))
    ray.get(router.configure.remote(settings, {}, None))

    def learn(self):
        self._scheduler.lengths.observe(np.ones(8, np.uint64), np.full(8, 100), np.zeros(8, bool), 1)

    ray.get(router.__ray_call__.remote(learn))
    save_checkpoint(tmp_path / "global_step_1")

    async def scenario():
        await server.rhyme_set_router(router)
        await server.set_global_steps(1, reason="an argument of a later verl")

    with pytest.raises(TypeError, match="reason"):  # verl's own method gets it
        asyncio.run(scenario())
    assert (tmp_path / "global_step_1" / FILE).is_file()


def test_an_answer_in_several_requests_is_one_even_if_one_of_them_is_rejected(cluster):
    async def scenario():
        root, other = quickstart_prompts(2)
        async with async_engine() as engine:
            server = serving(engine)

            async def generate(prompt):
                output = await server.generate(prompt, {"max_tokens": 8, "ignore_eos": True}, f"{len(prompt)}")
                return list(output.token_ids)

            first = await generate(root)
            server._submission_paused = server._rejecting = True
            assert await generate([*root, *first]) == []
            server._submission_paused = server._rejecting = False
            rest = await generate([*root, *first])
            await generate(other)
            counts = server._stats.flush(3, {})
            assert (counts["answers"], counts["tokens"]) == (2, 24)
            await server._history._client.drain(30)
            (batch,), _ = await server._history._client.changes({prompt_key(np.array(root, np.int32)): 0})
            assert batch.tokens.tolist() == first + rest and len(batch) == 1

    asyncio.run(scenario())


def test_a_rewritten_context_is_not_remembered_and_stop_strings_are_said_once(cluster, caplog):
    async def scenario():
        known, rewritten = quickstart_prompts(2)
        async with async_engine() as engine:
            server = serving(engine)
            for prompt, first in ((known, len(known)), (rewritten, 0)):
                tag = RequestTag(("uid", 0), prompt_tokens=first)
                for turn in range(2):
                    settings = {"max_tokens": 8, "ignore_eos": True, "stop": ["no such text"]}
                    output = await server.generate(prompt, settings, tag.append_to(f"{first} {turn}"))
                    assert len(output.token_ids) == 8
            await server._history._client.drain(30)
            keys = {prompt_key(np.array(prompt, np.int32)): 0 for prompt in (known, rewritten)}
            batches, _ = await server._history._client.changes(keys)
            assert [batch.prompt_key for batch in batches] == list(keys)[:1]

    asyncio.run(scenario())
    assert caplog.text.count("requests with stop strings get no drafts") == 1
