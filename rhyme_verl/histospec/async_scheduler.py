"""vLLM's asynchronous scheduler with no more placeholders for drafts than can be used.

Under asynchronous scheduling drafts are made after a step has been scheduled, so the scheduler reserves tokens for
them: K per request, out of the step's `max_num_batched_tokens` and in front of waiting prompts. Loaded by vLLM
(`scheduler_config.scheduler_cls`, set by `async_patch`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from rhyme_verl.config import load_config
from rhyme_verl.histospec.engine_arguments import settings_in
from rhyme_verl.histospec.step_bound import PREFILL_SHARE

PATIENCE = 512  # placeholders' requests times steps without one accepted draft token, until placeholders rest
TRIAL_STEPS = 2  # with placeholders and without an accepted draft token, between two rests
LEAST_REST, MOST_REST = 16, 128  # steps
FEWER_ROWS = 0.8  # of the requests at which a rest began end it: with fewer, drafts pay sooner


class RhymeScheduler(AsyncScheduler):
    """Reserves at most 7/8 of a step's tokens for running requests, and none for drafts while prompts wait.

    Placeholders cost the host time even if no draft fills them. So they rest for some steps once no draft was accepted,
    for longer if that goes on. With many requests, only steps without placeholders show what an undrafted step costs.

    It also keeps two promises on which vLLM's model runner relies when it corrects its counts for rejected drafts: the
    step before has not been processed when the next one is scheduled, and a request that was not in the step before has
    no placeholders.

    It corrects two faults of vLLM 0.24. When the prefix cache is reset while requests run, vLLM discards the output of
    as many steps as there are tokens in flight. And it frees KV blocks outside a sliding window as if all draft tokens
    in flight were accepted.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # vLLM pads a prompt of which one token is not cached to K placeholders, unless K depends on the batch size.
        self.dynamic_sd_lookup = [self.num_spec_tokens] * (self.max_num_running_reqs + 1)
        self._draft_share = self.max_num_scheduled_tokens - self.max_num_scheduled_tokens // PREFILL_SHARE
        self._undrafted: set[str] = set()
        self._in_flight = 0  # steps that were scheduled, but not processed
        self._stale: set[str] = set()  # requests whose tokens in these many oldest steps in flight are dropped
        self._stale_steps = 0
        if "num_in_flight_tokens" not in Request.__init__.__code__.co_names:
            coordinator: Any = self.kv_cache_manager.coordinator
            coordinator.remove_skipped_blocks = partial(self._free_skipped, coordinator.remove_skipped_blocks)
        self._may_rest = load_config(settings_in(self.vllm_config)).spec.policy == "cost_aware"
        self._expect_much()

    def add_request(self, request: Request) -> None:
        if not _can_be_drafted(request):
            self._undrafted.add(request.request_id)
        if not self.requests:  # a rollout begins
            self._expect_much()
        super().add_request(request)

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        self._in_flight += 1
        if self._in_flight == 1 and self.prev_step_scheduled_req_ids:
            # After a pause all steps have been processed. The runner would correct counts that are correct, so an empty
            # step first lets it forget its batch; it then gets the requests with all their tokens.
            with patch.object(self, "max_num_scheduled_tokens", 0):
                return super().schedule(*args, **kwargs)
        for request in self.running:
            if request.request_id not in self.prev_step_scheduled_req_ids:
                request.spec_token_ids = []
        return super().schedule(*args, **kwargs)

    def update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output: Any) -> Any:
        self._in_flight -= 1
        if self._stale_steps:
            for request_id in self._stale & scheduler_output.num_scheduled_tokens.keys():
                scheduler_output.scheduled_spec_decode_tokens.pop(request_id, None)
                model_runner_output.sampled_token_ids[model_runner_output.req_id_to_index[request_id]] = []
            self._stale_steps -= 1
            if not self._stale_steps:
                self._stale.clear()
        if self._may_rest:
            self._note_accepted(scheduler_output, model_runner_output)
        return super().update_from_output(scheduler_output, model_runner_output)

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        was_reset = super().reset_prefix_cache(*args, **kwargs)
        for request in self.requests.values():
            if getattr(request, "async_tokens_to_discard", 0):
                request.async_tokens_to_discard = 0  # type: ignore[attr-defined]
                self._stale.add(request.request_id)
                self._stale_steps = self._in_flight
        return was_reset

    def _free_skipped(self, free: Callable[[str, int], None], request_id: str, total_computed_tokens: int) -> None:
        """Free the blocks that no token attends to any more, whatever becomes of the steps in flight."""
        request = self.requests.get(request_id)
        in_flight = 0 if request is None else request.num_output_placeholders
        free(request_id, max(0, total_computed_tokens - in_flight))

    def _expect_much(self) -> None:
        self._patience, self._rest, self._next_rest = PATIENCE, 0, LEAST_REST
        self._rest_until_rows = 0.0

    def _note_accepted(self, scheduler_output: SchedulerOutput, model_runner_output: Any) -> None:
        """Begin a rest if it is time."""
        offered = len(scheduler_output.scheduled_spec_decode_tokens)
        if not offered:
            return
        if any(len(tokens) > 1 for tokens in model_runner_output.sampled_token_ids):
            self._patience, self._rest = PATIENCE, 0
            self._next_rest = max(LEAST_REST, self._next_rest // 2)
            return
        if self._rest:
            return  # it was scheduled before the rest began
        self._patience -= offered
        if self._patience <= 0:
            self._rest, self._next_rest = self._next_rest, min(2 * self._next_rest, MOST_REST)
            self._rest_until_rows = FEWER_ROWS * offered
            self._patience = TRIAL_STEPS * offered

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        super()._update_after_schedule(scheduler_output)
        scheduled = scheduler_output.num_scheduled_tokens
        if not scheduled:
            return
        placeholders = [-1] * self._placeholders(scheduler_output)
        if len(placeholders) < self.num_spec_tokens:
            for request_id in scheduled:
                request = self.requests[request_id]
                if request.spec_token_ids:
                    request.spec_token_ids = placeholders
        if self._undrafted:
            self._undrafted &= self.requests.keys()
            for request_id in self._undrafted & scheduled.keys():
                self.requests[request_id].spec_token_ids = []

    def _placeholders(self, scheduler_output: SchedulerOutput) -> int:
        """Return how many placeholders each running request gets in the next step."""
        scheduled = scheduler_output.num_scheduled_tokens
        is_full = scheduler_output.total_num_scheduled_tokens >= self.max_num_scheduled_tokens
        if is_full or any(self.requests[request_id].is_prefill_chunk for request_id in scheduled):
            return 0  # prompts wait for tokens
        if self._rest and len(scheduled) > self._rest_until_rows:
            self._rest -= 1
            return 0
        self._rest = 0
        if self.waiting and not self.scheduler_config.enable_chunked_prefill:
            return 0  # a prompt may need all of a step's tokens
        return max(0, min(self.num_spec_tokens, self._draft_share // len(scheduled) - 1))


def _can_be_drafted(request: Request) -> bool:
    """Return whether the sampler can verify drafts of a request: not if it has to know the tokens before them.

    While a step is prepared, neither the tokens of the one before nor their number are known. And vLLM cuts an answer's
    text at its stop string, but not the token ids of the same step.
    """
    params = request.sampling_params
    if params is None or params.stop or request.use_structured_output or params.bad_words or params.min_tokens:
        return False
    if getattr(params, "thinking_token_budget", None) is not None:  # of newer versions of vLLM
        return False
    return params.presence_penalty == params.frequency_penalty == 0.0 and params.repetition_penalty == 1.0
