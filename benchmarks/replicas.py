"""The quickstart job on several replicas, scheduled by verl (HistoPipe off) and by HistoPipe (on), in turns.

Same problems, seeds and rollout; only the dispatch module and the router differ. Every request is written down by the
servers and every batch by the trainer's sampler (recorded_server.py, recorded_sampler.py), the same way in both cases.
In `colocate_async`, mode `pairs` rolls out two batches as one, so compare pairs of steps, as the medians do.
"""

from __future__ import annotations

import json
import signal
import statistics
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from benchmarks.replica_job import MODES, SAMPLES, ReplicaJob, analyse
from benchmarks.report import RESULTS, console, spread, write_result

BATCH_SIZE = 32
WARMUP_STEPS = 2  # the first step starts engines and caches up; two, so that pairs of steps stay whole


def main(
    mode: Annotated[str, typer.Option(help="verl's trainer mode: " + ", ".join(MODES) + ".")] = "colocate_async",
    replicas: Annotated[int, typer.Option(min=1, help="Rollout replicas.")] = 2,
    lanes: Annotated[int, typer.Option(min=1, help="Sequences that a replica runs at once (max_num_seqs).")] = 32,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each case, in turns.")] = 3,
    epochs: Annotated[int, typer.Option(min=2, help="Epochs over the same problems.")] = 4,
    num_problems: Annotated[int, typer.Option(help=f"Training problems, a multiple of {2 * BATCH_SIZE}.")] = 64,
    pipe: Annotated[
        str,
        typer.Option(
            help="Which cases, separated by commas: off, on, or a mode (`pipe.mode`) to force. In colocate_async, `on` "
            "tries pairs and stream for 28 steps, so the default there is off,pairs; otherwise off,on."
        ),
    ] = "",
    override: Annotated[list[str] | None, typer.Option(help="A further verl override; repeatable.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for the runs' data and logs.")] = Path("runs/replicas"),
    result: Annotated[Path, typer.Option(help="Where the result goes; other modes' results in it are kept.")] = (
        RESULTS / "replicas.json"
    ),
) -> None:
    """Run the same verl job with HistoPipe off and on and compare."""
    if mode not in MODES:
        raise typer.BadParameter(f"--mode must be one of {', '.join(MODES)}")
    if num_problems % (2 * BATCH_SIZE):
        raise typer.BadParameter(
            f"--num-problems must be a multiple of {2 * BATCH_SIZE}: epochs of whole pairs of steps"
        )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that `timeout` ends the job's processes, too
    cases = (pipe or ("off,pairs" if mode == "colocate_async" else "off,on")).split(",")
    name = f"{mode}-{replicas}"
    runs = []
    for repeat in range(repeats):
        for case in cases:
            console.print(f"run {repeat + 1}/{repeats} with HistoPipe {case} ...")
            folder = out / f"{name}-{case}-{repeat}"
            job = ReplicaJob(
                mode=mode,
                pipe={"off": None, "on": "auto"}.get(case, case),
                replicas=replicas,
                lanes=lanes,
                batch_size=BATCH_SIZE,
                epochs=epochs,
                num_problems=num_problems,
                overrides=tuple(override or ()),
            )
            job.run(folder)
            runs.append({"pipe": case, **analyse(folder, mode, replicas, lanes, WARMUP_STEPS)})
    summary = {case: summarize([run for run in runs if run["pipe"] == case]) for case in cases}
    console.print(table(summary, f"{mode}, {replicas} replicas of {lanes} lanes"))
    kept = json.loads(result.read_text(encoding="utf-8"))["modes"] if result.is_file() else {}
    facts = {"lanes": lanes, "epochs": epochs, "num_problems": num_problems, "batch_size": BATCH_SIZE, "n": SAMPLES}
    kept[name] = {**facts, "overrides": override or [], "summary": summary, "runs": runs}
    write_result(result, {"modes": kept})


def summarize(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians and spread over runs of what a run does a step, from step 3 on."""
    return {
        "rollout_seconds_per_step": spread([_mean(run, "rollout_seconds") for run in runs]),
        "steps_per_hour": spread([_steps_per_hour(run) for run in runs]),
        "rollout_tokens_per_s": spread([_mean(run, "tokens") / _mean(run, "rollout_seconds") for run in runs]),
        "gen_seconds_per_step": spread([_mean(run, "gen_seconds") for run in runs]),
        "step_seconds": spread([_mean(run, "step_seconds") for run in runs]),
        "bubble": spread([run["measured"]["bubble"] for run in runs]),
        "empty_share": spread([run["measured"]["empty_share"] for run in runs]),
        "lanes_unused": spread([run["measured"]["lanes_unused"] for run in runs]),
        "recomputed_tokens": spread([run["measured"]["recomputed_tokens"] for run in runs]),
        "staleness_mean": spread([_mean(run, "staleness_mean") for run in runs]),
        "staleness_worst_mean": spread([_mean(run, "staleness_worst_mean") for run in runs]),
        "staleness_worst_max": max(step["staleness_worst_max"] for run in runs for step in run["steps"]),
        "spanning_share": spread([_mean(run, "spanning_share") for run in runs]),
        "min_probs_correlation": min(step["probs_correlation"] for run in runs for step in run["steps"]),
        "reward_by_step": [
            statistics.mean(rewards)
            for rewards in zip(*([step["reward"] for step in run["steps"]] for run in runs), strict=True)
        ],
    }


def _mean(run: dict[str, Any], name: str) -> float:
    return statistics.mean(step[name] for step in run["steps"][WARMUP_STEPS:])


def _steps_per_hour(run: dict[str, Any]) -> float:
    steps = run["steps"]
    return 3600 * (len(steps) - WARMUP_STEPS) / (steps[-1]["got"] - steps[WARMUP_STEPS - 1]["got"])


def table(summary: dict[str, dict[str, Any]], title: str) -> Table:
    """The cases side by side: medians of the runs, and their range where there are several."""
    result = Table(title=title)
    result.add_column("per step, from step 3 on")
    for case in summary:
        result.add_column(f"HistoPipe {case}", justify="right")
    rows = [name for name, value in next(iter(summary.values())).items() if isinstance(value, dict)]
    for name in rows:
        result.add_row(name.replace("_", " "), *(_cell(columns[name]) for columns in summary.values()))
    for name in ("staleness_worst_max", "min_probs_correlation"):
        result.add_row(name.replace("_", " "), *(f"{columns[name]:.4g}" for columns in summary.values()))
    rewards = [columns["reward_by_step"] for columns in summary.values()]
    result.add_row("reward, first and last quarter", *(f"{_quarter(r)[0]:.3f} {_quarter(r)[1]:.3f}" for r in rewards))
    return result


def _cell(value: dict[str, Any]) -> str:
    if len(value["runs"]) == 1:
        return f"{value['median']:,.4g}"
    return f"{value['median']:,.4g} ({value['min']:,.4g}-{value['max']:,.4g})"


def _quarter(rewards: list[float]) -> tuple[float, float]:
    size = max(1, len(rewards) // 4)
    return statistics.mean(rewards[:size]), statistics.mean(rewards[-size:])


if __name__ == "__main__":
    typer.run(main)
