"""Two outputs a request for verl, and streams for everybody else."""

import asyncio
import os
from functools import partial

import pytest
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.exceptions import EngineDeadError

from rhyme_verl.integration.engine_client import QuietEngine
from rhyme_verl.telemetry.rollout_stats import RolloutStats
from tests.helpers.async_engine import async_engine, outputs_of
from tests.helpers.engine import quickstart_prompts
from tests.helpers.processes import find

pytestmark = pytest.mark.engine
LONG = 180  # tokens: an answer that does not end by itself before the test interferes


def test_a_request_costs_two_outputs_says_the_same_and_can_be_aborted():
    async def scenario():
        prompts = quickstart_prompts(4)
        async with async_engine() as llm:
            stats = RolloutStats(None, 0)
            quiet = QuietEngine(llm, stats.running)
            for prompt in prompts:
                plain = (await outputs_of(llm, prompt, "plain", seed=5))[-1]
                first, last = await outputs_of(quiet, prompt, "quiet", seed=5, prompt_logprobs=0)
                assert not first.finished and last.finished
                assert list(last.outputs[0].token_ids) == list(plain.outputs[0].token_ids)
                assert len(last.outputs[0].token_ids) == 64
                assert last.outputs[0].finish_reason == "length"
                assert chosen_logprobs(last) == pytest.approx(chosen_logprobs(plain), abs=1e-5)
                assert len(last.prompt_logprobs) == len(prompt)

            together = await asyncio.gather(
                *(outputs_of(quiet, prompt, f"{index}") for index, prompt in enumerate(prompts)),
                outputs_of(llm, prompts[0], "stream", output_kind=RequestOutputKind.DELTA),
            )
            assert [len(outputs) for outputs in together[:-1]] == [2] * 4
            assert len(together[-1]) > 20, "who streams from the same engine still does"
            one = await outputs_of(quiet, prompts[0], "short", max_tokens=1)
            assert [output.finished for output in one] == [True]
            assert len(one[0].outputs[0].token_ids) == len(one[0].outputs[0].logprobs) == 1
            streaming = await outputs_of(QuietEngine(llm, stats.running, streams=True), prompts[0], "all")
            assert len(streaming) > 20
            await outputs_of(quiet, prompts[0], "counted", on_first=partial(is_running, stats, 1))
            await is_running(stats, 0)
            await aborts(quiet, prompts[0])
            await is_running(stats, 0)
            await dies(quiet, prompts[0])

    asyncio.run(scenario())


async def is_running(stats, count):
    assert stats.num_running == count


def chosen_logprobs(output):
    part = output.outputs[0]
    assert len(part.logprobs) == len(part.token_ids)
    return [position[token].logprob for position, token in zip(part.logprobs, part.token_ids, strict=True)]


async def aborts(quiet, prompt):
    """An aborted request keeps what it has said, log-probs included, whoever aborts it and when."""

    async def abort_later(seconds):
        await asyncio.sleep(seconds)
        await quiet.abort("it")

    for seconds in (0.0, 0.02, 0.05):
        outputs = await outputs_of(quiet, prompt, "it", on_first=lambda s=seconds: abort_later(s), max_tokens=LONG)
        part = outputs[-1].outputs[0]
        assert part.finish_reason == "abort"
        assert 1 <= len(part.token_ids) < LONG
        assert len(chosen_logprobs(outputs[-1])) == len(part.token_ids)
        assert list(outputs[0].outputs[0].token_ids) == list(part.token_ids[:1])

    pause = quiet.pause_generation  # as verl does for new weights
    outputs = await outputs_of(quiet, prompt, "it", on_first=pause, max_tokens=LONG)
    assert outputs[-1].outputs[0].finish_reason == "abort"
    await quiet.resume_generation()
    assert len((await outputs_of(quiet, prompt, "next"))[-1].outputs[0].token_ids) == 64


async def dies(quiet, prompt):
    """When the engine's process dies, its requests fail and do not wait."""
    (core,) = find(os.getpid(), "VLLM::EngineCore")

    async def kill():
        core.kill()

    for on_first in (kill, None):
        with pytest.raises(EngineDeadError):
            await asyncio.wait_for(outputs_of(quiet, prompt, "last", on_first, max_tokens=LONG), 60)
