"""What drafts may bring a step to: they starve no request, delay no prompt and stay within sampling's memory."""

import contextlib
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import pytest
from vllm import SamplingParams, TokensPrompt
from vllm.config import CUDAGraphMode
from vllm.v1.sample.sampler import Sampler

from examples.quickstart.policy import SHIPPED_POLICY
from rhyme_verl.histospec import proposer, step_bound
from rhyme_verl.histospec.from_config import make_drafter
from rhyme_verl.histospec.step_bound import ROW_BYTES, TOKEN_BYTES, FreeMemory, StepLimit, device_memory
from tests.helpers.engine import engine, generate, quickstart_prompts, remember, stats

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


@pytest.mark.parametrize(("budget", "policy"), [pytest.param(64, "fixed", marks=pytest.mark.slow), (128, "cost_aware")])
def test_no_running_request_is_starved_and_no_prompt_waits_for_drafts(prompts, budget, policy):
    with engine(SHIPPED_POLICY, max_num_batched_tokens=budget, enable_prefix_caching=False) as llm:
        answers = [list(output.token_ids) for output in generate(llm, prompts, **GREEDY)]
        _, undrafted = play(llm, prompts)
    settings = {"spec": {"policy": policy, "min_acceptance": 0.01}}
    with engine(SHIPPED_POLICY, settings, 24, max_num_batched_tokens=budget, enable_prefix_caching=False) as llm:
        for prompt, answer in zip(prompts, answers, strict=True):
            remember(llm, prompt, answer)
        steps, drafted = play(llm, prompts)
        assert stats(llm)["num_accepted_tokens"] > 5 * NUM_PROMPTS
    for running, scheduled, drafts in steps:
        assert set(running) <= set(scheduled), "every running request has a token"
        assert sum(scheduled.values()) <= budget
        assert sum(1 + len(draft) for draft in drafts.values()) <= budget - budget // 8
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


def test_requests_that_join_in_a_drafted_step_count_towards_its_bounds(monkeypatch):
    """Asynchronous scheduling drafts for one request while 63 with cached prompts join, and pads the rows of all."""
    bound, block = 256, 32
    sampled = []
    compute = Sampler.compute_logprobs
    monkeypatch.setattr(
        Sampler, "compute_logprobs", staticmethod(lambda logits: sampled.append(len(logits)) or compute(logits))
    )
    many = [(prompt * block)[: block + 1] for prompt in quickstart_prompts(64)]
    settings = {"spec": {"policy": "fixed", "max_step_tokens": bound}}
    with engine(SHIPPED_POLICY, settings, 24, asynchronous=True, block_size=block) as llm:
        answer = list(generate(llm, many[:1], **GREEDY)[0].token_ids)
        generate(llm, many, **GREEDY | {"max_tokens": 1})  # into the prefix cache
        remember(llm, many[0], answer)
        answers = {}

        def add(number):
            params = SamplingParams(detokenize=False, logprobs=0, **GREEDY | {"max_tokens": 60})
            llm.llm_engine.add_request(str(number), TokensPrompt(prompt_token_ids=many[number]), params)

        def step():
            for output in llm.llm_engine.step():
                answers[output.request_id] = list(output.outputs[0].token_ids)

        add(0)
        for _ in range(3):
            step()
        before = stats(llm)["num_draft_tokens"]
        del sampled[:]
        for number in range(1, 64):
            add(number)
        while llm.llm_engine.has_unfinished_requests():
            step()
        assert stats(llm)["num_draft_tokens"] > before > 0
    assert 64 < max(sampled) <= bound, "a step with drafts and all requests is within the bound"
    assert answers["0"] == answer[:60]


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


VOCABULARY = 150_000


def limit_of(*free, setting=None, may_join=True, graphs=(1, 512), max_num_seqs=256):
    """A limit with 7,168 tokens per step that has been measured once per (free, cached) bytes."""
    mode = CUDAGraphMode.PIECEWISE if graphs else CUDAGraphMode.NONE
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(
            max_num_scheduled_tokens=None, max_num_batched_tokens=8192, max_num_seqs=max_num_seqs
        ),
        speculative_config=SimpleNamespace(num_speculative_tokens=24),
        model_config=SimpleNamespace(get_vocab_size=lambda: VOCABULARY),
        compilation_config=SimpleNamespace(cudagraph_mode=mode, cudagraph_capture_sizes=list(graphs)),
    )
    limit = StepLimit(config, setting, may_join=may_join)
    with patch.object(step_bound, "device_memory", side_effect=[FreeMemory(*memory) for memory in free]):
        for _ in free:
            limit.measure()
    return limit


