"""The proposer that vLLM loads (`speculative_config.method="custom_class"`) where it schedules synchronously.

`Proposer` is what it has in common with the asynchronous one (`async_proposer`). Until it is bound to the model runner,
a proposer drafts nothing. Finished answers arrive through the feed. A proposer adds no running requests to the history,
because they do not show where an answer ends.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.platforms import current_platform

from rhyme_verl.config import load_config
from rhyme_verl.history.feed import AnswerSubscriber, FeedAddress
from rhyme_verl.histospec.cuda_graphs import capture_undrafted_steps, check_captured, choose_graphs
from rhyme_verl.histospec.engine_arguments import settings_in
from rhyme_verl.histospec.from_config import make_drafter, make_index
from rhyme_verl.histospec.step_bound import StepBound, StepLimit
from rhyme_verl.platforms.cpu_sampling import expand_kernel_is_exact
from rhyme_verl.request_id import tag_of
from rhyme_verl.telemetry.rollout_stats import POSITIONS

logger = logging.getLogger(__name__)

ANY_LENGTH = 1 << 30
NOT_ACTIVE = "is not active: is the entry point group vllm.general_plugins filtered by VLLM_PLUGINS?"


class Proposer:
    """Drafts for every running request from earlier answers to its prompt. Lives as long as the engine process.

    Attributes:
        index: the history.
        drafter: the compiled core.
        clock: returns the time in seconds; from its differences the drafter learns what engine steps cost.
        has_failed: whether an error has ended drafting.
        may_join: see `StepLimit`.
    """

    may_join = False

    def __init__(self, vllm_config: VllmConfig) -> None:
        if current_platform.is_cpu() and not expand_kernel_is_exact():
            raise RuntimeError(
                "vLLM's CPU build samples drafted rows wrongly (vLLM issue 55005) and rhyme_verl's fix " + NOT_ACTIVE
            )
        if vllm_config.model_config.has_inner_state:  # `async_patch` should have taken HistoSpec out
            raise RuntimeError(
                "vLLM does not verify drafts exactly for models with an inner state, and rhyme_verl's entry point "
                "rhyme_async_drafting, which keeps HistoSpec off, " + NOT_ACTIVE
            )
        config = load_config(settings_in(vllm_config))
        assert vllm_config.speculative_config is not None
        self._max_drafted: int = vllm_config.speculative_config.num_speculative_tokens
        self.clock: Callable[[], float] = time.perf_counter
        self.index = make_index(config)
        self.drafter = make_drafter(
            self.index,
            config,
            max_draft_tokens=self._max_drafted,
            vocab_size=vllm_config.model_config.get_vocab_size(),
        )
        self._limit = StepLimit(vllm_config, config.spec.max_step_tokens, may_join=self.may_join)
        self._vllm_config = vllm_config
        capture_undrafted_steps(Proposer)
        self.has_failed = False
        self._may_pad = False  # requests of which the batch does not know yet may ask for log-probs
        self._runner: Any = None
        self._feed: AnswerSubscriber | None = None
        self._slots: dict[str, int] = {}  # of the core, by request id
        self._known_rows: list[str] = []  # the request ids whose slots are `_row_slots`
        self._row_slots = np.zeros(0, np.int32)

    @property
    def is_bound(self) -> bool:
        return self._runner is not None

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """vLLM's hook for drafters with weights; this one has none. vLLM has created the layers, but no graphs."""
        choose_graphs(self._vllm_config)

    def connect(self, model_runner: Any) -> None:
        """Adapt a rank's model runner to this proposer, whether it drafts on this rank or not."""
        check_captured(model_runner)
        _sample_undrafted_steps(model_runner)
        _draft_up_to_the_end(model_runner)

    def bind(self, model_runner: Any, feed: FeedAddress | None = None) -> None:
        """Set the model runner whose batch the rows belong to, and subscribe to the answers published at `feed`."""
        self.connect(model_runner)
        self._runner = model_runner
        if feed is not None and self._feed is None:
            self._feed = AnswerSubscriber(feed, self.index.update)

    def stats(self) -> dict[str, float]:
        """Return the running totals of drafting and the current size of the history."""
        drafted, history = self.drafter.stats(), self.index.stats()
        by_position: dict[str, float] = {}
        for position, tokens, accepted in zip(
            POSITIONS, drafted.draft_tokens_by_place, drafted.accepted_tokens_by_place, strict=True
        ):
            if tokens:
                by_position |= {f"draft_tokens_from_{position}": tokens, f"accepted_tokens_from_{position}": accepted}
        return {
            **by_position,
            "drafting_off": float(self.has_failed),
            "num_steps": drafted.num_steps,
            "num_generated_tokens": drafted.num_generated_tokens,
            "num_drafts": drafted.num_drafts,
            "num_draft_tokens": drafted.num_draft_tokens,
            "num_accepted_tokens": drafted.num_accepted_tokens,
            "saved_seconds": drafted.saved_seconds,
            "history_prompts": history.num_prompts,
            "history_answers": history.num_answers,
            "history_tokens": history.num_tokens,
            "history_bytes": history.num_bytes,
            "history_evicted_tokens": history.num_evicted_tokens,
        }

    def _open(self, request_id: str, prompt: np.ndarray, request: Any) -> None:
        """Open a slot for a request with these tokens, int32.

        `request`: vLLM's NewRequestData or CachedRequestState.
        """
        longest = self._runner.max_model_len
        tag = None if request.mm_features else tag_of(request_id)  # vLLM may make more tokens of images
        self._slots[request_id] = self.drafter.open(
            prompt,
            min(request.sampling_params.max_tokens or longest, longest),
            first_prompt_tokens=0 if tag is None else tag.prompt_tokens,
        )

    def _slots_of(self, request_ids: list[str]) -> np.ndarray:
        """Return the core's slot by row; -1 for a request without one."""
        if self._known_rows != request_ids:
            self._row_slots = np.array([self._slots.get(one, -1) for one in request_ids], np.int32)
            self._known_rows = request_ids.copy()
        return self._row_slots

    def _bound(self, num_rows: int, other_tokens: int = 0) -> StepBound:
        """Return the bounds of the step that is being prepared, see `StepLimit.bound`."""
        pads_rows = self._may_pad or self._runner.input_batch.max_num_logprobs is not None
        return self._limit.bound(num_rows, pads_rows, other_tokens)

    def _fail(self) -> None:
        """End drafting after an exception, which is being handled; rollouts continue."""
        logger.exception("HistoSpec failed and stays off in this engine; rollouts continue without drafts")
        self.has_failed = True
        self._runner = None


