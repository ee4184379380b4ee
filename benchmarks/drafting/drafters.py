"""The drafters that are compared, each called the way vLLM calls it.

The peers are vLLM's own proposer classes, with the settings and the batch fields that they read, so their Python loops,
defaults and order of calls are vLLM's. rhyme's adapter does the same as `rhyme_verl.histospec.proposer`, except that
the replay provides the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
from rhyme_verl._core import HistoryIndex

from benchmarks.drafting.replay import Answer, Batch, StepSeconds, TraceStep
from rhyme_verl.config import RhymeConfig
from rhyme_verl.histospec.from_config import make_drafter, make_index

ARCTIC_DEFAULTS = {"max_tree_depth": 24, "max_spec_factor": 1.0, "min_token_prob": 0.1, "max_cached_requests": 10000}
NGRAM_DEFAULTS = {"prompt_lookup_min": 5, "prompt_lookup_max": 5}
MANY = 1 << 30
TAUGHT_STEPS = 8


class NoDrafter:
    """Drafts nothing."""

    def propose(self, batch: Batch, sampled: list[list[int]], now: float) -> list[list[int]]:
        return [[] for _ in sampled]

    def finish_step(self, step: TraceStep) -> None:
        """Do nothing: there is no history."""


class RhymeDrafter:
    """HistoSpec's core, with the settings under `custom.rhyme`.

    Args:
        switches: names of `make_drafter`'s switches to turn off.
        remembers: whether answers become history when they are finished; if not, only their last tokens do.
        spec: `custom.rhyme.spec` settings that differ from the defaults.
    """

    def __init__(
        self,
        max_draft_tokens: int,
        max_model_len: int,
        switches: Sequence[str] = (),
        remembers: bool = True,
        **spec: Any,
    ) -> None:
        config = RhymeConfig()  # one thread, like the peers
        self._remembers = remembers
        self._switches = dict.fromkeys(switches, False)
        self._config = replace(
            config, spec=replace(config.spec, max_draft_tokens=max_draft_tokens, **{"num_threads": 1} | spec)
        )
        self.index = make_index(self._config)
        self.forget()
        self._max_model_len = max_model_len

    @classmethod
    def of(cls, index: HistoryIndex, drafter: Any, max_model_len: int) -> RhymeDrafter:
        """Return the adapter of an existing core."""
        found = cls(1, max_model_len)
        found.index, found.drafter = index, drafter
        return found

    def release(self) -> None:
        """Close the slots of all requests."""
        for slot in self._slots.values():
            self.drafter.close(slot)
        self._slots, self._bound_rows = {}, []

    def forget(self) -> None:
        """Drop all requests and everything learnt from them, so that a measurement can be repeated."""
        self.drafter = make_drafter(self.index, self._config, **self._switches)
        self._slots: dict[str, int] = {}
        self._bound_rows: list[str] = []
        self._row_slots = np.zeros(0, dtype=np.int32)

    def propose(self, batch: Batch, sampled: list[list[int]], now: float) -> list[list[int]]:
        if batch.req_ids != self._bound_rows:
            self._bind(batch)
        return self.drafter.draft(
            batch.token_ids_cpu,
            batch.num_tokens_no_spec,
            self._row_slots,
            self._max_model_len,
            now,
            max_sampled_rows=MANY,  # rows are padded, as with log-probs, and nothing limits them
        )

    def finish_step(self, step: TraceStep) -> None:
        remember_in_rhyme(self.index, step if self._remembers else with_last_tokens(step))

    def limit_model_len(self, max_model_len: int) -> None:
        """Set the request length up to which tokens are drafted."""
        self._max_model_len = max_model_len

    def history_bytes(self) -> int:
        """Return the size of the history as the index counts it."""
        return self.index.stats().num_bytes

    def calibration(self) -> list[dict[str, float]]:
        """Return predicted and observed acceptance, by prediction, of tokens whose predecessors were accepted."""
        stats = self.drafter.stats()
        columns = zip(stats.tokens_by_prediction, stats.sum_by_prediction, stats.accepted_by_prediction, strict=True)
        return [
            {"tokens": tokens, "predicted": predicted / tokens, "observed": accepted / tokens}
            for tokens, predicted, accepted in columns
            if tokens
        ]

    def teach_step_cost(self, step_cost: StepSeconds, context_tokens: float) -> None:
        """Teach the budget the cost of steps of all sizes, as if they had been run."""
        for num_tokens in [*range(1, 257), *range(264, 1025, 8), *range(1056, 4097, 32)]:
            for _ in range(TAUGHT_STEPS):
                self.drafter.observe_cost(num_tokens, False, step_cost(num_tokens, num_tokens, context_tokens))
                self.drafter.observe_cost(num_tokens, True, step_cost(1, num_tokens, context_tokens))

    def _bind(self, batch: Batch) -> None:
        for request_id in [known for known in self._slots if known not in batch.req_id_to_index]:
            self.drafter.close(self._slots.pop(request_id))
        for row, request_id in enumerate(batch.req_ids):
            if request_id not in self._slots:
                prompt = batch.token_ids_cpu[row, : batch.num_prompt_tokens[row]]
                self._slots[request_id] = self.drafter.open(prompt)
        self._bound_rows = list(batch.req_ids)
        self._row_slots = np.fromiter((self._slots[known] for known in batch.req_ids), np.int32, len(batch.req_ids))


class WindowDrafter(RhymeDrafter):
    """Applies the paper's rule for the length of drafts, in addition to the core's own prediction of acceptance.

    A request's window grows by 2 after a fully accepted draft, and halves after one that was less than half accepted.
    """

    FIRST, INCREASE, DECREASE = 8, 2, 0.5

    def propose(self, batch: Batch, sampled: list[list[int]], now: float) -> list[list[int]]:
        drafts = super().propose(batch, sampled, now)
        windows = {}
        for row, request_id in enumerate(batch.req_ids):
            window, drafted = self._windows.get(request_id, (self.FIRST, 0))
            accepted = len(sampled[row]) - 1
            if drafted and accepted == drafted:
                window = min(window + self.INCREASE, self._config.spec.max_draft_tokens)
            elif 2 * accepted < drafted:
                window = max(1, window * self.DECREASE)
            drafts[row] = drafts[row][: int(window)]
            windows[request_id] = (window, len(drafts[row]))
        self._windows = windows
        return drafts

    def forget(self) -> None:
        super().forget()
        self._windows: dict[str, tuple[float, int]] = {}


class ArcticDrafter:
    """ArcticInference's suffix decoding through vLLM's proposer; `settings` override ARCTIC_DEFAULTS.

    With `num_speculative_tokens` among them, drafts are at most so long.
    """

    def __init__(self, max_draft_tokens: int, max_model_len: int, **settings: Any) -> None:
        from vllm.v1.spec_decode.suffix_decoding import SuffixDecodingProposer

        max_draft_tokens = settings.pop("num_speculative_tokens", max_draft_tokens)
        chosen = ARCTIC_DEFAULTS | settings
        speculative = {f"suffix_decoding_{name}": value for name, value in chosen.items()}
        self._max_draft_tokens = max_draft_tokens
        self._proposer: Any = SuffixDecodingProposer(_vllm_config(max_draft_tokens, max_model_len, 0, speculative))
        self.cache = self._proposer.suffix_cache

    def propose(self, batch: Batch, sampled: list[list[int]], now: float) -> list[list[int]]:
        return self._proposer.propose(self._max_draft_tokens, batch, sampled)

    def finish_step(self, step: TraceStep) -> None:
        """Do nothing: the cache has recorded the answers while they ran."""

    def preload(self, step: TraceStep) -> None:
        """Remember answers that are not replayed, as if they had been."""
        remember_in_arctic(self.cache, step)

    def forget(self) -> None:
        """Drop all active requests and their cached tokens, so that a measurement can be repeated."""
        for request_id in list(self.cache.active_requests):
            self.cache.stop_request(request_id)
            self.cache.evict_cached_response(request_id)

    def history_bytes(self) -> int:
        """Return the size of the global tree as it counts it; there is no public accessor."""
        return self.cache._global_tree.estimate_memory()


class NgramDrafter:
    """vLLM's prompt lookup; `settings` override NGRAM_DEFAULTS."""

    def __init__(self, max_draft_tokens: int, max_model_len: int, max_rows: int, **settings: Any) -> None:
        from vllm.v1.spec_decode.ngram_proposer import NgramProposer

        self._max_draft_tokens = max_draft_tokens
        self._proposer = NgramProposer(
            _vllm_config(max_draft_tokens, max_model_len, max_rows, NGRAM_DEFAULTS | settings)
        )
        # Compile before anything is timed: the call in the proposer's constructor has no rows and compiles nothing.
        self._proposer.propose(max_draft_tokens, [[1]], np.ones(1, np.int32), np.ones((1, 1), np.int32))

    def propose(self, batch: Batch, sampled: list[list[int]], now: float) -> list[list[int]]:
        return self._proposer.propose(self._max_draft_tokens, sampled, batch.num_tokens_no_spec, batch.token_ids_cpu)

    def finish_step(self, step: TraceStep) -> None:
        """Do nothing: there is no history."""


