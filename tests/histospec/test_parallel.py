"""HistoSpec in engines of several ranks: one rank drafts for all, every data-parallel engine drafts and is counted."""

import asyncio
import contextlib
import dataclasses

import numpy as np
import pytest
from rhyme_verl._core import prompt_key

from examples.quickstart.policy import SHIPPED_POLICY
from rhyme_verl.history.answers import Answer, AnswerBatch
from rhyme_verl.history.feed import AnswerPublisher
from rhyme_verl.histospec.engine_arguments import speculative_config
from rhyme_verl.integration.engine_client import QuietEngine, call_all_engines
from tests.helpers.async_engine import async_engine, outputs_of
from tests.helpers.engine import engine, generate, in_both_modes, quickstart_prompts
from tools import cpu_async

pytestmark = [pytest.mark.engine, pytest.mark.slow]

GREEDY = {"temperature": 0.0, "max_tokens": 96}
DRAFTING = {
    "speculative_config": speculative_config(8),
    "additional_config": {"rhyme": {"spec": {"policy": "fixed", "min_acceptance": 0.1}}},
}
SYNCHRONOUS = {
    "async_scheduling": False,
    "worker_extension_cls": "rhyme_verl.integration.worker_extension.RhymeCpuWorkerExtension",
}
ASYNCHRONOUS = {"worker_extension_cls": "tests.helpers.async_worker.AsyncWorkerExtension"}


@pytest.fixture(scope="module")
def prompts():
    return quickstart_prompts(8)


@pytest.fixture(scope="module")
def answers(prompts):
    """What one rank says, greedily."""
    with engine(SHIPPED_POLICY) as llm:
        return [list(output.token_ids) for output in generate(llm, prompts, **GREEDY)]


@contextlib.contextmanager
def feed(host):
    publisher = AnswerPublisher(host)
    yield publisher
    publisher.close()


def publish(publisher, prompts, answers):
    for name, (prompt, tokens) in enumerate(zip(prompts, answers, strict=True)):
        held = Answer(name, 0, np.array(tokens, np.int32).tobytes(), 1.0)
        publisher.publish(AnswerBatch.of(prompt_key(np.array(prompt, np.int32)), 0, [held]))


async def run(llm, prompts, answers, host):
    """Bind all engines, publish the answers, and return what is said now and the counters of each worker."""
    quiet = QuietEngine(llm)
    with feed(host) as publisher:
        publisher.allow(await call_all_engines(llm, "rhyme_feed_key"))
        bound = await publisher.accept(call_all_engines(llm, "rhyme_bind", dataclasses.asdict(publisher.address)))
        publish(publisher, prompts, answers)
        while any(one and one["history_answers"] < len(prompts) for one in await call_all_engines(llm, "rhyme_stats")):
            await asyncio.sleep(0.05)
        said = await asyncio.gather(
            *(outputs_of(quiet, prompt, str(index), **GREEDY, ignore_eos=False) for index, prompt in enumerate(prompts))
        )
        return bound, [list(one[-1].outputs[0].token_ids) for one in said], await call_all_engines(llm, "rhyme_stats")


@in_both_modes
def test_tensor_parallel_ranks_verify_what_one_of_them_drafts(prompts, answers, monkeypatch, request, asynchronous):
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")  # a core for each rank
    if asynchronous:
        cpu_async.install()  # for the config; the workers' extension does it for them
        request.addfinalizer(cpu_async.uninstall)

    async def scenario():
        mode = ASYNCHRONOUS if asynchronous else SYNCHRONOUS
        # Its longest sequences end at the model's length, near which vLLM's own drafters stop.
        longest = max(map(len, prompts)) + GREEDY["max_tokens"]
        async with async_engine(tensor_parallel_size=2, max_model_len=longest, **DRAFTING, **mode) as llm:
            if asynchronous:
                assert await call_all_engines(llm, "rhyme_is_asynchronous") == [True, True]
            bound, said, stats = await run(llm, prompts, answers, host=None)
            assert bound == [True, False]
            assert said == answers, "greedy output is that of one rank"
            assert stats[1] == {}
            assert stats[0]["drafting_off"] == 0
            assert stats[0]["num_accepted_tokens"] > 0.7 * sum(map(len, answers))

    asyncio.run(scenario())


def test_every_data_parallel_engine_drafts_and_is_counted(prompts, answers):
    async def scenario():
        async with async_engine(data_parallel_size=2, **DRAFTING, **SYNCHRONOUS) as llm:
            bound, said, stats = await run(llm, prompts, answers, host="127.0.0.1")
            assert bound == [True, True]
            assert said == answers
            assert [one["history_answers"] for one in stats] == [len(prompts)] * 2
            assert min(one["num_accepted_tokens"] for one in stats) > 0
            assert sum(one["num_generated_tokens"] for one in stats) > 0.9 * sum(map(len, answers))

    asyncio.run(scenario())
