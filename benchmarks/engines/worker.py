"""The worker extension through which benchmarks reach the drafter in a vLLM worker (`collective_rpc`)."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

from benchmarks.drafting.drafters import RhymeDrafter, remember_in_arctic
from benchmarks.drafting.replay import Replay, TraceStep, load_trace, width_of
from benchmarks.engines.device_time import DeviceTime
from benchmarks.jobs.emulated_clock import EmulatedClock, attach
from rhyme_verl.histospec.worker_access import HistoSpecWorker
from rhyme_verl.platforms.cpu_sampling import expand_kernel_is_exact

MAX_ROWS = 128  # in which a drafter gets earlier answers


class BenchWorker(HistoSpecWorker):
    """Worker extension of every engine that is measured, drafting or not."""

    _bench_clock: EmulatedClock | None = None

    def bench_samples_exactly(self) -> bool:
        """Return whether drafted rows are sampled correctly, for which vLLM's CPU build needs rhyme's fix."""
        from vllm.platforms import current_platform

        return not current_platform.is_cpu() or expand_kernel_is_exact()

    def bench_emulate(self, model: str) -> None:
        """Attach an emulated clock with the step times of `model`; `bench_pace` turns it on."""
        self._bench_clock = EmulatedClock(DeviceTime(model), 0.0)
        attach(self.model_runner, self._bench_clock)

    def bench_pace(self, dilation: float | None) -> None:
        """Begin a run whose steps take `dilation` times as long as published, or their own time if it is None."""
        assert self._bench_clock is not None or dilation is None, "the engine was not started with an emulated clock"
        if self._bench_clock is not None:
            self._bench_clock.restart(dilation or 0.0)

    def bench_late_shares(self) -> dict[str, float]:
        """Return the shares of the run's steps and time in which the CPU was too slow."""
        assert self._bench_clock is not None
        times = self._bench_clock.times
        return {"late_step_share": times.late_step_share, "late_time_share": times.late_time_share}

    def bench_remember(self, trace: str, max_epoch: int, after: int = 0) -> int:
        """Let a new drafter, or one that knows epochs 1 to `after`, know the trace's epochs up to `max_epoch`.

        Drafters also learn from running requests, and an earlier run over the same prompts must not help a later one.
        All drafters get the same answers, through the calls that add finished answers in production. rhyme's also gets
        them as running requests, because it has learnt from them in a job that has generated them; the time stands
        still, so that it learns nothing about the cost of steps.

        Returns:
            The number of answers in the history.
        """
        from vllm.v1.spec_decode.suffix_decoding import SuffixDecodingProposer

        from rhyme_verl.histospec.proposer import Proposer

        runner = self.model_runner
        drafter = getattr(runner, "drafter", None)
        steps = [step for step in _steps(trace, max_epoch) if step.epoch > after] if max_epoch else []
        if isinstance(drafter, SuffixDecodingProposer):
            if not after:
                runner.drafter = SuffixDecodingProposer(self.vllm_config)
            for step in steps:
                remember_in_arctic(runner.drafter.suffix_cache, step)
            return len(runner.drafter.suffix_cache.cached_requests)
        if isinstance(drafter, Proposer):
            if not after:
                same_class: Any = type(drafter)
                runner.drafter = same_class(self.vllm_config)
                runner.drafter.bind(runner)
            if steps:
                trained = RhymeDrafter.of(runner.drafter.index, runner.drafter.drafter, runner.max_model_len)
                engine = Replay(trained, MAX_ROWS, width_of(steps), lambda *_: 0.0, charge_drafter=False)
                for step in steps:
                    engine.run_step(step)
                trained.release()
            return int(runner.drafter.index.stats().num_answers)
        return 0

    def bench_limit(self, max_step_tokens: int) -> None:
        """Set the limit on the tokens of a step for rhyme's next drafter (`bench_remember`)."""
        self.vllm_config.additional_config["rhyme"]["spec"]["max_step_tokens"] = max_step_tokens

    def bench_draft(self, num_draft_tokens: int, token_id: int) -> None:
        """Set what a FixedDrafter proposes."""
        self.model_runner.drafter.num_draft_tokens = num_draft_tokens
        self.model_runner.drafter.token_id = token_id

    def bench_is_asynchronous(self) -> bool:
        """Return whether vLLM schedules asynchronously."""
        return bool(self.vllm_config.scheduler_config.async_scheduling)

    def bench_graphs(self) -> str:
        """Return the CUDA graph mode that vLLM has chosen."""
        return str(self.vllm_config.compilation_config.cudagraph_mode)


@lru_cache
def _steps(trace: str, max_epoch: int) -> list[TraceStep]:
    return load_trace(Path(trace), max_epoch)
