"""Whole verl jobs in `sync` mode at this machine's own speed, with verl's rollout, vLLM's `suffix` and rhyme.

The jobs are that of the end-to-end benchmark (long-tail policy, two replicas) without its emulated clock, and
recipes/gsm8k with `hardware=cpu` on real questions. On a CPU, a step costs about as much as its tokens, so drafts save
less than on a GPU. Finished runs in the --out folder are not run again. Run by `make compare`.
"""

from __future__ import annotations

import signal
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from benchmarks.common.result_files import RESULTS, console, write_result
from benchmarks.engines.best_suffix import DRAFTER_RESULT, best_suffix
from benchmarks.jobs.end_to_end import LANES, NUM_PROBLEMS, Case, cases
from benchmarks.jobs.gsm8k_policy import write_questions
from benchmarks.jobs.job_figures import EPOCH_STEPS, by_epoch
from benchmarks.jobs.replica_job import ROLLOUT, ReplicaJob, analyse
from examples.quickstart.policy import REPOSITORY

POLICY = REPOSITORY / "benchmarks/policies/gsm8k-epoch3"
BATCH_SIZE = 16  # of the recipe's job
CASES = {"stock": "sync stock", "suffix best": "sync suffix best", "rhyme": "sync rhyme"}


@dataclass(frozen=True, kw_only=True)
class RecipeJob(ReplicaJob):
    """The GSM8K recipe on this machine."""

    def base_arguments(self, out: Path) -> list[str]:
        arguments = [
            f"--config-path={REPOSITORY / 'recipes'}",
            "--config-name=gsm8k/gsm8k",
            "hardware=cpu",
            f"rhyme={'both' if self.rollout == 'rhyme' else 'baseline'}",
            f"hydra.run.dir={out / 'hydra'}",
            f"data.train_files={out / 'data/train.parquet'}",
            f"data.val_files={out / 'data/test.parquet'}",
            f"trainer.total_epochs={self.epochs}",
            f"trainer.default_local_dir={out / 'checkpoints'}",
            "trainer.logger=[console,file]",
        ]
        if self.rollout == "vllm":
            worker = "rhyme_verl.platforms.cpu_worker.CpuWorkerExtension"
            arguments.append(f"+{ROLLOUT}.engine_kwargs.vllm.worker_extension_cls={worker}")
        return arguments


def jobs(questions: Path | None, epochs: int, drafter: Path) -> dict[str, dict[str, ReplicaJob]]:
    """Return the jobs by name and rollout; the recipe's only with a file of questions."""
    longtail = cases(best_suffix("longtail", LANES, drafter))
    found = {"longtail": {name: longtail[case].job("", epochs) for name, case in CASES.items()}}
    if questions is not None:
        recipe = cases(best_suffix("gsm8k", LANES, drafter))
        found["gsm8k recipe"] = {name: _recipe_job(recipe[case], questions, epochs) for name, case in CASES.items()}
    return found


def _recipe_job(case: Case, questions: Path, epochs: int) -> RecipeJob:
    return RecipeJob(
        mode=case.mode,
        rollout=case.rollout,
        pipe=case.pipe,
        replicas=1,
        lanes=LANES,
        batch_size=BATCH_SIZE,
        epochs=epochs,
        num_problems=EPOCH_STEPS * BATCH_SIZE,
        train_file=questions,
        policy=POLICY,
        overrides=(
            "actor_rollout_ref.actor.optim.lr=1e-4",  # the recipe's is for models a hundred times as large
            *case.suffix_arguments(),
        ),
    )


