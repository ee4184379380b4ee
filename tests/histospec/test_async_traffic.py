"""Random traffic of an engine that drafts asynchronously: every answer is what the undrafted engine says.

Requests join, are aborted, preempted and paused, with all kinds of sampling parameters. An episode is an engine and its
requests, and depends only on its seed. RHYME_TRAFFIC_SECONDS is how long to go on to new episodes (0: one episode),
RHYME_TRAFFIC_SEED the seed of the first.
"""

import itertools
import os
import random
import time

import pytest
from vllm import SamplingParams, TokensPrompt
from vllm.sampling_params import StructuredOutputsParams

from examples.quickstart.policy import SHIPPED_POLICY
from tests.helpers.engine import core_of, engine, generate, proposer_of, quickstart_prompts, remember, stats

pytestmark = pytest.mark.engine

SECONDS = float(os.environ.get("RHYME_TRAFFIC_SECONDS", "30"))
FIRST_SEED = int(os.environ.get("RHYME_TRAFFIC_SEED", "1"))
REQUESTS = 100  # of an episode
MODEL_LEN = 256
BLOCK = 32  # tokens
FEW_BLOCKS = {"num_gpu_blocks_override": 26}
# policy, most draft tokens, and arguments of the engine
SHAPES = (
    ("fixed", 8, {}),
    ("fixed", 8, FEW_BLOCKS | {"enable_prefix_caching": False}),
    ("cost_aware", 16, {"max_num_batched_tokens": 64}),
    ("fixed", 24, FEW_BLOCKS | {"max_num_batched_tokens": 128}),
    ("cost_aware", 6, FEW_BLOCKS | {"enable_chunked_prefill": False, "max_num_batched_tokens": MODEL_LEN}),
)


