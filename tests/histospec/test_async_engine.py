"""An engine that drafts asynchronously: when it does, what it looks like to vLLM, and what it waits for."""

import itertools
import logging

import pytest
from vllm import SamplingParams, TokensPrompt

from examples.quickstart.policy import SHIPPED_POLICY
from rhyme_verl.histospec import async_patch
from rhyme_verl.histospec.async_patch import ASYNC_PROPOSER
from rhyme_verl.histospec.engine_arguments import PROPOSER
from tests.helpers import strict_device
from tests.helpers.engine import (
    core_of,
    engine,
    generate,
    proposer_of,
    quickstart_prompts,
    remember,
    runner_of,
    stats,
)
from tests.helpers.strict_device import Event

pytestmark = pytest.mark.engine

GREEDY = {"temperature": 0.0, "max_tokens": 100, "ignore_eos": True}
DRAFT_ALWAYS = {"spec": {"policy": "fixed", "min_acceptance": 0.05}}
WAVE = 8  # prompts that come at once
STEPS_BETWEEN = 6  # waves


@pytest.fixture(scope="module")
def prompts():
    return quickstart_prompts(32)


@pytest.fixture(scope="module")
def greedy(prompts):
    with engine(SHIPPED_POLICY) as llm:
        return [list(output.token_ids) for output in generate(llm, prompts, **GREEDY)]


def remember_all(llm, prompts, answers):
    for prompt, answer in zip(prompts, answers, strict=True):
        remember(llm, prompt, answer)


def token_ids(outputs):
    return [list(output.token_ids) for output in outputs]


@pytest.mark.parametrize("setting", [None, True])
def test_vllms_config_reads_as_ours_and_the_runner_has_its_own(setting):
    with engine(SHIPPED_POLICY, DRAFT_ALWAYS, 8, asynchronous=True, async_scheduling=setting) as llm:
        speculative = llm.llm_engine.vllm_config.speculative_config
        runner = runner_of(llm)
        assert (speculative.method, speculative.model) == ("custom_class", ASYNC_PROPOSER)
        assert speculative.num_speculative_tokens == 8
        assert not runner.vllm_config.speculative_config.use_ngram_gpu(), "vLLM keeps its torch.compile cache"
        assert runner.speculative_config.use_ngram_gpu()
        assert runner.speculative_config.num_speculative_tokens == 8


@pytest.mark.parametrize("reason", ["spec.async_scheduling=off", "vLLM's model runner has no such_name"])
def test_where_it_cannot_be_asynchronous_it_is_synchronous_and_logs_why(prompts, greedy, monkeypatch, caplog, reason):
    settings = DRAFT_ALWAYS
    if reason == "spec.async_scheduling=off":
        settings = {"spec": DRAFT_ALWAYS["spec"] | {"async_scheduling": "off"}}
    else:
        monkeypatch.setattr(async_patch, "RUNNER_NAMES", ("NgramProposerGPU", "such_name"))
    with strict_device.installed(), caplog.at_level(logging.INFO, logger="rhyme_verl"):
        with engine(SHIPPED_POLICY, settings, 8, asynchronous=False, async_scheduling=None) as llm:
            assert llm.llm_engine.vllm_config.speculative_config.model == PROPOSER
            remember_all(llm, prompts, greedy)
            assert token_ids(generate(llm, prompts, **GREEDY)) == greedy
            assert stats(llm)["num_accepted_tokens"] > 0.5 * sum(map(len, greedy))
    logged = [record.getMessage() for record in caplog.records if record.name == async_patch.__name__]
    assert logged == [f"HistoSpec drafts synchronously: {reason}"]


def test_a_job_that_asks_for_synchronous_scheduling_gets_it_and_no_message(caplog):
    with strict_device.installed(), caplog.at_level(logging.INFO, logger="rhyme_verl"):
        with engine(SHIPPED_POLICY, DRAFT_ALWAYS, 8, asynchronous=False) as llm:
            assert llm.llm_engine.vllm_config.speculative_config.model == PROPOSER
    assert not [record for record in caplog.records if record.name == async_patch.__name__]


