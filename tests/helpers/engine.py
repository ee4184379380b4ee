"""A real vLLM engine in this process, with HistoSpec or without; shared by the tests that need one."""

import gc
from contextlib import contextmanager

import torch
from vllm import LLM, SamplingParams, TokensPrompt
from vllm.distributed import cleanup_dist_env_and_memory

from rhyme_verl.histospec.engine_arguments import speculative_config
from tests.helpers import core
from tools.cpu_job.policy import SHIPPED_POLICY

WORKER = "rhyme_verl.histospec.worker_access.HistoSpecWorker"


@contextmanager
def engine(model, rhyme=None, max_draft_tokens=6, **arguments):
    """Yield an LLM on `model`; `rhyme` holds settings of custom.rhyme (None: no drafting)."""
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
        max_num_seqs=64,
        max_model_len=arguments.pop("max_model_len", 512),
        gpu_memory_utilization=0.1,
        seed=arguments.pop("seed", 7),
        **arguments,
    )
    try:
        if rhyme is not None:
            assert llm.collective_rpc("rhyme_bind") == [True]
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()


def remember(llm, prompt, answer, step=0):
    """File a finished answer in the engine's history, as the feed does."""
    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    core.remember(worker.model_runner.drafter.index, prompt, [answer], step)


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
    from transformers import AutoTokenizer

    from tools.cpu_job.problems import make_problem

    tokenizer = AutoTokenizer.from_pretrained(SHIPPED_POLICY)
    messages = [[{"role": "user", "content": make_problem("test", 0, i).question}] for i in range(count)]
    return [
        tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=True, return_dict=False)
        for message in messages
    ]