class RhymeProposer(Proposer):
    """Calls the core once per engine step, after the step's tokens have come.

    vLLM's call has rows without identity; the runner's `input_batch` maps rows to requests.
    """

    may_join = True

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: np.ndarray,
        token_ids_cpu: np.ndarray,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Return one draft per row; an empty list means no draft.

        Args:
            sampled_token_ids: new tokens per row; empty for a row whose prompt is still being prefilled.
            num_tokens_no_spec: int32 [rows], number of tokens per row so far, prompt included.
            token_ids_cpu: int32 [rows, max_model_len], the token ids.
        """
        if self.is_bound:
            try:
                return self._draft(sampled_token_ids, num_tokens_no_spec, token_ids_cpu)
            except Exception:  # rollouts continue after any error
                self._fail()
        return [[] for _ in sampled_token_ids]

    def _draft(
        self, sampled_token_ids: list[list[int]], num_tokens_no_spec: np.ndarray, token_ids_cpu: np.ndarray
    ) -> list[list[int]]:
        now = self.clock()
        self._open_and_close(token_ids_cpu)
        num_rows = len(sampled_token_ids)
        slots = self._slots_of(self._runner.input_batch.req_ids)[:num_rows]
        if not all(sampled_token_ids):
            slots = np.where([bool(sampled) for sampled in sampled_token_ids], slots, np.int32(-1))
        bound = self._bound(num_rows)
        step_tokens = int(self._runner.query_start_loc.np[num_rows])
        has_backlog = step_tokens >= self._limit.full_step  # prompts may be waiting, whose tokens drafts would take
        drafts: list[list[int]] = self.drafter.draft(
            token_ids_cpu,
            num_tokens_no_spec,
            slots,
            max_model_len=self._runner.max_model_len,
            max_step_tokens=0 if has_backlog else bound.scheduled,
            max_sampled_rows=bound.sampled,
            now=now,
            step_tokens=step_tokens,
        )
        return drafts

    def _open_and_close(self, token_ids_cpu: np.ndarray) -> None:
        """Open slots for new requests and close those of departed ones.

        Requests for which `_is_cut` get none, and no step in which one runs is drafted.
        """
        batch = self._runner.input_batch
        if batch.req_ids == self._known_rows:
            return
        present = set(batch.req_ids)
        for request_id in [known for known in self._slots if known not in present]:
            self.drafter.close(self._slots.pop(request_id))
        if not self._slots:
            self._limit.measure()
        for row, request_id in enumerate(batch.req_ids):
            request = self._runner.requests[request_id]
            if request_id not in self._slots and not _is_cut(request.sampling_params):
                prompt = np.ascontiguousarray(token_ids_cpu[row, : batch.num_prompt_tokens[row]], dtype=np.int32)
                self._open(request_id, prompt, request)


def _is_cut(params: SamplingParams) -> bool:
    """Return whether a request's end, or the end of its thinking, depends on more than its newest token.

    vLLM cuts an answer's text at its stop string, but not the token ids of the same step. And for the token after a
    draft, it compares `min_tokens` with the answer's length before the draft, so that the answer cannot end there.
    """
    return bool(params.stop or params.min_tokens or getattr(params, "thinking_token_budget", None) is not None)


def _sample_undrafted_steps(model_runner: Any) -> None:
    """Make vLLM sample a step without drafts as it does without a drafter.

    vLLM 0.32 verifies such steps, too. That costs launches, and with `top_k` its PyTorch sampler raises. And in such
    steps, vLLM with a drafter forces the end of a request's thinking on the batch's first row.
    """
    sample = model_runner._sample
    if getattr(sample, "func", None) is _sample:
        return
    model_runner._sample = partial(_sample, model_runner, sample)


def _sample(model_runner: Any, sample: Any, logits: Any, metadata: Any) -> Any:
    is_drafted = metadata is not None and metadata.max_spec_len > 0
    budgets = model_runner.input_batch.thinking_budget_state_holder
    if budgets is not None:
        budgets.in_spec_mode = is_drafted
    return sample(logits, metadata if is_drafted else None)


def _draft_up_to_the_end(model_runner: Any) -> None:
    """Make vLLM call the proposer for requests of any length.

    As soon as one request is within two drafts of the drafter model's maximum length, vLLM drafts and verifies zeros
    for the whole batch. The proposer needs no such limit: it keeps drafts within the target model's maximum length.
    """
    if not hasattr(model_runner, "effective_drafter_max_model_len"):
        raise RuntimeError(
            f"{type(model_runner).__name__} has no effective_drafter_max_model_len: install a vLLM that rhyme_verl "
            "supports, or set spec.enabled=false"
        )
    model_runner.effective_drafter_max_model_len = ANY_LENGTH
