"""The worker extension that gives the engines of a verl job emulated step times (emulated_clock.py).

All cases use it, with and without rhyme. RHYME_BENCH_STEP="<model>,<dilation>" turns it on (recorded_server.py). Every
LINE_STEPS steps it appends the totals of the emulation to `emulation-<replica>.jsonl` in the folder RHYME_BENCH_TIMES.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.jobs.emulated_clock import EmulatedClock, attach
from rhyme_verl.integration.worker_extension import RhymeCpuWorkerExtension
from rhyme_verl.platforms.cpu_sampling import expand_kernel_is_exact
from rhyme_verl.sim.step_times import PublishedStepTime

LINE_STEPS = 50
NICENESS = 0  # of an engine; Ray's workers, including servers, have 15


class _ReportingClock(EmulatedClock):
    """Writes a line of running totals every LINE_STEPS steps."""

    def __init__(self, step_time: PublishedStepTime, dilation: float, path: Path) -> None:
        super().__init__(step_time, dilation)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "a", buffering=1, encoding="utf-8")

    def finish(self, rows: int, num_tokens: int, context: float) -> None:
        super().finish(rows, num_tokens, context)
        if self.times.steps % LINE_STEPS == 0:
            self._file.write(json.dumps({"time": time.time(), **asdict(self.times)}) + "\n")


class EmulatedWorkerExtension(RhymeCpuWorkerExtension):
    """rhyme's own extension with a method that attaches the emulated clock."""

    def bench_emulate(self, model: str, dilation: float) -> None:
        runner: Any = self.model_runner
        if runner.speculative_config is not None and not expand_kernel_is_exact():
            raise RuntimeError("vLLM's CPU build samples drafted rows wrongly: rhyme's fix is not active")
        replica = os.environ.get("VERL_REPLICA_RANK", "0")  # set by verl's server
        path = Path(os.environ["RHYME_BENCH_TIMES"]) / f"emulation-{replica}.jsonl"
        _go_first()
        attach(runner, _ReportingClock(PublishedStepTime(model), dilation, path))


def _go_first() -> None:
    """Raise this process's priority above the rest of the job, because an accelerator would not share the CPU."""
    for thread in os.listdir("/proc/self/task"):
        try:
            os.setpriority(os.PRIO_PROCESS, int(thread), NICENESS)
        except PermissionError:  # keep the niceness of Ray's workers; late steps are counted anyway
            return