def kinds_of(answer):
    """Sampling parameters for a prompt to which the greedy answer is `answer`."""
    middle = answer[len(answer) // 2]
    longer = len(answer) + 10  # no number in between: beside penalties, stock vLLM loses count (docs/integration.md)
    return [
        {},
        {},
        {"logprobs": 0},
        {"logprobs": 3, "max_tokens": 40},
        {"stop_token_ids": [middle]},
        {"stop_token_ids": [middle], "min_tokens": longer, "max_tokens": longer},
        {"stop": ["7"]},
        {"ignore_eos": True, "max_tokens": 120},
        *({"max_tokens": n} for n in (1, 2, 3, 6, 9)),
        {"repetition_penalty": 1.3},
        {"presence_penalty": 0.8, "frequency_penalty": 0.2, "logprobs": 0},
        {"bad_words": ["1", "7"]},
        {"structured_outputs": StructuredOutputsParams(choice=["12", "109"])},
        {"structured_outputs": StructuredOutputsParams(regex=r"[0-9]{4,30}")},
        {"temperature": 1.0, "top_k": 1, "n": 2},
        {"temperature": 0.8, "top_k": 1, "logprobs": 0},
    ]


@pytest.fixture(scope="module")
def cases():
    """What the undrafted engine says to each prompt with each kind of parameters."""
    prompts = quickstart_prompts(8)
    with engine(SHIPPED_POLICY, max_model_len=MODEL_LEN) as llm:
        answers = [list(output.token_ids) for output in generate(llm, prompts, temperature=0.0, max_tokens=150)]
        wanted = [(prompt, kind) for prompt, answer in zip(prompts, answers, strict=True) for kind in kinds_of(answer)]
        endless = list(itertools.chain.from_iterable(p + a for p, a in zip(prompts, answers, strict=True)))
        for length in (*range(MODEL_LEN - 26, MODEL_LEN, 3), MODEL_LEN - 1):  # within a draft of the model's length
            wanted.append((endless[:length], {"ignore_eos": True}))
        for length in (1, BLOCK + 1, 3 * BLOCK + 1):  # of the long ones, one token does not come from the prefix cache
            wanted += 2 * [(endless[:length], {"max_tokens": 50})]
        params = [SamplingParams(**{"temperature": 0.0, "max_tokens": 150, **kind}) for _, kind in wanted]
        inputs = [TokensPrompt(prompt_token_ids=prompt) for prompt, _ in wanted]
        outputs = llm.generate(inputs, params, use_tqdm=False)
        assert {one.outputs[0].finish_reason for one in outputs} == {"stop", "length"}
    return [(prompt, one, output) for (prompt, _), one, output in zip(wanted, params, outputs, strict=True)]


def logprobs_of(completion):
    steps = zip(completion.logprobs, completion.token_ids, strict=True)
    return [(len(step), step[token].logprob) for step, token in steps]


def check(output, expected):
    """A finished output is the expected one, and one of an aborted request a part of it."""
    for said, undrafted in zip(output.outputs, expected.outputs, strict=False):
        tokens = list(said.token_ids)
        if said.finish_reason in (None, "abort"):
            assert tokens == list(undrafted.token_ids)[: len(tokens)]
            continue
        assert tokens == list(undrafted.token_ids)
        assert (said.finish_reason, said.stop_reason) == (undrafted.finish_reason, undrafted.stop_reason)
        if undrafted.logprobs is not None:
            for one, other in zip(logprobs_of(said), logprobs_of(undrafted), strict=True):
                assert one == pytest.approx(other, abs=1e-4)


class Traffic:
    """Requests to an engine, at random."""

    def __init__(self, llm, cases, seed):
        self.llm, self.cases, self.rng = llm, cases, random.Random(seed)
        self.now = 0.0
        self.joined = 0
        self.running = {}  # expected outputs by request id
        self.seen = {}  # newest outputs by request id
        self.finished = 0
        proposer_of(llm).clock = self.clock

    def clock(self):
        self.now += self.rng.choice((0.002, 0.004, 0.03))
        return self.now

    def run(self):
        while self.joined < REQUESTS or self.running:
            self.act()
            self.step()
        for _ in range(3):
            self.llm.llm_engine.step()  # idle

    def act(self):
        """Do something between two steps."""
        chance = self.rng.random()
        if chance < 0.15 and self.joined < REQUESTS:
            for _ in range(self.rng.choice((1, 1, 2, 4, 12))):
                self.join(*self.rng.choice(self.cases))
        elif chance < 0.30:
            self.update_history(*self.rng.choice(self.cases))
        elif chance < 0.33 and self.running:
            self.abort(self.rng.choice(list(self.running)))
        elif chance < 0.34:
            core_of(self.llm).reset_prefix_cache(reset_running_requests=True)
        elif chance < 0.35:
            self.pause()

    def join(self, prompt, params, expected):
        name = str(self.joined)
        self.joined += 1
        self.llm.llm_engine.add_request(name, TokensPrompt(prompt_token_ids=prompt), params.clone())
        self.running[name] = expected
        if self.rng.random() < 0.02:
            self.abort(name)  # before its first step

    def update_history(self, prompt, params, expected):
        answer = list(expected.outputs[0].token_ids)
        if self.rng.random() < 0.3:
            answer[self.rng.randrange(len(answer))] = self.rng.randrange(10, 170)
        remember(self.llm, prompt, answer)

    def abort(self, name):
        self.llm.llm_engine.abort_request([name])
        expected = self.running.pop(name)
        if name in self.seen:
            check(self.seen[name], expected)

    def pause(self):
        """Pause as verl does: steps on their way end; then weights may be updated and memory may be given away."""
        core = core_of(self.llm)
        core.pause_scheduler("keep", clear_cache=False)
        while core.batch_queue:
            self.step()
        what = self.rng.randrange(3)
        if what == 1:
            self.llm.collective_rpc("reload_weights")
            core.reset_prefix_cache(reset_running_requests=True)
        if what == 2:
            core.sleep(1, "keep")
            core.wake_up()
        core.resume_scheduler()

    def step(self):
        for output in self.llm.llm_engine.step():
            self.seen[output.request_id] = output
            if output.finished and output.request_id in self.running:
                check(output, self.running.pop(output.request_id))
                self.finished += 1


@pytest.mark.slow
def test_every_answer_is_the_undrafted_one(cases):
    started = time.monotonic()
    for seed in itertools.count(FIRST_SEED):
        print(f"reproduce with RHYME_TRAFFIC_SECONDS=0 RHYME_TRAFFIC_SEED={seed}")
        policy, max_draft_tokens, arguments = SHAPES[seed % len(SHAPES)]
        settings = {"spec": {"policy": policy, "min_acceptance": 0.05}}
        arguments = {"max_model_len": MODEL_LEN, "block_size": BLOCK, "asynchronous": True, **arguments}
        with engine(SHIPPED_POLICY, settings, max_draft_tokens, **arguments) as llm:
            traffic = Traffic(llm, cases, seed)
            traffic.run()
            assert stats(llm)["drafting_off"] == 0
            assert stats(llm)["num_accepted_tokens"] > 0
            assert traffic.finished > REQUESTS / 2
            assert proposer_of(llm)._slots == {}
        has_seen_all = seed + 1 - FIRST_SEED >= len(SHAPES)
        if SECONDS == 0 or (has_seen_all and time.monotonic() - started > SECONDS):
            break
