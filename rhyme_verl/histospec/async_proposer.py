"""The proposer under vLLM's asynchronous scheduling: the host plans a step while the accelerator computes another.

vLLM plans a step before the one before it has ended, with placeholders for drafts. When it prepares the step, the
proposer waits for the newest tokens, drafts, and trims the placeholders to the drafts. Only what these drafts need is
done before the step is launched. Learning, new requests and ended ones come after it, in a thread of their own, while
the accelerator computes and vLLM processes the step before.

A step in which nothing will be drafted is launched without waiting, as stock vLLM does. The drafter then takes its
tokens in later, and considers from time to time whether drafts would pay.

`async_patch` connects this class with vLLM's model runner, which calls, in this order: `trim` (a step is prepared),
`draft` (the runner has updated its batch), `update_token_ids_ngram` (the step's tokens will be sampled) and `propose`
(it has been launched).
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.distributed import get_tp_group

from rhyme_verl.history.feed import FeedAddress
from rhyme_verl.histospec import async_patch
from rhyme_verl.histospec.async_steps import Plan, SampledStep, rooms_of, without_placeholders
from rhyme_verl.histospec.device_buffers import NO_TOKEN, STEPS_IN_FLIGHT, DeviceBuffers
from rhyme_verl.histospec.proposer import Proposer
from rhyme_verl.histospec.step_bound import StepBound

CONSIDER_EVERY = 4  # undrafted steps
MANY_ROWS = 128  # from which on the host may be what limits undrafted steps
NO_DRAFTS = StepBound(0, 0)
BARE_STEPS = 3  # consecutive steps without placeholders, from which on these no longer cost the host time


class AsyncProposer(Proposer):
    """Drafts when a step is prepared. Every rank of an engine has one; the one that is bound drafts for all."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        super().__init__(vllm_config)
        self._max_rows = vllm_config.scheduler_config.max_num_seqs
        self._tp = get_tp_group() if vllm_config.parallel_config.tensor_parallel_size > 1 else None
        self._buffers: DeviceBuffers | None = None
        self._plan = Plan()  # of the step that is being prepared or runs
        self._sampled: deque[SampledStep] = deque()  # steps whose tokens have not been taken in, oldest first
        self._rows: list[str] = []  # request ids of the newest sampled step
        self._stops: dict[str, np.ndarray] = {}  # token ids that end a request
        self._to_close: list[str] = []
        self._to_open: list[tuple[str, Any, Any]] = []  # request id, token ids, vLLM's data (None: it resumes)
        self._undrafted: tuple[Any, bool] | None = None  # vLLM's trimmed step, and whether it follows the sampled ones
        self._unlearnt: np.ndarray | None = None  # slots whose tokens have been taken in, but not learnt from
        self._drafted_at = 0.0  # when these were drafted for
        self._drafts_early = True  # whether vLLM has to know the drafts when it updates its batch
        self._pays = False  # whether drafts paid when they were last made or considered
        self._steps_to_consider = 0  # undrafted steps until drafts are considered
        self._num_bare = 0  # consecutive steps without placeholders
        # The thread that learns. From a launch until the next step is prepared, the drafter is its own.
        self._helper = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rhyme-drafter")
        self._learning: Future[None] | None = None
        async_patch.install(self, vllm_config)

    def connect(self, model_runner: Any) -> None:
        super().connect(model_runner)
        # Some attention backends order the batch by lengths, and prompt embeddings mark what is a token.
        self._drafts_early = model_runner.reorder_batch_threshold is not None or model_runner.enable_prompt_embeds
        self._may_pad = self._drafts_early  # before the requests that join are in the batch

    def bind(self, model_runner: Any, feed: FeedAddress | None = None) -> None:
        async_patch.check_installed(self, model_runner)
        super().bind(model_runner, feed)

    def stats(self) -> dict[str, float]:
        self._await_helper()
        return super().stats()

    # A step is prepared

    def trim(self, event: Any, counts: Any, scheduler_output: Any, req_id_to_index: Any) -> None:
        """Remove the placeholders from the step in `scheduler_output`, in place.

        The other arguments are for vLLM's own drafter, like all of `draft`.
        """
        self._await_helper()
        follows = bool(self._sampled) and self._sampled[-1].plan is self._plan
        self._plan = without_placeholders(scheduler_output)
        self._num_bare = 0 if self._plan.placeholders else self._num_bare + 1
        self._note_requests(scheduler_output)
        self._undrafted = (scheduler_output, follows) if self._plan.placeholders else None
        if self._drafts_early:
            self.draft()
        if not self._plan.num_rows:
            self._catch_up()  # no launch follows

    def draft(self, *args: Any, **kwargs: Any) -> None:
        """Draft for the step that was trimmed last."""
        if self._undrafted is None:
            return
        (scheduler_output, follows), self._undrafted = self._undrafted, None
        num_drafts = None
        if follows and self.is_bound and self._pays:
            try:
                num_drafts = self._draft()
            except Exception:  # rollouts continue after any error; the placeholders are trimmed already
                self._fail()
        if self._tp is not None:
            num_drafts = self._share(num_drafts)
        if num_drafts is not None and num_drafts.any():
            self._schedule(scheduler_output, num_drafts)

    def _draft(self) -> np.ndarray | None:
        """Return the number of draft tokens by row of the newest sampled step, or None if nothing is drafted."""
        plan, newest, buffers = self._plan, self._sampled[-1], self._buffers
        assert buffers is not None
        bound = self._bound(plan.num_rows, plan.other_tokens)
        if bound.scheduled <= plan.num_rows:
            return None
        slots, rooms = self._slots_of(newest.request_ids), rooms_of(plan, newest.request_ids)
        # The scheduler counts the placeholders of the step before as computed.
        reserved = newest.plan.placeholders
        expected = [plan.computed.get(one, 0) - reserved.get(one, 0) for one in newest.request_ids]
        num_drafts = buffers.num_drafts[: len(slots)]
        while self._sampled[0] is not newest:
            late = self._sampled.popleft()
            self._take_in(late, late.tokens.wait(), self.clock(), NO_DRAFTS, is_timed=False)
        tokens = newest.tokens.wait()
        is_retry = self.drafter.wants_undrafted(plan.num_rows)
        self.drafter.draft_first(
            slots,
            tokens,
            rooms,
            np.array(expected, np.int32),
            buffers.drafts_on_host,
            num_drafts,
            now=self.clock(),
            max_step_tokens=bound.scheduled,
            max_sampled_rows=bound.sampled,
            num_rows=plan.num_rows,
            step_tokens=newest.plan.num_tokens,
        )
        self._sampled.clear()
        self._unlearnt = slots
        self._drafted_at = self.clock()
        # With many rows, only several undrafted steps in a row show what these cost.
        has_many = plan.num_rows >= MANY_ROWS
        self._pays = bool(num_drafts.any()) or (is_retry and not has_many)
        self._steps_to_consider = CONSIDER_EVERY if has_many else 0
        return num_drafts

    def _schedule(self, scheduler_output: Any, num_drafts: np.ndarray) -> None:
        """Add drafts to the step; `num_drafts`: int32, by row of the newest sampled step."""
        assert self._buffers is not None
        scheduled, drafts = scheduler_output.num_scheduled_tokens, scheduler_output.scheduled_spec_decode_tokens
        for request_id, count in zip(self._rows, num_drafts.tolist(), strict=True):
            if count:
                scheduled[request_id] += count
                drafts[request_id] = [NO_TOKEN] * count
        self._plan.draft_tokens = int(num_drafts.sum())
        scheduler_output.total_num_scheduled_tokens += self._plan.draft_tokens
        self._buffers.send_drafts(len(num_drafts))

    def _share(self, num_drafts: np.ndarray | None) -> np.ndarray:
        """Return the drafting rank's result on all ranks, with its drafts in the buffers.

        Lengths of drafts are shapes of tensors, so they have to be the same everywhere.
        """
        assert self._tp is not None and self._buffers is not None
        rows, buffers = len(self._rows), self._buffers
        message = np.zeros((rows, 1 + self._max_drafted), np.int32)
        if num_drafts is not None:
            message[:, 0] = num_drafts
            message[:, 1:] = buffers.drafts_on_host[:rows]
        torch.distributed.broadcast(torch.from_numpy(message), src=self._tp.ranks[0], group=self._tp.cpu_group)
        if num_drafts is None:
            buffers.drafts_on_host[:rows] = message[:, 1:]
        return message[:, 0]

    def _note_requests(self, scheduler_output: Any) -> None:
        """Note which requests come and go, to open and close their slots after the launch."""
        if not self.is_bound:
            return
        self._to_close += scheduler_output.finished_req_ids
        for new in scheduler_output.scheduled_new_reqs:
            if new.prompt_token_ids is not None and new.sampling_params is not None:
                self._to_open.append((new.req_id, new.prompt_token_ids, new))
        restarted = scheduler_output.scheduled_cached_reqs.all_token_ids  # after a preemption
        self._to_open += [(request_id, token_ids, None) for request_id, token_ids in restarted.items()]

    # Its tokens will be sampled

    def update_token_ids_ngram(
        self, sampled: torch.Tensor, input_batch: Any, token_ids: Any, num_tokens: Any, discarded: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return each row's last token, its number of tokens, and the tokens; start to copy them to the host.

        Args:
            sampled: int32 [rows, most tokens of a row], -1 beyond a row's last token, on the device.
            discarded: bool [at least rows], rows that are still being prefilled, on the device.

        The other arguments are for vLLM's own drafter.
        """
        rows, width = sampled.shape
        valid = sampled.masked_fill(discarded[:rows, None], NO_TOKEN)
        if width == 1:
            last, counts = sampled[:, 0], (valid[:, 0] != NO_TOKEN).to(torch.int32)
        else:
            counts = (valid != NO_TOKEN).sum(dim=1, dtype=torch.int32)
            last = valid.gather(1, (counts - 1).clamp_(min=0).long()[:, None])[:, 0]
        if self._buffers is None:
            self._buffers = DeviceBuffers(self._max_rows, self._max_drafted, sampled.device)
        self._rows = input_batch.req_ids.copy()
        if self.is_bound:
            self._sampled.append(SampledStep(self._plan, self._rows, self._buffers.receive(valid)))
        return last, counts, valid

    # It has been launched

    def propose(
        self, num_draft_tokens: int, num_tokens: Any, token_ids: Any, sampled: torch.Tensor, counts: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Do what could wait for the launch; return the tensor that the next drafts will be in, and `counts`."""
        assert self._buffers is not None
        self._catch_up()
        return self._buffers.drafts[: len(counts)], counts

    def _catch_up(self) -> None:
        """Let the helper learn from all tokens that are on the host."""
        if not self.is_bound:
            return
        try:
            steps, sampled = [], self._sampled
            while len(sampled) > 1 and (len(sampled) >= STEPS_IN_FLIGHT or sampled[0].tokens.have_come()):
                step = sampled.popleft()
                steps.append((step, step.tokens.wait(), len(sampled) > 1))
            begins = bool(self._to_open) and self._slots.keys() <= set(self._to_close)
            if begins:
                self._limit.measure()
            bound = self._bound(self._plan.num_rows, self._plan.other_tokens)
            self._learning = self._helper.submit(self._learn, self.clock(), steps, bound, begins)
        except Exception:  # rollouts continue after any error
            self._fail()

    def _await_helper(self) -> None:
        if self._learning is not None:
            self._learning.result()
            self._learning = None

    def _learn(
        self, now: float, steps: list[tuple[SampledStep, np.ndarray, bool]], bound: StepBound, begins: bool
    ) -> None:
        """What the helper does after a launch.

        Args:
            now: when the running step was launched, at the latest.
            steps: steps whose tokens have come, the tokens (int32 [rows, columns]), and whether they came some time
                ago.
            bound: of the running step.
            begins: whether there were no requests.
        """
        try:
            if self._unlearnt is not None:
                self.drafter.launched((self._drafted_at + now) / 2)  # it was somewhere in between
                self.drafter.learn(self._unlearnt)
                self._unlearnt = None
            for step, tokens, is_late in steps:
                if self._num_bare >= BARE_STEPS:
                    is_timed = len(steps) == 1  # even if its tokens came later than those of other steps
                else:
                    is_timed = not is_late and self._plan.num_rows < MANY_ROWS
                self._take_in(step, tokens, now, NO_DRAFTS if is_late else bound, is_timed)
            self._pays |= begins  # until it is known
            self._open_and_close()
        except Exception:  # rollouts continue after any error
            self._fail()

    def _take_in(self, step: SampledStep, tokens: np.ndarray, now: float, bound: StepBound, is_timed: bool) -> None:
        """Learn from a step's tokens while the next step runs undrafted, or later, and consider drafts in `bound`."""
        plan = self._plan
        self._steps_to_consider -= 1
        considers = self._steps_to_consider < 0 and bool(plan.placeholders) and bound.scheduled > plan.num_rows
        considers = considers and not self.drafter.wants_undrafted(plan.num_rows)
        pays = self.drafter.consider(
            self._slots_of(step.request_ids),
            tokens,
            rooms_of(plan, step.request_ids),
            now=now,
            max_step_tokens=bound.scheduled if considers else 0,
            max_sampled_rows=bound.sampled,
            num_rows=plan.num_rows,
            step_tokens=step.plan.num_tokens,
            is_timed=is_timed,
        )
        if considers:
            self._pays = pays
            self._steps_to_consider = CONSIDER_EVERY - 1

    def _open_and_close(self) -> None:
        for request_id in self._to_close:
            self._close(request_id)
        for request_id, token_ids, new in self._to_open:
            tokens = np.asarray(token_ids, dtype=np.int32)
            if new is not None:
                self._close(request_id)
                params = new.sampling_params
                stops = params.stop_token_ids if params.ignore_eos else params.all_stop_token_ids
                self._stops[request_id] = np.array(sorted(stops or ()), np.int32)
                self._open(request_id, tokens, new)
            if request_id in self._slots:
                self.drafter.set_context(self._slots[request_id], tokens, self._stops[request_id])
        started = {request_id for request_id, _, _ in self._to_open}
        for step in list(self._sampled)[:-1] if started else ():  # what comes of them is from before the start
            step.request_ids = ["" if one in started else one for one in step.request_ids]
        if self._to_close or self._to_open:
            self._known_rows = []
            self._to_close, self._to_open = [], []

    def _close(self, request_id: str) -> None:
        if request_id in self._slots:
            self.drafter.close(self._slots.pop(request_id))
            del self._stops[request_id]
