"""Whatever the engine does with a request, its drafting state survives or is rebuilt, and its answer stays the same."""

from types import SimpleNamespace

import numpy as np
import pytest
from vllm import SamplingParams, TokensPrompt

from examples.quickstart.policy import SHIPPED_POLICY
from rhyme_verl.histospec.proposer import Proposer
from rhyme_verl.request_id import RequestTag
from tests.helpers.engine import engine, generate, in_both_modes, proposer_of, quickstart_prompts, remember, stats

pytestmark = pytest.mark.engine

ANSWER = {"temperature": 0.0, "max_tokens": 160}
DRAFT_ALWAYS = {"spec": {"policy": "fixed", "min_acceptance": 0.1}}


@pytest.fixture(scope="module")
def prompts():
    return quickstart_prompts(12)


@pytest.fixture(scope="module")
def greedy(prompts):
    with engine(SHIPPED_POLICY) as llm:
        return [list(output.token_ids) for output in generate(llm, prompts, **ANSWER)]


def remember_all(llm, prompts, answers):
    for prompt, answer in zip(prompts, answers, strict=True):
        remember(llm, prompt, answer)


def run_until(llm, condition):
    """Step the engine until `condition` holds of the outputs seen last; returns all outputs by request."""
    latest = {}
    while llm.llm_engine.has_unfinished_requests() and not condition(latest):
        latest |= {output.request_id: output for output in llm.llm_engine.step()}
    return latest


@in_both_modes
def test_chunked_prefill_prefix_caching_abort_and_resume(prompts, greedy, asynchronous):
    arguments = {"max_num_batched_tokens": 96, "block_size": 32, "asynchronous": asynchronous}
    with engine(SHIPPED_POLICY, DRAFT_ALWAYS, max_draft_tokens=8, **arguments) as llm:
        remember_all(llm, prompts, greedy)
        for _ in range(2):  # the second time the prompts come from the prefix cache
            before = stats(llm)["num_accepted_tokens"]
            assert [list(output.token_ids) for output in generate(llm, prompts, **ANSWER)] == greedy
            assert stats(llm)["num_accepted_tokens"] - before > 0.5 * sum(map(len, greedy))

        prompt, answer = max(zip(prompts, greedy, strict=True), key=lambda pair: len(pair[1]))
        sampling = SamplingParams(detokenize=False, **ANSWER)
        llm.llm_engine.add_request("partial", TokensPrompt(prompt_token_ids=prompt), sampling)
        seen = run_until(llm, lambda latest: "partial" in latest and len(latest["partial"].outputs[0].token_ids) > 30)
        part = list(seen["partial"].outputs[0].token_ids)
        assert part == answer[: len(part)]
        llm.llm_engine.abort_request(["partial"])
        before = stats(llm)
        rest = generate(llm, [[*prompt, *part]], temperature=0.0, max_tokens=160 - len(part))[0]
        assert [*part, *rest.token_ids] == answer
        after = stats(llm)
        steps = after["num_steps"] - before["num_steps"]
        assert steps < len(rest.token_ids) / 3, "the resumed request drafts from its first prompt's history at once"


@in_both_modes
def test_preempted_requests_come_back_to_their_drafts(prompts, greedy, asynchronous):
    few_blocks = {"block_size": 32, "num_gpu_blocks_override": 24, "enable_prefix_caching": False}
    arguments = {"disable_log_stats": False, "asynchronous": asynchronous, **few_blocks}
    with engine(SHIPPED_POLICY, DRAFT_ALWAYS, max_draft_tokens=8, **arguments) as llm:
        remember_all(llm, prompts, greedy)
        outputs = generate(llm, 3 * prompts, **ANSWER)  # with room for a third of them, by blocks
        preemptions = sum(metric.value for metric in llm.get_metrics() if metric.name == "vllm:num_preemptions")
        counts = stats(llm)
    assert preemptions > 0
    assert [list(output.token_ids) for output in outputs] == 3 * greedy
    assert counts["num_accepted_tokens"] > 1.5 * sum(map(len, greedy))


