"""A vLLM engine with or without HistoSpec, as `rhyme verify` uses it."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rhyme_verl.history.answers import Answer, AnswerBatch
from rhyme_verl.history.feed import AnswerPublisher
from rhyme_verl.histospec.engine_arguments import speculative_config

DRAFT_TOKENS = 6  # maximum length of a draft
TOP_LOGPROBS = 5  # per token of a greedy answer
DELIVERY_SECONDS = 30.0
DEFAULTS: dict[str, Any] = {
    "max_model_len": 2048,
    "max_num_seqs": 64,
    "enforce_eager": True,  # starts in seconds
    "enable_prefix_caching": False,
}
CPU_KV_CACHE_GIB = "2"
DRAFTING: dict[str, Any] = {  # as many drafts as possible, likely to be accepted or not
    "speculative_config": speculative_config(DRAFT_TOKENS),
    "additional_config": {"rhyme": {"spec": {"policy": "fixed", "min_acceptance": 0.0}}},
    "worker_extension_cls": "rhyme_verl.histospec.worker_access.HistoSpecWorker",
}
OWN_ARGUMENTS = ("model", "seed", *DRAFTING)  # arguments of vLLM's LLM that a user cannot set


@dataclass(frozen=True)
class GreedyAnswer:
    """An answer at temperature 0.

    Attributes:
        tokens: token ids.
        logprobs: per token, the log-probs of the TOP_LOGPROBS most probable tokens, by token id.
    """

    tokens: list[int]
    logprobs: list[dict[int, float]]


class VerifiedEngine:
    """A vLLM engine. It has to be closed before the next one starts, which needs its memory.

    Args:
        drafted: whether HistoSpec drafts, from the answers that `remember` delivers.
        engine_kwargs: further arguments of vLLM's `LLM`, none of OWN_ARGUMENTS.

    Raises:
        RuntimeError: no worker drafts.
    """

    def __init__(self, model: str, drafted: bool, engine_kwargs: dict[str, Any]) -> None:
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", CPU_KV_CACHE_GIB)  # vLLM's default is most of the memory
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        from vllm import LLM
        from vllm.platforms import current_platform

        if current_platform.is_cpu():
            os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # its processes would wait by spinning
        arguments = DEFAULTS | ({"dtype": "float32"} if current_platform.is_cpu() else {})
        arguments |= engine_kwargs | (DRAFTING if drafted else {})
        # The samples of both engines have to be independent, so their seeds differ.
        self._llm: Any = LLM(model=model, seed=int(drafted), **arguments)
        self._publisher = AnswerPublisher()
        if not drafted:
            return
        feed = dataclasses.asdict(self._publisher.address)
        workers: list[int] = asyncio.run(
            self._publisher.accept(asyncio.to_thread(self._llm.collective_rpc, "rhyme_bind", args=(feed,)))
        )
        if sum(workers) != 1:
            raise RuntimeError(f"one worker of the engine has to draft, but rhyme_bind returned {workers}")

    @property
    def max_model_len(self) -> int:
        return int(self._llm.llm_engine.model_config.max_model_len)

    def tokenize(self, text: str) -> list[int]:
        return list(self._llm.get_tokenizer().encode(text))

    def greedy(self, prompts: Sequence[list[int]], tokens: int) -> list[GreedyAnswer]:
        """Return one answer of `tokens` tokens per prompt."""
        answers = self._generate(prompts, temperature=0.0, max_tokens=tokens, logprobs=TOP_LOGPROBS)
        return [
            GreedyAnswer(
                list(answer.token_ids),
                [{token: entry.logprob for token, entry in step.items()} for step in answer.logprobs],
            )
            for answer in answers
        ]

    def sample(self, prompts: Sequence[list[int]], samples: int, tokens: int, sampling: dict[str, Any]) -> np.ndarray:
        """Return answers, int32 [prompts, samples, tokens]; `sampling` is for vLLM's `SamplingParams`."""
        answers = self._generate(prompts, n=samples, max_tokens=tokens, **sampling)
        return np.array([answer.token_ids for answer in answers], np.int32).reshape(len(prompts), samples, tokens)

    def remember(self, prompts: Sequence[list[int]], answers: np.ndarray) -> None:
        """Deliver earlier answers, as `sample` returns them, to the history of the engine. Prompts must be distinct.

        Raises:
            RuntimeError: they did not arrive.
        """
        from rhyme_verl._core import prompt_key

        for prompt, tokens in zip(prompts, answers, strict=True):
            held = [Answer(index, 0, one.tobytes()) for index, one in enumerate(tokens)]
            self._publisher.publish(AnswerBatch.of(prompt_key(np.array(prompt, np.int32)), 0, held))
        deadline = time.monotonic() + DELIVERY_SECONDS
        while self.counts()["history_answers"] < sum(map(len, answers)):
            if time.monotonic() > deadline:
                raise RuntimeError("the engine did not receive the answers to draft from")
            time.sleep(0.05)

    def counts(self) -> dict[str, float]:
        """Return the running totals of the worker that drafts.

        Raises:
            RuntimeError: the drafter failed.
        """
        counts: dict[str, float] = next(one for one in self._llm.collective_rpc("rhyme_stats") if one)
        if counts["drafting_off"]:
            raise RuntimeError("HistoSpec failed: the engine's log above has the reason")
        return counts

    def close(self) -> None:
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        self._llm.llm_engine.engine_core.shutdown()
        del self._llm
        gc.collect()
        cleanup_dist_env_and_memory()
        self._publisher.close()

    def _generate(self, prompts: Sequence[list[int]], **sampling: Any) -> list[Any]:
        """Return vLLM's answers to the first prompt, to the second, and so on."""
        from vllm import SamplingParams, TokensPrompt

        parameters = SamplingParams(detokenize=False, ignore_eos=True, **sampling)
        inputs = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
        outputs = self._llm.generate(inputs, parameters, use_tqdm=False)
        return [answer for output in outputs for answer in output.outputs]
