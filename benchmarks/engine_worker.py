"""Access to the drafters inside a vLLM worker: what the benchmarks ask of it through `collective_rpc`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from rhyme_verl._core import prompt_key

from benchmarks.drafter_replay import Answer, TraceStep, load_trace
from benchmarks.drafters import remember_in_arctic, remember_in_rhyme
from rhyme_verl.histospec.worker import HistoSpecWorker


class BenchWorker(HistoSpecWorker):
    """Worker extension of every engine that is measured, drafting or not."""

    def bench_remember(self, trace: str, max_epoch: int) -> int:
        """Make the trace's answers of epochs 1 to `max_epoch` the drafter's history, in place of any other it has.

        Each drafter gets the very same answers, in the way it takes finished answers in operation. `max_epoch=0` leaves
        it without history.

        Returns:
            How many answers it now remembers.
        """
        from vllm.v1.spec_decode.suffix_decoding import SuffixDecodingProposer

        from rhyme_verl.histospec.proposer import RhymeProposer

        drafter = getattr(self.model_runner, "drafter", None)
        steps = load_trace(Path(trace), max_epoch) if max_epoch else []
        if isinstance(drafter, SuffixDecodingProposer):
            cache = type(drafter.suffix_cache)(
                max_tree_depth=drafter.suffix_cache.max_tree_depth,
                max_cached_requests=self.vllm_config.speculative_config.suffix_decoding_max_cached_requests,
            )
            for step in steps:
                remember_in_arctic(cache, step)
            drafter.suffix_cache = cache
            return len(cache.cached_requests)
        if isinstance(drafter, RhymeProposer):
            for step in steps:
                remember_in_rhyme(drafter.index, step)
            return drafter.index.stats().num_answers
        return 0

    def bench_finished(self, finished: list[tuple[list[int], list[int]]]) -> None:
        """File finished answers, as (prompt, answer), where the drafter has not learnt them by itself."""
        from rhyme_verl.histospec.proposer import RhymeProposer

        drafter = getattr(self.model_runner, "drafter", None)
        if isinstance(drafter, RhymeProposer):
            remember_in_rhyme(drafter.index, _as_step(finished))

    def bench_draft(self, num_draft_tokens: int, token_id: int) -> None:
        """Tell a FixedDrafter what to propose."""
        self.model_runner.drafter.num_draft_tokens = num_draft_tokens
        self.model_runner.drafter.token_id = token_id


def _as_step(finished: list[tuple[list[int], list[int]]]) -> TraceStep:
    answers = []
    for sample, (prompt, tokens) in enumerate(finished):
        key_tokens = np.array(prompt, np.int32)
        answers.append(
            Answer(
                prompt_key=prompt_key(key_tokens),
                sample=sample,
                prompt=key_tokens,
                tokens=np.array(tokens, np.int32),
                reward=float("nan"),
            )
        )
    return TraceStep(step=0, epoch=1, answers=answers)
