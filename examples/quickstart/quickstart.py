"""The quickstart job, which the demo, the benchmarks and the tests run: its data and its command line."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import typer
from rich.console import Console

from examples.quickstart import policy, problems
from examples.quickstart.job import VerlJob
from examples.quickstart.progress import FIRST_STEP, Step, read_steps

CONFIG_FOLDER = policy.REPOSITORY / "examples/quickstart"
BATCH_SIZE = 16  # data.train_batch_size in quickstart.yaml
ROLLOUTS = ("rhyme", "rhyme-off", "vllm")
ROLLOUT = "actor_rollout_ref.rollout"
RHYME_KEY = f"{ROLLOUT}.custom.rhyme"
# verl's trainer computes in bfloat16 by default, and its log-probs differ from the rollout's float32 by the rounding.
FP32_TRAINER = (
    "+actor_rollout_ref.actor.fsdp_config.mixed_precision={param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}"
)
STOPWATCH = "examples.quickstart.timed_manager.TimedAgentLoopManager"
POLL_SECONDS = 0.5

console = Console(soft_wrap=True, highlight=False)


def run(out: Path, epochs: int, num_problems: int, rollout: str, overrides: list[str]) -> list[Step]:
    """Run one job, print one line per step and return the steps. On failure, print the end of the log and exit."""
    out = out.resolve()
    make_data(out, num_problems)
    steps_per_epoch = num_problems // BATCH_SIZE
    console.print(
        f"verl GRPO, {num_problems} problems x 8 answers, {epochs} epochs of {steps_per_epoch} steps, "
        f"rollout.name={rollout}; starting Ray, the trainer and vLLM (about a minute) ..."
    )
    arguments = job_arguments(out, epochs, rollout) + overrides
    environment = {"VERL_FILE_LOGGER_PATH": str(out / "metrics.jsonl")}
    if rollout == "vllm":
        arguments.append(f"+{ROLLOUT}.agent.agent_loop_manager_class={STOPWATCH}")
        environment |= {"RHYME_BENCH_TIMES": str(out / "times"), "PYTHONPATH": str(policy.REPOSITORY)}
    shown = 0
    started = time.monotonic()
    with VerlJob(arguments, out / "verl.log", environment) as job:
        while True:
            status = job.poll()
            steps = read_steps(out, steps_per_epoch)
            for step in steps[shown:]:
                console.print(_line(step, steps_per_epoch * epochs))
            shown = len(steps)
            if status is not None:
                break
            time.sleep(POLL_SECONDS)
        if status != 0:
            console.print(f"the job failed (exit status {status}); the end of {job.log_path}:")
            console.print(job.log_tail(), markup=False, highlight=False)
            raise typer.Exit(1)
    console.print(f"done in {time.monotonic() - started:.0f} s")
    return steps


def make_data(out: Path, num_problems: int) -> None:
    """Recreate the run's folder with its problems, and train the policy if the shipped one is not current.

    Raises:
        typer.BadParameter: the folder holds something else than an earlier run.
    """
    if out.exists() and any(out.iterdir()) and not (out / "data").is_dir():
        raise typer.BadParameter(
            f"--out: {out} is not the folder of an earlier run, and would be emptied: give another"
        )
    shutil.rmtree(out, ignore_errors=True)
    (out / "data").mkdir(parents=True)
    problems.write_parquet(out / "data/train.parquet", "train", 0, num_problems)
    problems.write_parquet(out / "data/test.parquet", "test", 0, BATCH_SIZE)
    if not policy.is_current(policy.SHIPPED_POLICY):
        console.print("the shipped policy is missing or does not match its recipe: training it (about 8 minutes)")
        policy.make(policy.SHIPPED_POLICY)


def job_arguments(out: Path, epochs: int, rollout: str) -> list[str]:
    """Return the arguments of `verl.trainer.main_ppo` for one of ROLLOUTS; other settings are in quickstart.yaml."""
    arguments = [
        f"--config-dir={CONFIG_FOLDER}",
        "--config-name=quickstart",
        f"hydra.run.dir={out / 'hydra'}",
        f"data.train_files={out / 'data/train.parquet'}",
        f"data.val_files={out / 'data/test.parquet'}",
        f"actor_rollout_ref.model.path={policy.SHIPPED_POLICY.resolve()}",
        f"trainer.total_epochs={epochs}",
        f"trainer.default_local_dir={out / 'checkpoints'}",
    ]
    if rollout == "vllm":  # verl's own rollout, with the CPU platform's way of loading weights
        worker = "rhyme_verl.platforms.cpu_worker.CpuWorkerExtension"
        return [
            *arguments,
            "actor_rollout_ref.rollout.name=vllm",
            f"+actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls={worker}",
        ]
    arguments.append(f"+{RHYME_KEY}.stats_path={out / 'stats'}")
    return arguments if rollout == "rhyme" else [*arguments, f"+{RHYME_KEY}.spec.enabled=false"]


def _line(step: Step, num_steps: int) -> str:
    start = f"step {step.step:3d}/{num_steps}  epoch {step.epoch}  reward {step.reward:.3f}  "
    if not step.tokens:
        return f"{start}generated in the same unit as the step before"
    drafting = (
        f"accepted/verify {step.accepted_per_verify:5.2f}  acceptance {step.acceptance_rate:4.0%}"
        if step.drafted
        else "no history yet" if step.epoch == 1 else "no drafts"
    )  # fmt: skip
    note = "  (with compilation)" if step.step == FIRST_STEP else ""
    return f"{start}rollout {step.rollout_seconds:5.2f} s  {step.rollout_tokens_per_s:6,.0f} tokens/s  {drafting}{note}"
