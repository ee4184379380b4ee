"""A worker whose steps take as long as an accelerator's would: the time that is missing is slept.

On a CPU a step costs about as much as there are sequences in it, so that it hardly matters how many run together; on
an accelerator most of a step's cost is fixed. What is emulated is time alone: trainer, router, engine, policy and
tokens are real. Asked for with RHYME_BENCH_STEP="<base ms>,<ms a sequence>,<us a prompt token>"; see
recorded_server.py.
"""

from __future__ import annotations

import time
from typing import Any

from rhyme_verl.worker_extension import RhymeCpuWorkerExtension


class EmulatedWorkerExtension(RhymeCpuWorkerExtension):
    """rhyme's own extension, and a method that slows the worker down."""

    def bench_emulate(self, base_ms: float, sequence_ms: float, prompt_token_us: float) -> None:
        runner: Any = self.model_runner  # type: ignore[attr-defined]
        execute = runner.execute_model

        def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            output = execute(scheduler_output, *args, **kwargs)
            sequences = len(scheduler_output.num_scheduled_tokens)
            drafted = sum(map(len, scheduler_output.scheduled_spec_decode_tokens.values()))
            prompt_tokens = max(0, scheduler_output.total_num_scheduled_tokens - sequences - drafted)
            due = 1e-3 * (base_ms + sequence_ms * sequences) + 1e-6 * prompt_token_us * prompt_tokens
            if sequences:
                time.sleep(max(0.0, started + due - time.perf_counter()))
            return output

        runner.execute_model = execute_model
