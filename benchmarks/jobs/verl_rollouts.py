"""Compares rewards and rollout seconds of the quickstart job with rhyme, rhyme undrafted and verl's own vllm rollout.

All three are timed at the same point (tools/cpu_job/timed_manager.py), from a step's first prompt to its last answer.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.common.machine import describe
from tools.cpu_job import policy
from tools.cpu_job.job import VerlJob
from tools.cpu_job.progress import json_lines
from tools.cpu_job.quickstart import BATCH_SIZE, ROLLOUTS, job_arguments, make_data

RESULT = Path(__file__).parents[1] / "results/verl_rollouts.json"
MANAGER = "tools.cpu_job.timed_manager.TimedAgentLoopManager"

console = Console()


def main(
    out: Annotated[Path, typer.Option(help="Output folder of the runs' data and logs.")] = Path("runs/verl_rollouts"),
    epochs: Annotated[int, typer.Option(min=2, help="Epochs over the same prompts.")] = 5,
    num_problems: Annotated[int, typer.Option(help=f"Number of training problems, a multiple of {BATCH_SIZE}.")] = 64,
    repeats: Annotated[int, typer.Option(min=1, help="Runs per rollout, interleaved.")] = 1,
    rollouts: Annotated[str, typer.Option(help="Comma-separated rollouts.")] = ",".join(ROLLOUTS),
    result: Annotated[Path, typer.Option(help="Path of the result file.")] = RESULT,
) -> None:
    """Run the same verl job with each rollout and compare."""
    runs = []
    for repeat in range(repeats):
        for rollout in rollouts.split(","):
            console.print(f"run {repeat + 1}/{repeats} with {rollout} ...")
            runs.append(measure(out / f"{rollout}-{repeat}", rollout, epochs, num_problems))
    summary = {
        rollout: summarize([run for run in runs if run["rollout"] == rollout]) for rollout in rollouts.split(",")
    }
    console.print(table(summary))
    content = {**describe(), "epochs": epochs, "num_problems": num_problems, "summary": summary, "runs": runs}
    result.parent.mkdir(parents=True, exist_ok=True)
    result.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    console.print(f"wrote {result}")


def measure(out: Path, rollout: str, epochs: int, num_problems: int) -> dict[str, Any]:
    """Run one job and return reward, rollout seconds and tokens per step."""
    out = out.resolve()
    make_data(out, num_problems)
    arguments = [
        *job_arguments(out, epochs, rollout),
        f"+actor_rollout_ref.rollout.agent.agent_loop_manager_class={MANAGER}",
    ]
    environment = {
        "VERL_FILE_LOGGER_PATH": str(out / "metrics.jsonl"),
        "RHYME_BENCH_TIMES": str(out / "times"),
        "PYTHONPATH": str(policy.REPOSITORY),
    }
    with VerlJob(arguments, out / "verl.log", environment) as job:
        if job.wait() != 0:
            console.print(job.log_tail(), markup=False, highlight=False)
            raise typer.Exit(1)
    answers = [line for path in (out / "times").glob("*.jsonl") for line in json_lines(path)]
    steps = []
    for line in json_lines(out / "metrics.jsonl"):
        done = [answer for answer in answers if answer["step"] == line["step"]]
        metrics = line["data"]
        steps.append(
            {
                "step": line["step"],
                "epoch": (line["step"] - 1) // (num_problems // BATCH_SIZE) + 1,
                "reward": metrics["critic/rewards/mean"],
                "probs_correlation": metrics["training/rollout_actor_probs_pearson_corr"],
                "rollout_seconds": max(a["finished"] for a in done) - min(a["started"] for a in done),
                "tokens": sum(a["tokens"] for a in done),
                "step_seconds": metrics["timing_s/step"],
            }
        )
    return {"rollout": rollout, "steps": steps}


def summarize(runs: list[dict[str, Any]]) -> dict[str, float]:
    """Return medians over the steps from epoch 2 on; the first epoch has no history, and its first step warms up."""
    steps = [step for run in runs for step in run["steps"] if step["epoch"] >= 2]
    last = max(step["epoch"] for step in steps)
    quartiles = statistics.quantiles([step["rollout_seconds"] for step in steps], n=4)
    return {
        "reward_first_epoch": _mean([s["reward"] for run in runs for s in run["steps"] if s["epoch"] == 1]),
        "reward_last_epoch": _mean([s["reward"] for s in steps if s["epoch"] == last]),
        "rollout_seconds_median": quartiles[1],
        "rollout_seconds_q1": quartiles[0],
        "rollout_seconds_q3": quartiles[2],
        "rollout_tokens_per_s_median": statistics.median(s["tokens"] / s["rollout_seconds"] for s in steps),
        "min_probs_correlation": min(s["probs_correlation"] for run in runs for s in run["steps"]),
    }


def table(summary: dict[str, dict[str, float]]) -> Table:
    result = Table(title="the same verl GRPO job under three rollouts (medians from epoch 2 on)")
    for heading in (
        "rollout",
        "reward first/last epoch",
        "rollout s per step (quartiles)",
        "tokens/s",
        "min correlation",
    ):
        result.add_column(heading, justify="right")
    for rollout, row in summary.items():
        result.add_row(
            rollout,
            f"{row['reward_first_epoch']:.3f} / {row['reward_last_epoch']:.3f}",
            f"{row['rollout_seconds_median']:.2f} ({row['rollout_seconds_q1']:.2f}-{row['rollout_seconds_q3']:.2f})",
            f"{row['rollout_tokens_per_s_median']:,.0f}",
            f"{row['min_probs_correlation']:.4f}",
        )
    return result


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


if __name__ == "__main__":
    typer.run(main)