def preload(drafter: Any, step: TraceStep) -> None:
    """Give a drafter the answers of a step that is not replayed."""
    if isinstance(drafter, ArcticDrafter):
        drafter.preload(step)
    else:
        drafter.finish_step(step)


def remember_in_rhyme(index: HistoryIndex, step: TraceStep) -> None:
    """Add a step's finished answers to the history, one prompt at a time, as the feed does."""
    for prompt_key, answers in group_by_prompt(step).items():
        count = len(answers)
        index.update(
            prompt_key,
            np.concatenate([answer.tokens for answer in answers]),
            np.array([len(answer.tokens) for answer in answers], np.int32),
            np.full(count, step.step, np.int64),
            np.array([(step.step << 32) + answer.sample for answer in answers], np.uint64),
        )


def with_last_tokens(step: TraceStep) -> TraceStep:
    """Return the step with only the last token of each answer: a prompt's history replaces its running answers."""
    return replace(step, answers=[replace(answer, tokens=answer.tokens[-1:]) for answer in step.answers])


def remember_in_arctic(cache: Any, step: TraceStep) -> None:
    """Add a step's answers to a `SuffixDecodingCache` with the calls that vLLM makes while requests run."""
    for answer in step.answers:
        request_id = f"remembered-{step.step}-{answer.prompt_key:x}-{answer.sample}"
        cache.start_request(request_id, answer.prompt)
        cache.add_active_response(request_id, answer.tokens)
        cache.stop_request(request_id)


def group_by_prompt(step: TraceStep) -> dict[int, list[Answer]]:
    """Return a step's answers by prompt key, in the trace's order."""
    groups: dict[int, list[Answer]] = {}
    for answer in step.answers:
        groups.setdefault(answer.prompt_key, []).append(answer)
    return groups


def _vllm_config(max_draft_tokens: int, max_model_len: int, max_rows: int, speculative: dict[str, Any]) -> Any:
    """Return the part of vLLM's config that its proposers read."""
    return SimpleNamespace(
        speculative_config=SimpleNamespace(num_speculative_tokens=max_draft_tokens, **speculative),
        model_config=SimpleNamespace(max_model_len=max_model_len),
        scheduler_config=SimpleNamespace(max_num_seqs=max_rows),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
    )
