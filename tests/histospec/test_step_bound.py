"""What drafts may bring a step to: they starve no request, delay no prompt and stay within sampling's memory."""

import contextlib
from functools import partial
from types import SimpleNamespace

import pytest
from vllm import SamplingParams, TokensPrompt
from vllm.config import CUDAGraphMode
from vllm.v1.sample.sampler import Sampler

from rhyme_verl.histospec import proposer
from rhyme_verl.histospec.from_config import make_drafter
from rhyme_verl.histospec.step_bound import step_bound
from tests.helpers.engine import engine, generate, quickstart_prompts, remember, stats
from tools.cpu_job.policy import SHIPPED_POLICY

pytestmark = pytest.mark.engine

GREEDY = {"temperature": 0.0, "max_tokens": 120, "ignore_eos": True}
NUM_PROMPTS = 32
PROMPTS_AT_ONCE = 8
STEPS_BETWEEN = 6


@pytest.fixture(scope="module")
def prompts():
    return quickstart_prompts(NUM_PROMPTS)


@contextlib.contextmanager
def recorded_steps(llm):
    """Yield a list that gets, for every step: requests that run, tokens scheduled for each, drafts among them."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    schedule, steps = scheduler.schedule, []

    def recording(*arguments, **keywords):
        output = schedule(*arguments, **keywords)
        running = [request.request_id for request in scheduler.running]
        steps.append((running, dict(output.num_scheduled_tokens), dict(output.scheduled_spec_decode_tokens)))
        return output

    scheduler.schedule = recording
    try:
        yield steps
    finally:
        scheduler.schedule = schedule


def play(llm, prompts):
    """Add prompts in groups while earlier ones run; returns the steps, and in how many each prompt was prefilled."""
    came, prefilled, waiting = {}, {}, list(enumerate(prompts))
    with recorded_steps(llm) as steps:
        while waiting or llm.llm_engine.has_unfinished_requests():
            if waiting and len(steps) % STEPS_BETWEEN == 0:
                for number, prompt in waiting[:PROMPTS_AT_ONCE]:
                    params = SamplingParams(detokenize=False, **GREEDY)
                    llm.llm_engine.add_request(str(number), TokensPrompt(prompt_token_ids=list(prompt)), params)
                    came[number] = len(steps)
                del waiting[:PROMPTS_AT_ONCE]
            for output in llm.llm_engine.step():
                number = int(output.request_id)
                prefilled.setdefault(number, len(steps) - came[number])
    return steps, prefilled


@pytest.mark.parametrize(("budget", "policy"), [(64, "fixed"), (128, "cost_aware")])
def test_no_running_request_is_starved_and_no_prompt_waits_for_drafts(prompts, budget, policy):
    with engine(SHIPPED_POLICY, max_num_batched_tokens=budget, enable_prefix_caching=False) as llm:
        answers = [list(output.token_ids) for output in generate(llm, prompts, **GREEDY)]
        _, undrafted = play(llm, prompts)
    settings = {"spec": {"policy": policy, "min_acceptance": 0.01}}
    with engine(SHIPPED_POLICY, settings, 24, max_num_batched_tokens=budget, enable_prefix_caching=False) as llm:
        for prompt, answer in zip(prompts, answers, strict=True):
            remember(llm, prompt, answer)
        worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
        assert worker.model_runner.drafter._bound.scheduled == budget - budget // 8
        steps, drafted = play(llm, prompts)
        assert stats(llm)["num_accepted_tokens"] > 5 * NUM_PROMPTS
    for running, scheduled, _ in steps:
        assert set(running) <= set(scheduled), "every running request has a token"
        assert sum(scheduled.values()) <= budget
    assert drafted.keys() == undrafted.keys() == set(range(NUM_PROMPTS))
    late = {number: drafted[number] - undrafted[number] for number in drafted}
    assert max(late.values()) <= 1, late


@pytest.mark.parametrize("logprobs", [None, 0])
def test_sampling_handles_no_more_rows_than_the_bound(prompts, monkeypatch, logprobs):
    """One request of 64 knows what it is going to say, and would draft 24 tokens."""
    bound = 256
    sampled = []
    compute = Sampler.compute_logprobs
    monkeypatch.setattr(
        Sampler, "compute_logprobs", staticmethod(lambda logits: sampled.append(len(logits)) or compute(logits))
    )
    many = quickstart_prompts(64)
    settings = {"spec": {"policy": "fixed", "max_step_tokens": bound}}
    monkeypatch.setattr(proposer, "make_drafter", partial(make_drafter, siblings=False, common=False))
    with engine(SHIPPED_POLICY, settings, 24) as llm:
        answer = list(generate(llm, many[:1], **GREEDY)[0].token_ids)
        remember(llm, many[0], answer)
        with recorded_steps(llm) as steps:
            outputs = generate(llm, many, logprobs=logprobs, **GREEDY)
    assert list(outputs[0].token_ids) == answer
    drafts = [drafts for running, _, drafts in steps if len(running) == 64 and drafts]
    longest = max(len(draft) for step in drafts for draft in step.values())
    if logprobs is None:
        assert longest == 24
    else:
        assert longest == bound // 64 - 1
        assert max(sampled) <= bound
    assert all(sum(scheduled.values()) <= bound for running, scheduled, drafts in steps if drafts)


def test_a_prompt_of_which_one_token_is_not_cached_is_not_padded_to_a_full_draft(prompts):
    """vLLM would verify 24 invalid tokens for it, and sample from 25 rows of logits for every request."""
    block = 32
    prompt = (prompts[0] * block)[: block + 1]
    with engine(SHIPPED_POLICY, {"spec": {"policy": "fixed"}}, 24, block_size=block) as llm:
        expected = list(generate(llm, [prompt], **GREEDY)[0].token_ids)
        with recorded_steps(llm) as steps:
            answers = {}
            for number, one in enumerate([prompts[1], prompt]):
                params = SamplingParams(detokenize=False, **GREEDY)
                llm.llm_engine.add_request(str(number), TokensPrompt(prompt_token_ids=list(one)), params)
                for _ in range(5):  # the first one is generating when the second one comes
                    llm.llm_engine.step()
            while llm.llm_engine.has_unfinished_requests():
                for output in llm.llm_engine.step():
                    answers[output.request_id] = list(output.outputs[0].token_ids)
    joined = next(drafts for running, _, drafts in steps if len(running) == 2)
    assert all(token >= 0 for draft in joined.values() for token in draft)
    assert answers["1"] == expected


def test_graphs_bound_the_computed_tokens_and_memory_the_sampled_rows():
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_scheduled_tokens=None, max_num_batched_tokens=8192),
        cache_config=SimpleNamespace(gpu_memory_utilization=0.6),
        model_config=SimpleNamespace(get_vocab_size=lambda: 150_000),
        compilation_config=SimpleNamespace(cudagraph_mode=CUDAGraphMode.PIECEWISE, cudagraph_capture_sizes=[1, 512]),
    )
    assert step_bound(config, None, 80 << 30) == (512, int(0.5 * 0.4 * (80 << 30) / (12 * 150_000)))
    assert step_bound(config, 100, 80 << 30) == (100, 100)
    config.compilation_config.cudagraph_mode = CUDAGraphMode.NONE
    assert step_bound(config, None, 80 << 30).scheduled == 7168


@pytest.mark.parametrize("arguments", [{}, {"enable_chunked_prefill": False, "max_num_batched_tokens": 192}])
def test_drafting_goes_on_up_to_the_models_length_and_no_further(prompts, arguments):
    """Of eight requests one ends at the model's length; near it, vLLM would draft zeros for all of them."""
    limit, prompts = 192, prompts[:8]
    room = limit - len(prompts[0])
    lengths = [room, *[limit // 2] * 7]

    def answer(llm):
        params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True, detokenize=False) for n in lengths]
        inputs = [TokensPrompt(prompt_token_ids=list(prompt)) for prompt in prompts]
        return [list(output.outputs[0].token_ids) for output in llm.generate(inputs, params, use_tqdm=False)]

    with engine(SHIPPED_POLICY, max_model_len=limit, **arguments) as llm:
        expected = answer(llm)
    with engine(SHIPPED_POLICY, {"spec": {"policy": "fixed"}}, 24, max_model_len=limit, **arguments) as llm:
        assert llm.llm_engine.vllm_config.model_config.max_model_len == limit
        misleading = [*expected[0][:-40], *((token + i % 2) for i, token in enumerate(expected[0][-40:]))]
        remember(llm, prompts[0], misleading)
        with recorded_steps(llm) as steps:
            assert answer(llm) == expected
    drafts = [draft for _, _, drafts in steps for draft in drafts.values()]
    assert drafts and not [draft for draft in drafts if len(draft) > 2 and not any(draft)], "no drafts of zeros"
