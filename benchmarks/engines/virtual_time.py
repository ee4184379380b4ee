"""A real vLLM engine in virtual time: host work at this machine's speed, device work at published step times.

While the engine's core works, a virtual clock advances with the CPU time of its thread, so that other processes on the
same cores are not charged. What an accelerator would compute takes no host time; it is queued on a modelled device
instead, where a step takes as long as published. An event remembers the position in the device's queue at which it was
recorded, and waiting for it advances the clock to there. So host work that a device would hide is hidden and the rest
is charged, without sleeping, and however slow this machine's arithmetic is. Operations that a GPU would run
asynchronously are charged to the host as launches (LAUNCH_SECONDS).

Only the core counts: the front end (input and output processing, the benchmark's loop) is another process in production
and takes no virtual time here. Not modelled: copies between host and device take no time, operations of vLLM's input
preparation take what they take on a CPU, code that would block on a device without waiting for an event is not noticed,
and drafters use one thread. The engine runs in this process, one per process, with vLLM's CPU build.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.engines.device_time import DeviceTime
from benchmarks.engines.process import RECORDED_ANSWER
from tools import cpu_async

# Host time of one launched operation: 4 to 6 us in the CUDA driver (susun-blog.com/blog/pegainfer-3-cuda-graph), 5 to
# 25 us with Python and PyTorch's dispatcher (jiahuanglin.xyz/all_lessons/gpu_kernel_serving/18_pytorch_to_kernel.html).
LAUNCH_SECONDS = 10e-6
# Handing work to another thread of the process: the call that submits it and the one that awaits it, measured here.
HANDOVER_SECONDS = 20e-6
LAYERS = {"qwen2.5-7b": 28, "llama-3.1-8b": 32, "qwen2.5-14b": 48}  # of the models with published step times
PIECES_PER_LAYER = 3  # launches: a graph, the update of the KV cache, and attention
MOST_GRAPH_TOKENS = 512  # that vLLM captures CUDA graphs for
LOGITS_LAUNCHES = 2  # the selection of the sampled positions, and their logits

SCHEDULE, OUTPUT, BOOKKEEPING = "schedule", "output processing", "bookkeeping"
INPUTS, DRAFTER = "input preparation", "drafter"
PARTS = (SCHEDULE, OUTPUT, BOOKKEEPING, INPUTS, DRAFTER)  # of an engine core's host time
RHYMES_CLOCK, RHYMES_HELPER = "clock", "_helper"  # attributes that only rhyme's drafter has; asynchronously, also the
# functions that its model runner calls for it, by the drafter's own method:
RUNNERS_HOOKS = {"trim": "update_scheduler_for_invalid_drafts", "draft": "update_ngram_gpu_tensors_incremental"}
PREPARES = "prepares"  # kind of operations that prepare a step
CERTAIN = 1e4  # logit of a recorded token where all others are 0: its probability is exactly 1


class VirtualClock:
    """The time of an engine core and of its device, in seconds. The clock stands still until `running`.

    Args:
        real: the clock of the host's work, by default its CPU time; replaceable in tests.

    Attributes:
        free_at: when the device will have computed everything that is queued.
        waited: how long the host has waited for the device.
    """

    def __init__(self, real: Callable[[], float] = time.thread_time) -> None:
        self.free_at = 0.0
        self.waited = 0.0
        self._real = real
        self._shown = 0.0
        self._since: float | None = None  # real time at which the clock was started; None: it stands still

    def now(self) -> float:
        """Return the virtual time."""
        return self._shown if self._since is None else self._shown + self._real() - self._since

    @property
    def worked(self) -> float:
        """How long the host has worked."""
        return self.now() - self.waited

    @contextmanager
    def running(self, runs: bool) -> Iterator[None]:
        """Let the clock run or stand still in a `with` block, and go on as before after it."""
        before = self._since is not None
        self._switch(runs)
        try:
            yield
        finally:
            self._switch(before)

    def queue(self, seconds: float) -> float:
        """Queue a step on the device; return how long the device has been idle before it."""
        now = self.now()
        idle = max(0.0, now - self.free_at)
        self.free_at = max(now, self.free_at) + seconds
        return idle

    def launch(self, count: int, prepares: bool = False) -> None:
        """Charge the host for launching short operations. They end no earlier than they are launched.

        The time of operations that prepare the next step counts for that step.
        """
        self.charge(count * LAUNCH_SECONDS)
        if not prepares:
            self.free_at = max(self.free_at, self.now())

    def charge(self, seconds: float) -> None:
        """Let the host work."""
        self._shown += seconds

    def wait_until(self, moment: float) -> None:
        """Let the host wait for the device."""
        missing = moment - self.now()
        if missing > 0.0:
            self._shown += missing
            self.waited += missing

    def _switch(self, runs: bool) -> None:
        self._shown = self.now()
        self._since = self._real() if runs else None


def event_and_stream(clock: VirtualClock) -> tuple[type, type]:
    """Return the classes of events and streams on the device of `clock`. All streams share its queue."""

    class Event(cpu_async.Event):
        at = 0.0  # a new event has happened

        def record(self, *args: Any) -> None:
            self.at = clock.free_at

        def synchronize(self) -> None:
            clock.wait_until(self.at)

        def query(self) -> bool:
            return clock.now() >= self.at

    class Stream(cpu_async.Stream):
        def synchronize(self) -> None:
            clock.wait_until(clock.free_at)

    return Event, Stream


class Helper:
    """A second thread of the engine core's process in virtual time: a GPU's host has more cores than this machine.

    Its work is done at once, but whoever awaits it waits until it would have been done.
    """

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock

    def submit(self, work: Callable[..., Any], *args: Any) -> Helper.Result:
        self._clock.charge(HANDOVER_SECONDS)
        with self._clock.running(False):
            started = time.thread_time()
            result = work(*args)
            return Helper.Result(self._clock, self._clock.now() + time.thread_time() - started, result)

    @dataclass(frozen=True)
    class Result:
        clock: VirtualClock
        at: float
        value: Any

        def result(self) -> Any:
            self.clock.wait_until(self.at)
            return self.value


@dataclass(kw_only=True)
class Step:
    """One step of the engine. All times are virtual seconds.

    Attributes:
        rows: running requests.
        verifies: rows among them that are not prefilled: drafted or not, they get a token and what is accepted.
        tokens: computed tokens: one per row, drafts, and prompts.
        drafted: draft tokens among them.
        launched: when the step was launched.
        period: time since the launch of the step before; 0 for the first one.
        device_seconds: published time of the step.
        gap: how long the device was idle before the step: the host time between the arrival of tokens and the launch.
        host: what the host has worked since the launch of the step before.
        parts: what of this was in each of PARTS, if they are timed in this run.
    """

    rows: int
    verifies: int
    tokens: int
    drafted: int = 0
    launched: float
    period: float
    device_seconds: float
    gap: float
    host: float
    parts: dict[str, float]


class HostParts:
    """Divides the host's time among PARTS. Time in a part that was called by another one counts for itself only.

    Attributes:
        is_on: whether parts are timed; reading the CPU time takes a microsecond.
    """

    def __init__(self, clock: VirtualClock) -> None:
        self.is_on = False
        self._clock = clock
        self._inner = 0.0  # time in parts that the present one has called
        self._seconds = dict.fromkeys(PARTS, 0.0)

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return `function` such that its time counts for `part`."""

        def call(*args: Any, **kwargs: Any) -> Any:
            if not self.is_on:
                return function(*args, **kwargs)
            outer, self._inner = self._inner, 0.0
            started = self._clock.worked
            try:
                return function(*args, **kwargs)
            finally:
                spent = self._clock.worked - started
                self._seconds[part] += spent - self._inner
                self._inner = outer + spent

        return call

    def take(self) -> dict[str, float]:
        """Return the seconds by part since the last call."""
        taken, self._seconds = self._seconds, dict.fromkeys(PARTS, 0.0)
        return taken


class LaunchCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operations that a GPU would have to launch: not views, and not the allocation of memory."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not (func.is_view or "empty" in func.name())
        return func(*args, **(kwargs or {}))


@dataclass
class RecordedAnswers:
    """Takes the policy's place: a request gets the tokens of the recorded answer that it names, whatever is drafted.

    The sampler gets logits that leave no choice, so it accepts of a draft what agrees with the answer. For answers that
    were sampled at temperature 1.0 this is exact (drafting/replay.py explains why), and all engines generate the same.
    """

    answers: Sequence[Sequence[int]]
    _texts: np.ndarray = field(init=False)  # int64 [answers, longest answer], repeating the last token

    def __post_init__(self) -> None:
        longest = max(map(len, self.answers))
        self._texts = np.array([[*one, *[one[-1]] * (longest - len(one))] for one in self.answers], np.int64)

    def next_tokens(self, runner: Any, metadata: Any) -> np.ndarray:
        """Return the token that follows each sampled position; `metadata`: vLLM's of the drafts, or None."""
        batch, rows = runner.input_batch, runner.input_batch.num_reqs
        ends = runner.query_start_loc.np[1 : rows + 1]
        sampled = ends - 1 if metadata is None else metadata.logits_indices.numpy()
        row = np.searchsorted(ends, sampled, side="right")
        position = runner.positions[torch.from_numpy(sampled)].numpy() + 1 - batch.num_prompt_tokens[row]
        parameters = [runner.requests[one].sampling_params for one in batch.req_ids]
        answer = np.array([one.extra_args[RECORDED_ANSWER] for one in parameters], np.int64)
        return np.asarray(self._texts[answer[row], position.clip(0, self._texts.shape[1] - 1)])

    def force(self, logits: torch.Tensor, tokens: np.ndarray) -> None:
        """Make the sampler choose these tokens."""
        logits.zero_()
        logits[torch.arange(len(tokens)), torch.from_numpy(tokens)] = CERTAIN


