"""A real vLLM engine in this process, with HistoSpec or without; shared by the tests that need one."""

import gc
from contextlib import contextmanager, nullcontext

import pytest
import torch
from vllm import LLM, SamplingParams, TokensPrompt
from vllm.distributed import cleanup_dist_env_and_memory

from examples.quickstart.policy import SHIPPED_POLICY
from rhyme_verl.histospec.engine_arguments import speculative_config
from tests.helpers import core, strict_device

WORKER = "rhyme_verl.histospec.worker_access.HistoSpecWorker"

in_both_modes = pytest.mark.parametrize(
    "asynchronous",
    [pytest.param(False, id="synchronous", marks=pytest.mark.slow), pytest.param(True, id="asynchronous")],
)


@contextmanager
def engine(model, rhyme=None, max_draft_tokens=6, *, asynchronous=False, **arguments):
    """Yield an LLM on `model`; `rhyme` holds settings of custom.rhyme (None: no drafting).

    `asynchronous`: vLLM schedules as on a GPU, and copies between host and device end late (strict_device).
    """
    with strict_device.installed() if asynchronous else nullcontext():
        with _engine(model, rhyme, max_draft_tokens, asynchronous, **arguments) as llm:
            yield llm


@contextmanager
def _engine(model, rhyme, max_draft_tokens, asynchronous, **arguments):
    if rhyme is not None:
        arguments |= {
            "speculative_config": speculative_config(max_draft_tokens),
            "additional_config": {"rhyme": rhyme},
            "worker_extension_cls": WORKER,
        }
    llm = LLM(
        model=str(model),
        dtype="float32",
        enforce_eager=True,
        max_num_seqs=arguments.pop("max_num_seqs", 64),
        max_model_len=arguments.pop("max_model_len", 512),
        gpu_memory_utilization=0.1,
        seed=arguments.pop("seed", 7),
        async_scheduling=arguments.pop("async_scheduling", None if asynchronous else False),
        **arguments,
    )
    try:
        assert llm.llm_engine.vllm_config.scheduler_config.async_scheduling == asynchronous
        if rhyme is not None:
            assert llm.collective_rpc("rhyme_bind") == [True]
            if asynchronous:
                assert type(proposer_of(llm)).__name__ == "AsyncProposer"
                assert type(core_of(llm).scheduler).__name__ == "RhymeScheduler"
                counts = runner_of(llm).valid_sampled_token_count_cpu
                runner_of(llm).valid_sampled_token_count_cpu = counts.as_subclass(strict_device.UnreadHostMemory)
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()


def core_of(llm):
    return llm.llm_engine.engine_core.engine_core


def runner_of(llm):
    return core_of(llm).model_executor.driver_worker.worker.model_runner


def proposer_of(llm):
    return runner_of(llm).drafter


def remember(llm, prompt, answer, step=0):
    """File a finished answer in the engine's history, as the feed does."""
    core.remember(proposer_of(llm).index, prompt, [answer], step)


def stats(llm):
    return llm.collective_rpc("rhyme_stats")[0]


def generate(llm, prompts, **sampling):
    """Return vLLM's completion of each prompt (token ids)."""
    params = SamplingParams(detokenize=False, **sampling)
    outputs = llm.generate([TokensPrompt(prompt_token_ids=list(p)) for p in prompts], params, use_tqdm=False)
    return [output.outputs[0] for output in outputs]


def hf_model(path):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def quickstart_prompts(count):
    from transformers import PreTrainedTokenizerFast  # newer versions let AutoTokenizer take Qwen's own

    from examples.quickstart.problems import make_problem

    tokenizer = PreTrainedTokenizerFast.from_pretrained(SHIPPED_POLICY)
    messages = [[{"role": "user", "content": make_problem("test", 0, i).question}] for i in range(count)]
    return [
        tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=True, return_dict=False)
        for message in messages
    ]
