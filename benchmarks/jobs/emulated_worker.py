"""The worker extension that gives the engines of a verl job emulated step times (emulated_clock.py).

All cases use it, with and without rhyme. RHYME_BENCH_STEP="<model>,<dilation>" turns it on (recorded_server.py). Every
LINE_STEPS steps it appends the totals of the emulation to `emulation-<replica>.jsonl` in the folder RHYME_BENCH_TIMES.

An engine with a drafter is charged host time from the table of `make bench-host`; rhyme under asynchronous scheduling,
whose model runner uses the emulated accelerator's events, only what that does not hide. An engine without a drafter is
charged nothing, because on a GPU asynchronous scheduling, which vLLM's CPU build lacks, would hide it.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.drafting.host_gap import HostGap, engine_gap
from benchmarks.engines.device_time import DeviceTime
from benchmarks.engines.virtual_time import event_and_stream
from benchmarks.jobs.emulated_clock import EmulatedClock, attach
from rhyme_verl.integration.worker_extension import RhymeCpuWorkerExtension
from rhyme_verl.platforms.cpu_sampling import expand_kernel_is_exact
from tools import cpu_async

LINE_STEPS = 10
NICENESS = 0  # of an engine; Ray's workers, including servers, have 15


class _ReportingClock(EmulatedClock):
    """Writes a line of running totals every LINE_STEPS steps, with whether the engine schedules asynchronously."""

    def __init__(self, step: str, host_gap: HostGap | None, asynchronous: bool) -> None:
        model, dilation = step.split(",")
        super().__init__(DeviceTime(model), float(dilation), host_gap)
        replica = os.environ.get("VERL_REPLICA_RANK", "0")  # set by verl's server
        folder = Path(os.environ["RHYME_BENCH_TIMES"])
        folder.mkdir(parents=True, exist_ok=True)
        self._file = open(folder / f"emulation-{replica}.jsonl", "a", buffering=1, encoding="utf-8")
        self._asynchronous = asynchronous

    def launch(self, *args: Any, **kwargs: Any) -> None:
        super().launch(*args, **kwargs)
        if self.times.steps % LINE_STEPS == 0:
            line = {"time": time.time(), "asynchronous": self._asynchronous, **asdict(self.times)}
            self._file.write(json.dumps(line) + "\n")


class EmulatedWorkerExtension(RhymeCpuWorkerExtension):
    """rhyme's own extension with an emulated clock."""

    def __new__(cls, **kwargs: Any) -> EmulatedWorkerExtension:
        """Create the worker and its clock, whose events the model runner takes when it is built."""
        config = kwargs["vllm_config"]
        asynchronous = bool(config.scheduler_config.async_scheduling)
        worker: Any = super().__new__(cls, **kwargs)
        gap = _host_gap(config.speculative_config, asynchronous)
        worker.bench_clock = _ReportingClock(os.environ["RHYME_BENCH_STEP"], gap, asynchronous)
        if asynchronous:
            _run_uncompiled()
            cpu_async.install(*event_and_stream(worker.bench_clock))  # type: ignore[arg-type]
        return worker  # type: ignore[no-any-return]

    def bench_emulate(self) -> None:
        """Begin to pace the engine, which has warmed up."""
        runner: Any = self.model_runner
        if runner.speculative_config is not None and not expand_kernel_is_exact():
            raise RuntimeError("vLLM's CPU build samples drafted rows wrongly: rhyme's fix is not active")
        _go_first()
        clock = self.bench_clock
        attach(runner, clock)
        drafter = getattr(runner, "drafter", None)
        if hasattr(drafter, "clock"):  # rhyme's
            drafter.clock = clock.emulated_seconds


def _host_gap(speculative_config: Any, asynchronous: bool) -> HostGap | None:
    if speculative_config is None:
        return None
    if speculative_config.method == "suffix":
        return engine_gap("suffix")
    return engine_gap("rhyme" if asynchronous else "rhyme-sync")


def _run_uncompiled() -> None:
    """Keep torch from compiling a short function of the model runner, between two steps, for every kind of batch."""
    from vllm.v1.worker import gpu_model_runner

    compiled: Any = gpu_model_runner.update_num_computed_tokens_for_batch_change
    original = getattr(compiled, "_torchdynamo_orig_callable", compiled)
    gpu_model_runner.update_num_computed_tokens_for_batch_change = original


def _go_first() -> None:
    """Raise this process's priority above the rest of the job, because an accelerator would not share the CPU."""
    for thread in os.listdir("/proc/self/task"):
        try:
            os.setpriority(os.PRIO_PROCESS, int(thread), NICENESS)
        except PermissionError:  # keep the niceness of Ray's workers; late steps are counted anyway
            return