def main(
    questions: Annotated[Path | None, typer.Option(help="GSM8K's train.jsonl, for the recipe's job.")] = None,
    epochs: Annotated[int, typer.Option(min=2, help=f"Epochs of {EPOCH_STEPS} steps.")] = 4,
    drafter: Annotated[Path, typer.Option(help="Result of bench-drafter, for the best `suffix` settings.")] = (
        DRAFTER_RESULT
    ),
    rounds: Annotated[int, typer.Option(min=1, help="Runs per job and rollout, interleaved.")] = 1,
    out: Annotated[Path, typer.Option(help="Folder of the runs; finished ones are not run again.")] = Path(
        "runs/verl_rollouts"
    ),
    result: Annotated[Path, typer.Option(help="Path of the result file.")] = RESULTS / "verl_rollouts.json",
) -> None:
    """Run each job with each rollout and compare."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that `timeout` also ends the job's processes
    train_file = None
    try:
        if questions is not None:
            train_file = out / "questions.parquet"
            write_questions(questions, train_file, EPOCH_STEPS * BATCH_SIZE)
        chosen = jobs(train_file, epochs, drafter)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    runs: dict[str, dict[str, list[list[dict[str, Any]]]]] = {}
    for number in range(1, rounds + 1):
        for job_name, by_rollout in chosen.items():
            for name, job in by_rollout.items():
                folder = out / f"round-{number}" / job_name.replace(" ", "-") / name.replace(" ", "-")
                if not (folder / "done").is_file():
                    console.print(f"round {number}, {job_name}, {name} ...")
                    job.run(folder, on_step=lambda line: console.print(f"  {line}", highlight=False))
                    (folder / "done").touch()
                steps = analyse(folder, job.mode, job.replicas, job.lanes, EPOCH_STEPS)["steps"]
                runs.setdefault(job_name, {}).setdefault(name, []).append(steps)
    summary = {job: {name: figures(of_job) for name, of_job in by_name.items()} for job, by_name in runs.items()}
    console.print(table(summary))
    content = {"epochs": epochs, "num_problems": {"longtail": NUM_PROBLEMS, "gsm8k recipe": EPOCH_STEPS * BATCH_SIZE}}
    write_result(result, {**content, "rounds": rounds, "summary": summary})


def figures(runs: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """Return the figures of a job's runs from the second epoch on: medians, those of each run, and by epoch."""
    later = [steps[EPOCH_STEPS:] for steps in runs]
    speeds = [sum(step["tokens"] for step in run) / sum(step["rollout_seconds"] for step in run) for run in later]
    step_seconds = [statistics.mean(step["step_seconds"] for step in run) for run in later]
    seconds = [step["rollout_seconds"] for run in later for step in run]
    by_run = [by_epoch(steps) for steps in runs]
    return {
        "rollout_seconds_quartiles": statistics.quantiles(seconds, n=4),
        "tokens_per_s": statistics.median(speeds),
        "tokens_per_s_runs": speeds,
        "step_seconds": statistics.median(step_seconds),
        "step_seconds_runs": step_seconds,
        "min_probs_correlation": min(step["probs_correlation"] for steps in runs for step in steps),
        "epochs": {
            name: [statistics.median(values) for values in zip(*(run[name] for run in by_run), strict=True)]
            for name in by_run[0]
        },
    }


def table(summary: dict[str, dict[str, Any]]) -> Table:
    result = Table(title="whole verl jobs at this machine's own speed, from epoch 2 on")
    for heading in ("job", "rollout", "rollout s (quartiles)", "tokens/s", "step s", "reward by epoch", "corr"):
        result.add_column(heading, justify="left" if heading in ("job", "rollout") else "right")
    for job, by_rollout in summary.items():
        for name, row in by_rollout.items():
            first, median, third = row["rollout_seconds_quartiles"]
            result.add_row(
                job,
                name,
                f"{median:.2f} ({first:.2f}-{third:.2f})",
                f"{row['tokens_per_s']:,.0f}",
                f"{row['step_seconds']:.1f}",
                " ".join(f"{reward:.2f}" for reward in row["epochs"]["reward"]),
                f"{row['min_probs_correlation']:.4f}",
            )
    return result


if __name__ == "__main__":
    typer.run(main)