@in_both_modes
def test_a_drafter_that_fails_ends_drafting_and_not_the_rollout(prompts, greedy, asynchronous):
    with engine(SHIPPED_POLICY, DRAFT_ALWAYS, max_draft_tokens=8, asynchronous=asynchronous) as llm:
        remember_all(llm, prompts, greedy)
        assert stats(llm)["drafting_off"] == 0
        proposer_of(llm).clock = None  # any exception will do; this one is a TypeError
        assert [list(output.token_ids) for output in generate(llm, prompts, **ANSWER)] == greedy
        assert stats(llm)["drafting_off"] == 1
        assert stats(llm)["num_draft_tokens"] == 0


@in_both_modes
def test_an_answer_ends_at_its_stop_string_as_without_drafts(prompts, greedy, asynchronous):
    """vLLM cuts an answer's text at a stop string, but not the token ids that came in the same step."""

    def stopped(llm):
        middles = [answer[len(answer) // 2 :][:2] for answer in greedy]
        params = [SamplingParams(stop=[llm.get_tokenizer().decode(middle)], **ANSWER) for middle in middles]
        outputs = llm.generate([TokensPrompt(prompt_token_ids=prompt) for prompt in prompts], params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    with engine(SHIPPED_POLICY) as llm:
        wanted = stopped(llm)
    assert sum(map(len, wanted)) < 0.8 * sum(map(len, greedy))
    with engine(SHIPPED_POLICY, DRAFT_ALWAYS, max_draft_tokens=8, asynchronous=asynchronous) as llm:
        remember_all(llm, prompts, greedy)
        assert stopped(llm) == wanted
        assert [list(output.token_ids) for output in generate(llm, prompts, **ANSWER)] == greedy
        assert stats(llm)["num_accepted_tokens"] > 0.5 * sum(map(len, greedy)), "others are drafted for"


@in_both_modes
def test_an_answer_that_has_just_got_long_enough_may_end(prompts, greedy, asynchronous):
    """vLLM's `min_tokens` does not count a draft's tokens when it samples the one after them."""
    ends = [
        (prompt, answer) for prompt, answer in zip(prompts, greedy, strict=True) if len(answer) < ANSWER["max_tokens"]
    ]
    assert len(ends) > 6
    with engine(SHIPPED_POLICY, DRAFT_ALWAYS, max_draft_tokens=8, asynchronous=asynchronous) as llm:
        remember_all(llm, prompts, greedy)
        params = [SamplingParams(min_tokens=len(answer) - 2, **ANSWER) for _, answer in ends]
        inputs = [TokensPrompt(prompt_token_ids=prompt) for prompt, _ in ends]
        outputs = llm.generate(inputs, params, use_tqdm=False)
        assert [list(output.outputs[0].token_ids) for output in outputs] == [answer for _, answer in ends]


@in_both_modes
def test_a_thinking_budget_ends_the_thinking_of_its_own_request_only(prompts, greedy, asynchronous):
    """In steps without drafts, vLLM with a drafter forces the token on the batch's first row, whose ever it is."""
    arguments = {"reasoning_config": {"reasoning_start_str": "<|im_start|>", "reasoning_end_str": "?"}}

    def answers(llm):
        budgets = [20 if row % 3 == 2 else None for row in range(len(prompts))]
        params = [SamplingParams(thinking_token_budget=budget, **ANSWER) for budget in budgets]
        outputs = llm.generate([TokensPrompt(prompt_token_ids=prompt) for prompt in prompts], params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    with engine(SHIPPED_POLICY, **arguments) as llm:
        wanted = answers(llm)
    cut = [row for row, (answer, free) in enumerate(zip(wanted, greedy, strict=True)) if answer != free]
    assert cut == [2, 5, 8, 11]
    with engine(SHIPPED_POLICY, DRAFT_ALWAYS, max_draft_tokens=8, asynchronous=asynchronous, **arguments) as llm:
        remember_all(llm, prompts, greedy)
        assert answers(llm) == wanted
        assert [list(output.token_ids) for output in generate(llm, prompts, **ANSWER)] == greedy


@in_both_modes
def test_a_resumed_request_whose_history_comes_late_drafts_from_it(prompts, greedy, asynchronous):
    prompt, answer = max(zip(prompts, greedy, strict=True), key=lambda pair: len(pair[1]))
    part, settings = answer[:30], {"spec": DRAFT_ALWAYS["spec"] | {"min_acceptance": 0.5}}
    with engine(SHIPPED_POLICY, settings, max_draft_tokens=8, asynchronous=asynchronous) as llm:
        name = RequestTag(("uid", 0), prompt_tokens=len(prompt)).append_to("resumed")
        sampling = SamplingParams(detokenize=False, temperature=0.0, max_tokens=160 - len(part))
        llm.llm_engine.add_request(name, TokensPrompt(prompt_token_ids=[*prompt, *part]), sampling)
        run_until(llm, lambda latest: name in latest and len(latest[name].outputs[0].token_ids) > 10)
        before = stats(llm)["num_accepted_tokens"]
        remember(llm, prompt, answer)
        latest = run_until(llm, lambda latest: name in latest and latest[name].finished)
        assert [*part, *latest[name].outputs[0].token_ids] == answer
        assert stats(llm)["num_accepted_tokens"] - before > 0.5 * (len(answer) - len(part) - 20)


@pytest.mark.parametrize(("images", "told"), [([], 3), (["image"], 0)])
def test_the_first_prompts_length_counts_only_if_vllm_has_the_same_tokens(images, told):
    opened = []
    core = SimpleNamespace(open=lambda *arguments, **others: opened.append(others["first_prompt_tokens"]))
    ours = SimpleNamespace(_runner=SimpleNamespace(max_model_len=64), drafter=core, _slots={})
    request = SimpleNamespace(sampling_params=SamplingParams(), mm_features=images)
    name = RequestTag(("uid", 0), prompt_tokens=3).append_to("1")
    Proposer._open(ours, name, np.arange(5, dtype=np.int32), request)
    assert opened == [told]


@in_both_modes
def test_empty_single_token_identical_and_very_long_histories(prompts, greedy, asynchronous):
    """Of four prompts: no tokens, one token, eight identical answers, and 50,000 tokens."""
    copies = 50_000 // len(greedy[3]) + 1
    histories = [[[]], [greedy[1][:1]], [greedy[2]] * 8, [greedy[3]] * copies]
    with engine(SHIPPED_POLICY, DRAFT_ALWAYS, max_draft_tokens=8, asynchronous=asynchronous) as llm:
        for prompt, answers in zip(prompts[:4], histories, strict=True):
            for answer in answers:
                remember(llm, prompt, answer)
        assert stats(llm)["history_tokens"] == 1 + 8 * len(greedy[2]) + copies * len(greedy[3])
        outputs = generate(llm, prompts[:4], **ANSWER)
        assert [list(output.token_ids) for output in outputs] == greedy[:4]
        assert stats(llm)["drafting_off"] == 0
        assert stats(llm)["num_accepted_tokens"] > 0.3 * (len(greedy[2]) + len(greedy[3]))
        outputs = generate(llm, prompts, **ANSWER | {"max_tokens": 1})
        assert [list(output.token_ids) for output in outputs] == [answer[:1] for answer in greedy]


@in_both_modes
def test_ids_that_the_model_does_not_have_are_not_drafted(prompts, greedy, asynchronous):
    with engine(SHIPPED_POLICY, DRAFT_ALWAYS, max_draft_tokens=8, asynchronous=asynchronous) as llm:
        foreign = [[*answer[:20], 2_000_000_000, *answer[21:]] for answer in greedy]
        remember_all(llm, prompts, foreign)
        assert [list(output.token_ids) for output in generate(llm, prompts, **ANSWER)] == greedy
        assert stats(llm)["num_accepted_tokens"] > 10 * len(prompts)