def test_a_count_that_disagrees_with_the_schedulers_ends_drafting_and_no_rollout(prompts, greedy, caplog):
    with engine(SHIPPED_POLICY, DRAFT_ALWAYS, 8, asynchronous=True) as llm:
        remember_all(llm, prompts, greedy)
        proposer = proposer_of(llm)
        set_context = proposer.drafter.set_context

        class OneTokenTooMany:
            """The drafter, except that the context of the last request begins with a token too many."""

            def __getattr__(self, name):
                return getattr(drafter, name)

            def set_context(self, slot, context, stops):
                is_last = list(context) == prompts[-1]
                set_context(slot, [7, *context] if is_last else context, stops)

        drafter, proposer.drafter = proposer.drafter, OneTokenTooMany()
        with caplog.at_level(logging.INFO, logger="rhyme_verl"):
            assert token_ids(generate(llm, prompts, **GREEDY)) == greedy
        assert stats(llm)["drafting_off"] == 1
    (record,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    length = len(prompts[-1])
    assert "stays off in this engine" in record.getMessage()
    assert "has" in str(record.exc_info[1]) and "but the scheduler counts" in str(record.exc_info[1]), length


def waits_of(llm, monkeypatch, run):
    """Return for each step of `run()` but the first whether the host waited for the step before it to end."""
    waits, launched, has_waited = [], None, False
    device, runner = strict_device.device, runner_of(llm)
    synchronize, forward = Event.synchronize, runner._model_forward

    def recorded_synchronize(event):
        nonlocal has_waited
        has_waited |= launched is not None and event.position > launched
        synchronize(event)

    def recorded_forward(*args, **kwargs):
        nonlocal launched, has_waited
        if launched is not None:
            waits.append(has_waited)
        launched, has_waited = device.next_position(), False
        return forward(*args, **kwargs)

    monkeypatch.setattr(Event, "synchronize", recorded_synchronize)
    monkeypatch.setattr(runner, "_model_forward", recorded_forward)
    run()
    monkeypatch.undo()
    return waits


@pytest.mark.parametrize("changes", [{"max_step_tokens": 16}, {"min_acceptance": 1.0}], ids=["no room", "no match"])
def test_a_step_without_drafts_is_launched_before_the_one_before_it_has_ended(prompts, greedy, monkeypatch, changes):
    settings = {"spec": DRAFT_ALWAYS["spec"] | changes}
    prompts, greedy = prompts[:16], greedy[:16]
    with engine(SHIPPED_POLICY, settings, 8, asynchronous=True, enable_prefix_caching=False) as llm:
        if "max_step_tokens" in changes:
            remember_all(llm, prompts, greedy)
        said = []
        waits = waits_of(llm, monkeypatch, lambda: said.extend(token_ids(generate(llm, prompts, **GREEDY))))
        assert said == greedy
        assert stats(llm)["num_draft_tokens"] == 0
        assert stats(llm)["num_generated_tokens"] > 0.9 * sum(map(len, greedy))
    first = "max_step_tokens" not in changes  # where drafts are possible, the first step finds out that there are none
    assert waits == [first] + [False] * (GREEDY["max_tokens"] - 2)


def test_a_step_with_drafts_waits_for_the_one_before_it(prompts, greedy, monkeypatch):
    with engine(SHIPPED_POLICY, DRAFT_ALWAYS, 8, asynchronous=True, enable_prefix_caching=False) as llm:
        remember_all(llm, prompts, greedy)
        waits = waits_of(llm, monkeypatch, lambda: generate(llm, prompts, **GREEDY))
        assert strict_device.device.to_device <= sum(waits) <= len(waits)
        assert sum(waits) > 0.7 * len(waits)


def play(llm, prompts):
    """Add prompts in waves while earlier ones run.

    Returns the numbers of scheduled tokens and of placeholders for drafts in each step, the requests that got none
    although they ran, and in which step after it came each prompt's first token did.
    """
    scheduler = core_of(llm).scheduler
    schedule, steps, starved, came, first = scheduler.schedule, [], [], {}, {}

    def recorded(*args, **kwargs):
        output = schedule(*args, **kwargs)
        placeholders = sum(1 + len(tokens) for tokens in output.scheduled_spec_decode_tokens.values())
        steps.append((output.total_num_scheduled_tokens, placeholders))
        for request in scheduler.running:
            ends = request.num_output_tokens + 1 >= request.max_tokens  # with the token that is on its way
            if request.request_id not in output.num_scheduled_tokens and not ends:
                starved.append(request.request_id)
        return output

    scheduler.schedule = recorded
    waiting = list(enumerate(prompts))
    while waiting or llm.llm_engine.has_unfinished_requests():
        if len(steps) % STEPS_BETWEEN == 0:
            for number, prompt in waiting[:WAVE]:
                params = SamplingParams(detokenize=False, **GREEDY)
                llm.llm_engine.add_request(str(number), TokensPrompt(prompt_token_ids=prompt), params)
                came[number] = len(steps)
            del waiting[:WAVE]
        for output in llm.llm_engine.step():
            first.setdefault(int(output.request_id), len(steps) - came[int(output.request_id)])
    scheduler.schedule = schedule
    return steps, starved, first


@pytest.mark.parametrize(("budget", "policy"), [pytest.param(64, "fixed", marks=pytest.mark.slow), (128, "cost_aware")])
def test_no_running_request_is_starved_and_no_prompt_waits_for_drafts(prompts, greedy, budget, policy):
    arguments = {"max_num_batched_tokens": budget, "enable_prefix_caching": False, "asynchronous": True}
    with engine(SHIPPED_POLICY, **arguments) as llm:
        _, _, undrafted = play(llm, prompts)
    settings = {"spec": {"policy": policy, "min_acceptance": 0.01}}
    with engine(SHIPPED_POLICY, settings, 24, **arguments) as llm:
        ticks = itertools.count()
        proposer_of(llm).clock = lambda: 0.01 * next(ticks)  # as if all steps took the same time
        remember_all(llm, prompts, greedy)
        steps, starved, drafted = play(llm, prompts)
        assert stats(llm)["num_accepted_tokens"] > 5 * len(prompts)
    assert not starved
    assert max(tokens for tokens, _ in steps) <= budget
    assert 0 < max(placeholders for _, placeholders in steps) <= budget - budget // 8
    assert drafted.keys() == undrafted.keys() == set(range(len(prompts)))
    late = {number: drafted[number] - undrafted[number] for number in drafted}
    assert max(late.values()) <= 1, late