class VirtualEngine:
    """An in-process `vllm.LLM` that runs on a virtual clock. `install` comes before it is created.

    Args:
        llm: the engine.
        clock: the clock whose events `install` has put in place.
        model: the model with published step times.

    Attributes:
        steps: of the present run.
    """

    def __init__(self, llm: Any, clock: VirtualClock, model: str) -> None:
        self.steps: list[Step] = []
        self._clock = clock
        self._seconds = DeviceTime(model).seconds
        self._layers = LAYERS[model]
        self._scale = 1.0
        self._answers: RecordedAnswers | None = None
        self._parts = HostParts(clock)
        self._worked_at_launch = 0.0
        self._launches: dict[tuple[Any, ...], int] = {}  # by kind of operation and step
        from vllm.v1.worker import gpu_model_runner

        core = llm.llm_engine.engine_core.engine_core
        self._runner = core.model_executor.driver_worker.worker.model_runner
        self._runner_module: Any = gpu_model_runner
        self._drafter: Any = None  # the drafter that is connected
        for name in ("step_fn", "post_step", "add_request"):
            _wrap(core, name, self._in_core)
        _wrap(self._runner, "_model_forward", self._forward)
        _wrap(self._runner.model, "compute_logits", self._logits)
        _wrap(self._runner, "_sample", self._sample)
        _wrap(self._runner, "_bookkeeping_sync", self._bookkeeping)
        _wrap(self._runner, "sample_tokens", self._output)
        for owner, name in (
            (gpu_model_runner, "update_num_computed_tokens_for_batch_change"),
            (self._runner.input_batch.block_table, "compute_slot_mapping"),
        ):
            _wrap(owner, name, partial(self._launch, (PREPARES, name)))
        for owner, name, part in (
            (core.scheduler, "schedule", SCHEDULE),
            (core.scheduler, "update_from_output", OUTPUT),
            (core.scheduler, "update_draft_token_ids", DRAFTER),
            (self._runner, "_update_states", INPUTS),
            (self._runner, "_prepare_inputs", INPUTS),
            (self._runner, "_build_attention_metadata", INPUTS),
            (self._runner, "_bookkeeping_sync", BOOKKEEPING),
        ):
            setattr(owner, name, self._parts.timed(part, getattr(owner, name)))

    def start_run(self, scale: float, answers: Sequence[Sequence[int]] | None, times_parts: bool) -> float:
        """Begin a run and return the virtual time.

        Args:
            scale: duration of a step relative to the published one.
            answers: recorded answers that the requests get; None: the engine's own model computes.
            times_parts: whether the parts of the host's time are measured.
        """
        self._connect_drafter()
        self._parts.is_on = times_parts
        self.steps = []
        self._scale = scale
        self._answers = None if answers is None else RecordedAnswers(answers)
        self._parts.take()
        self._worked_at_launch = self._clock.worked
        self._clock.wait_until(self._clock.free_at)
        return self._clock.now()

    def end_run(self, started: float) -> dict[str, float]:
        """Return what a run has taken: virtual seconds, of these the device's, its mean idle time, and sums over steps.

        Returns:
            `seconds`, `device_seconds`, `gap_ms`, `steps`, `verifies` and `drafted`; see `Step`.
        """
        gaps = [step.gap for step in self.steps[1:]]
        return {
            "seconds": self._clock.now() - started,
            "device_seconds": sum(step.device_seconds for step in self.steps),
            "gap_ms": 1e3 * sum(gaps) / max(1, len(gaps)),
            "steps": len(self.steps),
            "verifies": sum(step.verifies for step in self.steps),
            "drafted": sum(step.drafted for step in self.steps),
        }

    def _connect_drafter(self) -> None:
        """Let a drafter that has not been connected before learn virtual times, and count its time."""
        drafter = getattr(self._runner, "drafter", None)
        if drafter is None or drafter is self._drafter:
            return
        self._drafter = drafter
        if hasattr(drafter, RHYMES_CLOCK):
            setattr(drafter, RHYMES_CLOCK, self._clock.now)
        if hasattr(drafter, "propose"):
            drafter.propose = self._parts.timed(DRAFTER, drafter.propose)
        if hasattr(drafter, "trim"):  # rhyme's, under asynchronous scheduling
            getattr(drafter, RHYMES_HELPER).shutdown()
            setattr(drafter, RHYMES_HELPER, Helper(self._clock))
            for name, hook in RUNNERS_HOOKS.items():
                if getattr(self._runner_module, hook) != getattr(drafter, name):
                    raise RuntimeError(f"vLLM's model runner does not call {name} as {hook}")
                setattr(self._runner_module, hook, self._parts.timed(DRAFTER, getattr(drafter, name)))
        if hasattr(drafter, "update_token_ids_ngram"):
            drafter.update_token_ids_ngram = partial(self._launch, ("tokens",), drafter.update_token_ids_ngram)

    def _in_core(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self._clock.running(True):
            return function(*args, **kwargs)

    def _forward(self, forward: Callable[..., Any], **inputs: Any) -> Any:
        runner, clock = self._runner, self._clock
        with clock.running(False):
            rows = runner.input_batch.num_reqs
            tokens = int(runner.query_start_loc.np[rows])
            computed = runner.num_computed_tokens[:rows].numpy()
            verifies = computed >= runner.input_batch.num_prompt_tokens[:rows]
            drafts = np.diff(runner.query_start_loc.np[: rows + 1])[verifies] - 1
            of_drafts = int(drafts.sum()), int(drafts.max(initial=0))
            seconds = self._scale * self._seconds(rows, tokens, float(computed.mean()), *of_drafts)
            launched, worked = clock.now(), clock.worked
            step = Step(
                rows=rows,
                verifies=int(verifies.sum()),
                tokens=tokens,
                launched=launched,
                period=launched - self.steps[-1].launched if self.steps else 0.0,
                device_seconds=seconds,
                gap=clock.queue(seconds),
                host=worked - self._worked_at_launch,
                parts=self._parts.take(),
            )
            self.steps.append(step)
            self._worked_at_launch = worked
            hidden = torch.zeros(tokens, 1) if self._answers is not None else forward(**inputs)
        clock.launch(1 if self._is_one_graph(rows, tokens) else 1 + PIECES_PER_LAYER * self._layers)
        return hidden

    def _is_one_graph(self, rows: int, tokens: int) -> bool:
        """Return whether a step is one CUDA graph. Stock vLLM has such graphs for steps of one token per row, and rhyme
        keeps them (histospec/cuda_graphs.py). vLLM's own methods have them for full drafts in all rows only.

        Steps shorter than published stand for a newer GPU, whose FlashAttention 3 takes rows of any lengths in a graph.
        rhyme then uses full graphs for all steps; vLLM's own methods keep vLLM's default.
        """
        if tokens > MOST_GRAPH_TOKENS:
            return False
        is_rhyme = hasattr(self._drafter, RHYMES_CLOCK)
        if is_rhyme and self._scale < 1.0:
            return True
        return tokens == rows and (is_rhyme or self._runner.speculative_config is None)

    def _logits(self, compute: Callable[..., Any], hidden: torch.Tensor) -> Any:
        runner = self._runner
        with self._clock.running(False):
            if self._answers is not None:
                logits = torch.empty(len(hidden), runner.input_batch.vocab_size, dtype=runner.model_config.dtype)
            else:
                logits = compute(hidden)
        self._clock.launch(LOGITS_LAUNCHES)
        return logits

    def _sample(self, sample: Callable[..., Any], logits: torch.Tensor, metadata: Any) -> Any:
        if self._answers is not None:
            with self._clock.running(False):
                self._answers.force(logits, self._answers.next_tokens(self._runner, metadata))
        if metadata is not None:
            self.steps[-1].drafted = sum(metadata.num_draft_tokens)
        has_log_probs = self._runner.input_batch.sampling_metadata.max_num_logprobs is not None
        return self._launch(("sample", metadata is not None, has_log_probs), sample, logits, metadata)

    def _bookkeeping(self, bookkeeping: Callable[..., Any], *args: Any) -> Any:
        if not self._runner.use_async_scheduling:  # sampled tokens are copied to the host
            self._clock.wait_until(self._clock.free_at)
        return bookkeeping(*args)

    def _output(self, sample_tokens: Callable[..., Any], *args: Any) -> Any:
        """End a step; what remains of an asynchronous one's bookkeeping comes when its output is read."""
        output = sample_tokens(*args)
        if hasattr(output, "get_output"):
            output.get_output = self._parts.timed(BOOKKEEPING, output.get_output)
        return output

    def _launch(self, kind: tuple[Any, ...], function: Callable[..., Any], *args: Any) -> Any:
        """Call a function that only launches operations. They are counted once per kind of function and step."""
        with self._clock.running(False):
            if kind in self._launches:
                result = function(*args)
            else:
                with LaunchCounter() as counter:
                    result = function(*args)
                self._launches[kind] = max(1, counter.count)
        self._clock.launch(self._launches[kind], prepares=kind[0] == PREPARES)
        return result


def install() -> VirtualClock:
    """Let the engine that this process will create run on a virtual clock, and schedule as it would on a GPU."""
    clock = VirtualClock()
    event, stream = event_and_stream(clock)
    cpu_async.install(event, stream)
    return clock


def _wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Replace a method by `around`, which gets the method as its first argument."""
    setattr(owner, name, partial(around, getattr(owner, name)))
