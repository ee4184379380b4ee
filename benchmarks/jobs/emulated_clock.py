"""A clock that makes the steps of a real engine take as long as an accelerator's, by sleeping for the remaining time.

On a CPU the cost of a step is about proportional to its tokens, so neither a long tail nor a draft costs what it does
on an accelerator. Here policy, tokens, scheduler and drafter are real and only time is emulated: the period from one
step to the next is D x (published step time + measured time of the drafter). The drafter is called when the accelerator
would have computed the step, so that a drafter which learns from the clock sees emulated times. The dilation D lets
the cores keep up. It is the same in all cases, and all reported times are divided by it. Steps for which the CPU took
longer are counted as late, and too many of them make a result invalid (`EmulatedTime.is_valid`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rhyme_verl.sim.step_times import PublishedStepTime

MAX_LATE_STEPS = 0.03  # largest shares of late steps and late time in a valid emulation
MAX_LATE_TIME = 0.02
AFTER_DRAFTER_SECONDS = 0.002  # time that the CPU needs to end a step after drafting
LABEL = "published A100 step times"


@dataclass(kw_only=True)
class EmulatedTime:
    """Totals over a worker's emulated steps. Seconds are real (dilated) unless stated otherwise.

    Attributes:
        steps: number of engine steps.
        seconds: time that the steps should have taken.
        drafter_seconds: measured time of the drafter, not dilated.
        late_steps: number of steps for which the CPU took longer.
        late_seconds: sum of the time by which it took longer.
        tokens: computed tokens, including drafts and prompts.
        verifies: forward passes over a request after its first token, drafted or not, summed over requests.
        drafted, accepted: verified and accepted draft tokens.
    """

    steps: int = 0
    seconds: float = 0.0
    drafter_seconds: float = 0.0
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
    """Paces one worker; independent of vLLM.

    Args:
        step_time: step times of the accelerator.
        dilation: real seconds per emulated second.
        now, sleep: the clock and the function that waits, both in seconds; replaceable in tests.
    """

    def __init__(
        self,
        step_time: PublishedStepTime,
        dilation: float,
        now: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.times = EmulatedTime()
        self._step_time = step_time
        self._dilation = dilation
        self._now = now
        self._sleep = sleep
        self._due = 0.0  # end of the previous step
        self._started = 0.0
        self._drafter_seconds = 0.0

    def restart(self, dilation: float) -> None:
        """Reset the totals and set the dilation; 0: steps take their own time."""
        self.times = EmulatedTime()
        self._dilation = dilation

    def start(self, follows: bool) -> None:
        """Begin a step. If it `follows` another one, it counts from the end of that one, otherwise from this call."""
        self._started = self._due if follows else self._now()
        self._drafter_seconds = 0.0

    def wait_for_drafter(self, rows: int, num_tokens: int, context: float) -> None:
        """Wait until the accelerator would have computed the step, except for its drafts."""
        computed = self._started + self._dilation * self._step_time.seconds(rows, num_tokens, context)
        self._sleep(max(0.0, computed - AFTER_DRAFTER_SECONDS - self._now()))

    def add_drafter_time(self, seconds: float) -> None:
        """Add time of the drafter to the present step."""
        self._drafter_seconds += seconds

    def count_drafts(self, verifies: int, drafted: int, accepted: int) -> None:
        """Add the verified tokens of the present step to the totals."""
        self.times.verifies += verifies
        self.times.drafted += drafted
        self.times.accepted += accepted

    def finish(self, rows: int, num_tokens: int, context: float) -> None:
        """Wait until the accelerator would have finished the step, and count it."""
        cost = self._step_time.seconds(rows, num_tokens, context) + self._drafter_seconds
        period = self._dilation * cost
        self._due = self._started + period
        times = self.times
        times.steps += 1
        times.seconds += period
        times.drafter_seconds += self._drafter_seconds
        times.tokens += num_tokens
        late = self._now() - self._due
        if late > 0.0:
            times.late_steps += 1
            times.late_seconds += late
            self._due += late
        else:
            self._sleep(-late)


def attach(runner: Any, clock: EmulatedClock) -> None:
    """Pace a vLLM model runner (V1) with `clock` by wrapping the two halves of a step and the drafter.

    vLLM computes a step in `execute_model` and ends it in `sample_tokens`, which also proposes drafts. A step follows
    the previous one if it contains a running request; otherwise the engine was idle in between.
    """
    execute, sample, propose = runner.execute_model, runner.sample_tokens, runner.propose_draft_token_ids
    scheduled: list[Any] = []

    def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        if scheduler_output.total_num_scheduled_tokens:
            clock.start(follows=bool(scheduler_output.scheduled_cached_reqs.req_ids))
            scheduled.append(scheduler_output)
        return execute(scheduler_output, *args, **kwargs)

    def size_of(step: Any) -> tuple[int, int, float]:
        batch = runner.input_batch
        context = float(batch.num_tokens_no_spec[: batch.num_reqs].mean()) if batch.num_reqs else 0.0
        return len(step.num_scheduled_tokens), step.total_num_scheduled_tokens, context

    def propose_draft_token_ids(*args: Any, **kwargs: Any) -> Any:
        if scheduled:
            clock.wait_for_drafter(*size_of(scheduled[-1]))
        started = time.perf_counter()
        drafts = propose(*args, **kwargs)
        clock.add_drafter_time(time.perf_counter() - started)
        return drafts

    def sample_tokens(*args: Any, **kwargs: Any) -> Any:
        output = sample(*args, **kwargs)
        if scheduled:
            step = scheduled.pop()
            drafts = step.scheduled_spec_decode_tokens
            drafted = sum(map(len, drafts.values()))
            accepted = 0
            if drafted:
                accepted = sum(len(output.sampled_token_ids[output.req_id_to_index[one]]) - 1 for one in drafts)
            clock.count_drafts(len(step.scheduled_cached_reqs.req_ids), drafted, accepted)
            clock.finish(*size_of(step))
        return output

    runner.execute_model = execute_model
    runner.sample_tokens = sample_tokens
    runner.propose_draft_token_ids = propose_draft_token_ids
