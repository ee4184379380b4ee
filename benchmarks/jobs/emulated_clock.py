"""A clock that makes the steps of a real engine take as long as an accelerator's, by sleeping for the remaining time.

On a CPU the cost of a step is about proportional to its tokens, so neither a long tail nor a draft costs what it does
on an accelerator. Here policy, tokens, scheduler and drafter are real and only time is emulated: an accelerator works
through a queue of steps, each for its published time, and a host fills the queue and waits for results. The model is
that of engines/virtual_time.py, but processes that share the cores need real time: the period from one step to the next
is D x (published step time + time for which the accelerator waits for the host). The dilation D lets the cores keep up.
It is the same in all cases, and all reported times are divided by it. Steps for which the CPU took longer are counted
as late, and too many of them make a result invalid (`EmulatedTime.is_valid`).

An engine with a drafter is charged the host time that `make bench-host` has measured for steps of as many rows and
drafted tokens, from the arrival of sampled tokens to the launch of the next step (drafting/host_gap.py). What it takes
in the job, on cores that are slow or shared with other processes, is not charged. With asynchronous scheduling, a step
without drafts is launched before the previous one's tokens arrive.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.drafting.host_gap import HostGap
from benchmarks.engines.device_time import DeviceTime

MAX_LATE_STEPS = 0.03  # largest shares of late steps and late time in a valid emulation
MAX_LATE_TIME = 0.02
LABEL = "published A100 step times"


@dataclass(kw_only=True)
class EmulatedTime:
    """Totals over a worker's emulated steps. Seconds are real (dilated).

    Attributes:
        steps: number of engine steps.
        seconds: time that the steps should have taken, including `host_seconds`.
        host_seconds: time in which the accelerator waited for the host between two steps, as far as it is charged.
        late_steps: number of steps for which the CPU took longer.
        late_seconds: sum of the time by which it took longer.
        tokens: computed tokens, including drafts and prompts.
        verifies: forward passes over a request after its first token, drafted or not, summed over requests.
        drafted, accepted: verified and accepted draft tokens.
    """

    steps: int = 0
    seconds: float = 0.0
    host_seconds: float = 0.0
    late_steps: int = 0
    late_seconds: float = 0.0
    tokens: int = 0
    verifies: int = 0
    drafted: int = 0
    accepted: int = 0

    @property
    def late_step_share(self) -> float:
        return self.late_steps / self.steps if self.steps else 0.0

    @property
    def late_time_share(self) -> float:
        return self.late_seconds / self.seconds if self.seconds else 0.0

    @property
    def is_valid(self) -> bool:
        return self.late_step_share <= MAX_LATE_STEPS and self.late_time_share <= MAX_LATE_TIME


class EmulatedClock:
    """Paces one worker; independent of vLLM. All calls come from the engine's thread.

    Moments are real times in seconds, less all delays by late steps.

    Args:
        step_time: step times of the accelerator.
        dilation: real seconds per emulated second.
        host_gap: the host's time before a step that follows another one; None: it takes none.
        real_now, sleep: the real time, and the function that waits; replaceable in tests.

    Attributes:
        times: totals since the last restart.
        free_at: when the accelerator will have computed everything that is queued.
    """

    def __init__(
        self,
        step_time: DeviceTime,
        dilation: float,
        host_gap: HostGap | None = None,
        *,
        real_now: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.times = EmulatedTime()
        self.free_at = 0.0
        self._step_time = step_time
        self._dilation = dilation
        self._host_gap = host_gap
        self._real_now = real_now
        self._sleep = sleep
        self._host = 0.0  # when the host has done what it has done
        self._delay = 0.0  # by late steps

    def restart(self, dilation: float) -> None:
        """Reset the totals and set the dilation; 0: steps take their own time."""
        self.times = EmulatedTime()
        self._dilation = dilation

    def now(self) -> float:
        """Return the time on the host."""
        return self._host

    def emulated_seconds(self) -> float:
        """Return the time on the host in emulated seconds, from which a drafter can learn what steps cost."""
        return self._host / self._dilation

    def launch(self, rows: int, num_tokens: int, drafted: int, longest: int, context: float, follows: bool) -> None:
        """Queue a step, and count it.

        Args:
            drafted: draft tokens among the tokens.
            longest: tokens of the longest draft.
            context: mean length of the rows in tokens.
            follows: whether the step follows another one; otherwise the engine was idle before.
        """
        if not follows:
            self._host = self._real_now() - self._delay
            self.free_at = max(self.free_at, self._host)
        elif self._host_gap is not None:
            self._host += self._dilation * self._host_gap.seconds(rows, rows + drafted)
            waits = max(0.0, self._host - self.free_at)
            self.free_at += waits
            self.times.seconds += waits
            self.times.host_seconds += waits
        seconds = self._dilation * self._step_time.seconds(rows, num_tokens, context, drafted, longest)
        self.free_at += seconds
        self.times.steps += 1
        self.times.seconds += seconds
        self.times.tokens += num_tokens
        # The CPU may compute the step early, but only by a step: a host that is always behind never waits.
        self._sleep_until(self._host - seconds)

    def wait_until(self, moment: float) -> None:
        """Let the host wait for the accelerator."""
        if self._host >= moment:
            return
        self._host = moment
        late = self._real_now() - self._delay - moment
        if late > 0.0:
            self.times.late_steps += 1
            self.times.late_seconds += late
            self._delay += late
        self._sleep_until(moment)

    def count_drafts(self, verifies: int, drafted: int, accepted: int) -> None:
        """Add the verified tokens of a step to the totals."""
        self.times.verifies += verifies
        self.times.drafted += drafted
        self.times.accepted += accepted

    def _sleep_until(self, moment: float) -> None:
        self._sleep(max(0.0, moment + self._delay - self._real_now()))


def attach(runner: Any, clock: EmulatedClock) -> None:
    """Pace a vLLM model runner (V1) with `clock`.

    A step is launched by `_model_forward`. Its tokens arrive before `_bookkeeping_sync` or, if the engine schedules
    asynchronously, with an event. A step follows the previous one if it contains a running request; otherwise the
    engine was idle in between.
    """
    execute, sample_tokens = runner.execute_model, runner.sample_tokens
    forward, bookkeeping = runner._model_forward, runner._bookkeeping_sync
    follows = False

    def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal follows
        follows = bool(scheduler_output.scheduled_cached_reqs.req_ids)
        return execute(scheduler_output, *args, **kwargs)

    def model_forward(*args: Any, **kwargs: Any) -> Any:
        batch = runner.input_batch
        rows = batch.num_reqs
        tokens = np.diff(runner.query_start_loc.np[: rows + 1])
        is_prefilled = batch.num_computed_tokens_cpu[:rows] >= batch.num_prompt_tokens[:rows]
        drafts = (tokens - 1)[is_prefilled]
        context = float(batch.num_tokens_no_spec[:rows].mean())
        clock.launch(rows, int(tokens.sum()), int(drafts.sum()), int(drafts.max(initial=0)), context, follows)
        return forward(*args, **kwargs)

    def bookkeeping_sync(*args: Any, **kwargs: Any) -> Any:
        if not runner.use_async_scheduling:  # sampled tokens are copied to the host
            clock.wait_until(clock.free_at)
        return bookkeeping(*args, **kwargs)

    def sample_and_count(*args: Any, **kwargs: Any) -> Any:
        state = runner.execute_model_state
        output = sample_tokens(*args, **kwargs)
        if state is not None:
            _when_known(output, lambda known: _count_drafts(clock, state.scheduler_output, known))
        return output

    runner.execute_model, runner.sample_tokens = execute_model, sample_and_count
    runner._model_forward, runner._bookkeeping_sync = model_forward, bookkeeping_sync


def _when_known(output: Any, act: Callable[[Any], None]) -> None:
    """Call `act` with a step's output: now, or when an asynchronous one has arrived."""
    if not hasattr(output, "get_output"):
        act(output)
        return
    get_output = output.get_output

    def get_and_act() -> Any:
        known = get_output()
        act(known)
        return known

    output.get_output = get_and_act


def _count_drafts(clock: EmulatedClock, step: Any, output: Any) -> None:
    drafts = step.scheduled_spec_decode_tokens
    accepted = sum(len(output.sampled_token_ids[output.req_id_to_index[one]]) - 1 for one in drafts)
    clock.count_drafts(len(step.scheduled_cached_reqs.req_ids), sum(map(len, drafts.values())), accepted)
