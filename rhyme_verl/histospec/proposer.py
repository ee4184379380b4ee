"""The proposer that vLLM loads (`speculative_config.method="custom_class"`). It calls the core once per engine step.

vLLM's call has rows without identity, so `bind` takes the model runner, whose `input_batch` maps rows to requests.
Until it is bound, the proposer drafts nothing. Finished answers arrive through the feed. The proposer adds no rows to
the history, because they do not show where an answer ends.
"""

from __future__ import annotations

import logging
import time
from typing import Any

import numpy as np
from vllm.config import VllmConfig
from vllm.platforms import current_platform

from rhyme_verl.config import load_config
from rhyme_verl.history.feed import AnswerSubscriber, FeedAddress
from rhyme_verl.histospec.engine_arguments import ADDITIONAL_CONFIG_KEY
from rhyme_verl.histospec.from_config import make_drafter, make_index
from rhyme_verl.histospec.step_bound import step_bound
from rhyme_verl.platforms.cpu_sampling import expand_kernel_is_exact
from rhyme_verl.request_id import tag_of
from rhyme_verl.telemetry.rollout_stats import POSITIONS

logger = logging.getLogger(__name__)

ANY_LENGTH = 1 << 30


class RhymeProposer:
    """Drafts for every running request from earlier answers to its prompt. Lives as long as the engine process."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        if current_platform.is_cpu() and not expand_kernel_is_exact():
            raise RuntimeError(
                "vLLM's CPU build samples drafted rows wrongly (vLLM issue 55005) and rhyme_verl's fix is not "
                "active: is the entry point group vllm.general_plugins filtered by VLLM_PLUGINS?"
            )
        additional = vllm_config.additional_config
        config = load_config(additional.get(ADDITIONAL_CONFIG_KEY) if isinstance(additional, dict) else None)
        assert vllm_config.speculative_config is not None
        self.index = make_index(config)
        self.drafter = make_drafter(
            self.index,
            config,
            max_draft_tokens=vllm_config.speculative_config.num_speculative_tokens,
            vocab_size=vllm_config.model_config.get_vocab_size(),
        )
        self._bound = step_bound(vllm_config, config.spec.max_step_tokens, current_platform.get_device_total_memory())
        scheduler = vllm_config.scheduler_config
        self._full_step_tokens = scheduler.max_num_scheduled_tokens or scheduler.max_num_batched_tokens
        self.has_failed = False
        self._runner: Any = None
        self._feed: AnswerSubscriber | None = None
        self._slots: dict[str, int] = {}
        self._bound_rows: list[str] = []
        self._row_slots = np.zeros(0, dtype=np.int32)

    @property
    def is_bound(self) -> bool:
        return self._runner is not None

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """vLLM's hook for drafters with weights; this one has none."""

    def bind(self, model_runner: Any, feed: FeedAddress | None = None) -> None:
        """Set the model runner whose batch the rows belong to, and subscribe to the answers published at `feed`."""
        _draft_up_to_the_end(model_runner)
        self._runner = model_runner
        if feed is not None and self._feed is None:
            self._feed = AnswerSubscriber(feed, self.index.update)

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
        if not self.is_bound:
            return [[] for _ in sampled_token_ids]
        try:
            return self._draft(sampled_token_ids, num_tokens_no_spec, token_ids_cpu)
        except Exception:  # rollouts continue after any error
            logger.exception("HistoSpec failed and stays off in this engine; rollouts continue without drafts")
            self.has_failed = True
            self._runner = None
            return [[] for _ in sampled_token_ids]

    def _draft(
        self, sampled_token_ids: list[list[int]], num_tokens_no_spec: np.ndarray, token_ids_cpu: np.ndarray
    ) -> list[list[int]]:
        now = time.perf_counter()
        slots = self._slots_of_rows(token_ids_cpu)
        num_rows = len(sampled_token_ids)
        if not all(sampled_token_ids):
            slots = slots.copy()
            for row, sampled in enumerate(sampled_token_ids):
                if not sampled:
                    slots[row] = -1
        pads_rows = self._runner.input_batch.max_num_logprobs is not None
        max_tokens = self._bound.scheduled if pads_rows else min(self._bound)
        drafts: list[list[int]] = self.drafter.draft(
            token_ids_cpu,
            num_tokens_no_spec,
            slots[:num_rows],
            max_model_len=self._runner.max_model_len,
            max_step_tokens=0 if self._has_backlog(sampled_token_ids) else max_tokens,
            max_sampled_rows=self._bound.sampled if pads_rows else 0,
            now=now,
        )
        return drafts

    def _has_backlog(self, sampled_token_ids: list[list[int]]) -> bool:
        """Return whether prompts may be waiting: one is partly prefilled, or the last engine step was full.

        Drafts would take the tokens of these prompts in the next engine step.
        """
        scheduled = int(self._runner.query_start_loc.np[len(sampled_token_ids)])
        return scheduled >= self._full_step_tokens or not all(sampled_token_ids)

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

    def _slots_of_rows(self, token_ids_cpu: np.ndarray) -> np.ndarray:
        """Return the core's slot per batch row. Opens slots for new requests and closes those of departed requests."""
        batch = self._runner.input_batch
        rows = batch.req_ids
        if rows == self._bound_rows:
            return self._row_slots
        present = set(rows)
        for request_id in [known for known in self._slots if known not in present]:
            self.drafter.close(self._slots.pop(request_id))
        for row, request_id in enumerate(rows):
            if request_id not in self._slots:
                prompt = np.ascontiguousarray(token_ids_cpu[row, : batch.num_prompt_tokens[row]], dtype=np.int32)
                max_new_tokens = self._runner.requests[request_id].sampling_params.max_tokens
                max_new_tokens = min(max_new_tokens, self._runner.max_model_len)
                tag = tag_of(request_id)
                predicted_tokens = 0 if tag is None else tag.predicted_tokens
                self._slots[request_id] = self.drafter.open(prompt, max_new_tokens, predicted_tokens)
        self._bound_rows = list(rows)
        self._row_slots = np.fromiter((self._slots[request_id] for request_id in rows), np.int32, len(rows))
        return self._row_slots


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
