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

import rhyme_verl
from benchmarks.occupancy import Interval, clip, occupancy, open_intervals
from benchmarks.report import RESULTS, console, spread, write_result
from examples.quickstart import policy
from examples.quickstart.demo import job_arguments, make_data
from examples.quickstart.job import VerlJob
from examples.quickstart.progress import json_lines

MODES = ("sync", "colocate_async", "separate_async")
BATCH_SIZE = 32
SAMPLES = 8
WARMUP_STEPS = 2  # the first step starts engines and caches up; two, so that pairs of steps stay whole
ROLLOUT = "actor_rollout_ref.rollout"
STALENESS = "training/off_policy/trajectory_staleness"


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
    step: Annotated[
        str,
        typer.Option(help="Emulate steps of '<base ms>,<ms a sequence>,<us a prompt token>', see emulated_worker.py."),
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
    name = f"{mode}-{replicas}" + ("-emulated" if step else "")
    runs = []
    for repeat in range(repeats):
        for case in cases:
            console.print(f"run {repeat + 1}/{repeats} with HistoPipe {case} ...")
            folder = out / f"{name}-{case}-{repeat}"
            run = measure(folder, mode, replicas, lanes, case, epochs, num_problems, step, override or [])
            runs.append({"pipe": case, **run})
    summary = {case: summarize([run for run in runs if run["pipe"] == case]) for case in cases}
    console.print(table(summary, f"{mode}, {replicas} replicas of {lanes} lanes"))
    kept = json.loads(result.read_text(encoding="utf-8"))["modes"] if result.is_file() else {}
    facts = {"lanes": lanes, "epochs": epochs, "num_problems": num_problems, "batch_size": BATCH_SIZE, "n": SAMPLES}
    kept[name] = {**facts, "emulated_step": step, "overrides": override or [], "summary": summary, "runs": runs}
    write_result(result, {"modes": kept})


def measure(
    out: Path,
    mode: str,
    replicas: int,
    lanes: int,
    pipe: str,
    epochs: int,
    num_problems: int,
    step: str,
    overrides: list[str],
) -> dict[str, Any]:
    """Run one job; return its steps and what its replicas did."""
    out = out.resolve()
    make_data(out, num_problems)
    arguments = [*job_arguments(out, epochs, "rhyme"), *_mode_arguments(mode, replicas, lanes)]
    if pipe != "off":
        router = Path(rhyme_verl.__file__).with_name("histopipe") / "router.yaml"
        arguments.append(f"+{ROLLOUT}.agent.agent_loop_manager_class=rhyme_verl.dispatch.RhymeAgentLoopManager")
        arguments.append(f"{ROLLOUT}.router_config_path={router}")
        arguments.append(f"+{ROLLOUT}.custom.rhyme.pipe.mode={'auto' if pipe == 'on' else pipe}")
    environment = {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(policy.REPOSITORY),
        "RHYME_BENCH_STEP": step,
        "RHYME_BENCH_TIMES": str(out / "times"),
        "VERL_FILE_LOGGER_PATH": str(out / "metrics.jsonl"),
        "VERL_USE_EXTERNAL_MODULES": "benchmarks.recorded_server",
        "VERL_LOGGING_LEVEL": "WARNING",  # at INFO, verl 0.9.1 fails with hybrid_engine=false: logger.info(flush=True)
    }
    with VerlJob([*arguments, *overrides], out / "verl.log", environment) as job:
        if job.wait() != 0:
            console.print(job.log_tail(), markup=False, highlight=False)
            raise typer.Exit(1)
    return analyse(out, mode, replicas, lanes)


def _mode_arguments(mode: str, replicas: int, lanes: int) -> list[str]:
    sampler = "RecordedReplayBuffer" if mode == "sync" else "RecordedReplayBufferAsync"
    arguments = [
        f"trainer.v1.trainer_mode={mode}",
        "trainer.v1.sampler.custom_sampler.path=pkg://benchmarks.recorded_sampler",
        f"trainer.v1.sampler.custom_sampler.name={sampler}",
        f"data.train_batch_size={BATCH_SIZE}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={BATCH_SIZE}",
        f"{ROLLOUT}.n={SAMPLES}",
        f"{ROLLOUT}.max_num_seqs={lanes}",
        "ray_kwargs.ray_init.num_cpus=32",
    ]
    if mode != "separate_async":
        return [*arguments, f"trainer.n_gpus_per_node={replicas}", f"ray_kwargs.ray_init.num_gpus={replicas}"]
    return [
        *arguments,
        "trainer.v1.separate_async.parameter_sync_step=1",
        "trainer.n_gpus_per_node=1",
        f"ray_kwargs.ray_init.num_gpus={1 + replicas}",
        "actor_rollout_ref.hybrid_engine=false",  # the trainer's slot holds no replica of its own
        f"{ROLLOUT}.nnodes=1",
        f"{ROLLOUT}.n_gpus_per_node={replicas}",
        f"{ROLLOUT}.checkpoint_engine.backend=cpu",
        f"{ROLLOUT}.checkpoint_engine.custom_backend_module=rhyme_verl.platforms.cpu_checkpoint_engine",
    ]


def analyse(out: Path, mode: str, replicas: int, lanes: int) -> dict[str, Any]:
    """Read a finished run's records.

    A step's rollout seconds are those in which the replicas might generate, between the moment the trainer had the
    batch before and the moment it had this one: in `sync` while the trainer waits; otherwise while verl holds the
    replicas open. So work that partial rollout or HistoPipe does ahead counts where it is done.
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
                "probs_correlation": metrics["training/rollout_actor_probs_pearson_corr"],
                "staleness_mean": float(metrics[f"{STALENESS}/mean"]),
                "staleness_max": int(metrics[f"{STALENESS}/max"]),
                "staleness_worst_mean": float(metrics[f"{STALENESS}_worst/mean"]),
                "staleness_worst_max": int(metrics[f"{STALENESS}_worst/max"]),
                "spanning_share": sum(spanning) / len(spanning),
                **_replicas_within(requests, (before, sample["got"]), inside, lanes),
            }
        )
        before = sample["got"]
    measured = samples[WARMUP_STEPS - 1]["got"], samples[-1]["got"]
    return {"steps": steps, "measured": _replicas_within(requests, measured, clip(windows, *measured), lanes)}


def _replicas_within(
    requests: list[list[dict]], span: Interval, windows: list[Interval], lanes: int
) -> dict[str, float]:
    """What the replicas did in a span of time, of which they might generate in the windows.

    A request counts where it ended; aborted ones end when the replicas are closed already.
    """
    full = occupancy([[(r["start"], r["end"]) for r in replica] for replica in requests], windows, lanes)
    done = [r for replica in requests for r in replica if span[0] < r["end"] <= span[1]]
    return {
        "bubble": full.bubble,
        "empty_share": full.empty_share,
        "lanes_unused": full.lanes_unused,
        "tokens": sum(r["tokens"] for r in done),
        "requests": len(done),
        "aborted": sum(r["aborted"] for r in done),
        "recomputed_tokens": sum(r["prompt"] - r["cached"] for r in done if r["resumed"]),
    }


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


def _length(intervals: list[Interval]) -> float:
    return sum(end - start for start, end in intervals)


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
