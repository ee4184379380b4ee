"""Runs one recorded verl job on several replicas of a shipped policy and analyses its records.

The servers record every request and the trainer's sampler every batch (recorded_server.py, recorded_sampler.py), in the
same way for any rollout, agent-loop manager and router.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from benchmarks.common.occupancy import Interval, clip, occupancy, open_intervals
from benchmarks.common.result_files import console
from examples.quickstart import policy, problems, quickstart
from examples.quickstart.job import VerlJob
from examples.quickstart.problems import QUICKSTART, Task
from examples.quickstart.progress import CORRELATION, LARGEST_DIFFERENCE, json_lines

MODES = ("sync", "colocate_async", "separate_async")
SAMPLES = 8
POLL_SECONDS = 2.0
ROLLOUT = "actor_rollout_ref.rollout"
STALENESS = "training/off_policy/trajectory_staleness"


@dataclass(frozen=True, kw_only=True)
class ReplicaJob:
    """A job's command line and environment.

    Attributes:
        mode: verl's trainer mode, one of MODES.
        rollout: `rhyme`, or `vllm` for verl's own.
        pipe: `pipe.max_age` for HistoPipe; None: verl's load balancer and order.
        replicas: number of rollout replicas.
        lanes: sequences that a replica runs concurrently (`max_num_seqs`).
        batch_size: prompts per training step, with SAMPLES answers each.
        epochs: number of passes over the problems.
        num_problems: number of training problems.
        task: kind of problems.
        train_file: training data in verl's format instead of `task`, with `num_problems` rows.
        policy: folder of the policy.
        max_response_tokens: maximum tokens per answer.
        emulation: "<model>,<dilation>" (emulated_worker.py); empty: real time.
        greedy: whether to record which tokens were the most probable ones.
        overrides: additional verl (Hydra) overrides.
    """

    mode: str
    rollout: str = "rhyme"
    pipe: int | None = None
    replicas: int = 2
    lanes: int = 32
    batch_size: int = 32
    epochs: int = 4
    num_problems: int = 64
    task: Task = QUICKSTART
    train_file: Path | None = None
    policy: Path = policy.SHIPPED_POLICY
    max_response_tokens: int = 400
    emulation: str = ""
    greedy: bool = False
    overrides: tuple[str, ...] = ()

    def run(self, out: Path, on_step: Callable[[str], None] | None = None) -> None:
        """Run the job in the folder `out`, whose contents are deleted first.

        Args:
            out: folder for data, logs and records.
            on_step: called with one line of progress per training step.

        Raises:
            typer.Exit: the job failed; the end of its log has been printed.
        """
        out = out.resolve()
        shutil.rmtree(out, ignore_errors=True)
        if self.train_file is None:
            problems.write_parquet(out / "data/train.parquet", "train", 0, self.num_problems, self.task)
        else:
            (out / "data").mkdir(parents=True)
            shutil.copy(self.train_file, out / "data/train.parquet")
        problems.write_parquet(out / "data/test.parquet", "test", 0, self.batch_size, self.task)
        environment = {
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(policy.REPOSITORY),
            "RHYME_BENCH_GREEDY": "1" if self.greedy else "",
            "RHYME_BENCH_STEP": self.emulation,
            "RHYME_BENCH_TIMES": str(out / "times"),
            "VERL_FILE_LOGGER_PATH": str(out / "metrics.jsonl"),
            "VERL_USE_EXTERNAL_MODULES": "benchmarks.jobs.recorded_server",
            # At INFO, verl 0.9.1 fails with hybrid_engine=false: logger.info(flush=True).
            "VERL_LOGGING_LEVEL": "WARNING",
        }
        with VerlJob(self.arguments(out), out / "verl.log", environment) as job:
            shown = 0
            while job.poll() is None:
                time.sleep(POLL_SECONDS)
                lines = json_lines(out / "metrics.jsonl") if on_step else []
                for line in lines[shown:]:
                    on_step(self._progress(line))
                shown = len(lines)
            if job.wait() != 0:
                console.print(job.log_tail(), markup=False, highlight=False)
                raise typer.Exit(1)

    def _progress(self, line: dict[str, Any]) -> str:
        total = self.epochs * self.num_problems // self.batch_size
        metrics = line["data"]
        reward, seconds = metrics["critic/rewards/mean"], metrics["timing_s/step"]
        return f"step {line['step']}/{total}  reward {reward:.3f}  {seconds:.1f} s"

    def arguments(self, out: Path) -> list[str]:
        """Return the Hydra overrides for `verl.trainer.main_ppo`."""
        base = self.base_arguments(out)
        if self.rollout == "vllm" and self.emulation:  # the emulated worker extension includes the CPU platform's
            base = [argument for argument in base if "worker_extension_cls" not in argument]
        return [
            *base,
            *self._mode_arguments(),
            f"actor_rollout_ref.model.path={self.policy.resolve()}",
            f"data.max_response_length={self.max_response_tokens}",
            *self._pipe_arguments(),
            *self.overrides,
        ]

    def base_arguments(self, out: Path) -> list[str]:
        """Return the config file and what it needs."""
        return quickstart.job_arguments(out, self.epochs, self.rollout)

    def _pipe_arguments(self) -> list[str]:
        if self.rollout == "vllm":
            return []
        if self.pipe is None:
            return [f"+{ROLLOUT}.custom.rhyme.pipe.enabled=false"]
        return [f"+{ROLLOUT}.custom.rhyme.pipe.max_age={self.pipe}"]

    def _mode_arguments(self) -> list[str]:
        sampler = "RecordedReplayBuffer" if self.mode == "sync" else "RecordedReplayBufferAsync"
        arguments = [
            f"trainer.v1.trainer_mode={self.mode}",
            "trainer.v1.sampler.custom_sampler.path=pkg://benchmarks.jobs.recorded_sampler",
            f"trainer.v1.sampler.custom_sampler.name={sampler}",
            f"data.train_batch_size={self.batch_size}",
            f"actor_rollout_ref.actor.ppo_mini_batch_size={self.batch_size}",
            f"{ROLLOUT}.n={SAMPLES}",
            f"{ROLLOUT}.max_num_seqs={self.lanes}",
            "ray_kwargs.ray_init.num_cpus=32",
        ]
        if self.mode != "separate_async":
            slots = self.replicas
            return [*arguments, f"trainer.n_gpus_per_node={slots}", f"ray_kwargs.ray_init.num_gpus={slots}"]
        return [
            *arguments,
            "trainer.v1.separate_async.parameter_sync_step=1",
            "trainer.n_gpus_per_node=1",
            f"ray_kwargs.ray_init.num_gpus={1 + self.replicas}",
            "actor_rollout_ref.hybrid_engine=false",  # the trainer's GPU slot holds no replica
            f"{ROLLOUT}.nnodes=1",
            f"{ROLLOUT}.n_gpus_per_node={self.replicas}",
            f"{ROLLOUT}.checkpoint_engine.backend=cpu",
            f"{ROLLOUT}.checkpoint_engine.custom_backend_module=benchmarks.jobs.cpu_checkpoint_engine",
        ]


def analyse(out: Path, mode: str, replicas: int, lanes: int, warmup_steps: int = 2) -> dict[str, Any]:
    """Analyse the records of a finished run; `measured` describes the replicas after `warmup_steps`.

    A step's rollout seconds are the time in which the replicas may generate between the moments when the trainer
    received the previous batch and this one: in `sync` mode while the trainer waits, otherwise while verl keeps the
    replicas open. Work that partial rollout or HistoPipe does ahead counts in the step in which it is done.
    """
    times = out / "times"
    requests = [json_lines(times / f"requests-{replica}.jsonl") for replica in range(replicas)]
    gates = [
        [(gate["time"], gate["open"]) for gate in json_lines(times / f"gates-{replica}.jsonl")]
        for replica in range(replicas)
    ]
    samples = json_lines(times / "samples.jsonl")
    started = min(request["start"] for replica in requests for request in replica)
    if mode == "sync":
        windows = [(sample["asked"], sample["got"]) for sample in samples]
    else:
        windows = open_intervals(gates, started, samples[-1]["got"])
    steps = []
    before = started
    for sample, line in zip(samples, json_lines(out / "metrics.jsonl"), strict=True):
        inside = clip(windows, before, sample["got"])
        metrics = line["data"]
        spanning = [last > first for first, last in sample["versions"]]
        steps.append(
            {
                "step": sample["step"],
                "got": sample["got"] - started,
                "rollout_seconds": _length(inside),
                "step_seconds": metrics["timing_s/step"],
                "gen_seconds": metrics["timing_s/gen"],
                "reward": metrics["critic/rewards/mean"],
                "probs_correlation": metrics[CORRELATION],
                "largest_probs_difference": metrics[LARGEST_DIFFERENCE],
                "staleness_mean": float(metrics[f"{STALENESS}/mean"]),
                "staleness_max": int(metrics[f"{STALENESS}/max"]),
                "staleness_worst_mean": float(metrics[f"{STALENESS}_worst/mean"]),
                "staleness_worst_max": int(metrics[f"{STALENESS}_worst/max"]),
                "spanning_share": sum(spanning) / len(spanning),
                **_replicas_within(requests, (before, sample["got"]), inside, lanes),
            }
        )
        before = sample["got"]
    measured = samples[warmup_steps - 1]["got"], samples[-1]["got"]
    return {
        "started": started,
        "steps": steps,
        "measured": _replicas_within(requests, measured, clip(windows, *measured), lanes),
    }


def _replicas_within(
    requests: list[list[dict]], span: Interval, windows: list[Interval], lanes: int
) -> dict[str, float]:
    """Return what the replicas did in a span of time; they may generate in the windows only.

    A request counts in the span in which it ended. Aborted requests end after the replicas have been closed.
    """
    full = occupancy([[(r["start"], r["end"]) for r in replica] for replica in requests], windows, lanes)
    done = [r for replica in requests for r in replica if span[0] < r["end"] <= span[1]]
    return {
        "bubble": full.bubble,
        "empty_share": full.empty_share,
        "tokens": sum(r["tokens"] for r in done),
        "requests": len(done),
        "aborted": sum(r["aborted"] for r in done),
        "recomputed_tokens": sum(r["prompt"] - r["cached"] for r in done if r["resumed"]),
    }


def _length(intervals: list[Interval]) -> float:
    return sum(end - start for start, end in intervals)