def test_the_largest_graph_bounds_steps_that_fit_into_it_and_no_others():
    limit = limit_of((1 << 40, 0))
    assert [limit.bound(rows, False).scheduled for rows in (1, 512, 513)] == [512, 512, 7168]
    assert limit.bound(500, False, other_tokens=12) == (500, 0), "with the prompts' tokens"
    assert limit.bound(500, False, other_tokens=13) == (7168 - 13, 0)
    few = limit_of((1 << 40, 0), graphs=range(1, 33))  # verl's cudagraph_capture_sizes
    assert [few.bound(rows, False).scheduled for rows in (32, 33)] == [32, 7168]
    assert limit_of((1 << 40, 0), graphs=()).bound(1, False).scheduled == 7168


def needed(rows, step_tokens, draft):
    """Bytes per token id at the sampler's peak: `rows` requests, one of which has a draft of the length `draft`."""
    return TOKEN_BYTES * step_tokens + ROW_BYTES * rows * (draft + 1)


@pytest.mark.parametrize("free_gib", [1, 4, 8, 32])
def test_sampling_stays_within_three_quarters_of_the_free_memory_when_all_requests_join_at_once(free_gib):
    memory = 0.75 * (free_gib << 30) / VOCABULARY
    waiting, known = limit_of((free_gib << 30, 0)), limit_of((free_gib << 30, 0), may_join=False)
    for rows in (1, 8, 64, 256):
        bound = waiting.bound(rows, True)
        draft = bound.sampled // rows - 1
        assert draft <= 0 or needed(256, bound.scheduled + 256 - rows, draft) <= memory
        bound = known.bound(rows, True)
        draft = bound.sampled // rows - 1
        assert draft <= 0 or needed(rows, bound.scheduled, draft) <= memory
        assert draft >= 24 or needed(rows, bound.scheduled, draft + 1) > memory, "not less than possible"
        assert bound.scheduled <= 512
    if free_gib == 4:
        assert known.bound(8, True).sampled > 25 * 8 > waiting.bound(8, True).sampled
    tokens = int(memory) // TOKEN_BYTES
    assert known.bound(8, False) == (min(512, tokens), 0), "without log-probs, no row is padded"
    assert waiting.bound(8, False) == (min(512, tokens - 248), 0)


def test_memory_that_torch_keeps_from_earlier_steps_is_free_but_the_graphs_are_not():
    first = limit_of((10 << 30, 2 << 30))
    later = limit_of((10 << 30, 2 << 30), (1 << 30, 11 << 30))
    assert later.bound(256, True) == first.bound(256, True)
    trainer_stays = limit_of((10 << 30, 2 << 30), (1 << 30, 2 << 30))
    assert trainer_stays.bound(256, True).sampled < first.bound(256, True).sampled


def test_before_memory_is_measured_nothing_is_drafted():
    bound = limit_of().bound(1, True)
    assert bound.scheduled <= 1
    assert bound.sampled == 1


def test_the_users_limit_holds_whatever_memory_is_free():
    limit = limit_of((0, 0), setting=100)
    assert limit.bound(4, True) == (100, 100)
    assert limit.bound(4, True, other_tokens=30) == (70, 100)
    assert limit.bound(4, False) == (100, 0)
    assert limit_of((0, 0), setting=1000).bound(4, True).scheduled == 1000, "more than the largest graph"
    assert limit_of(setting=100_000).bound(4, True).scheduled == 7168


def test_little_memory_for_many_requests_is_a_warning(caplog):
    limit_of((40 << 30, 0), (40 << 30, 0))
    assert not caplog.records
    limit_of((4 << 30, 0), (4 << 30, 0))
    (record,) = caplog.records
    assert "max_num_seqs=256" in record.message
    limit_of((4 << 30, 0), may_join=False)
    assert len(caplog.records) == 1


def test_the_free_memory_of_this_machine_is_read():
    memory = device_memory()
    assert memory.free > 1 << 20
    assert memory.cached == 0


@pytest.mark.parametrize(
    "arguments",
    [{}, pytest.param({"enable_chunked_prefill": False, "max_num_batched_tokens": 192}, marks=pytest.mark.slow)],
)
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
