"""Whole verl jobs on one workload: stock verl, vLLM's `suffix`, verl's own asynchronous modes, and rhyme.

verl's GRPO trains a shipped policy on two replicas with published A100 step times (emulated_clock.py). Trainer, Ray,
router, engines, drafters and tokens are real; problems and seeds are the same in all cases. A batch has as many answers
as there are lanes. All times are divided by the dilation of the emulated clock. Engines with a drafter are charged the
host time for which an accelerator would wait, as `make bench-host` has measured it; results are also given without it
(*device only*).

The long-tail policy has templated problems. With `--workload gsm8k-noisy`, a policy that partly remembers GSM8K's
solutions is sampled at a temperature at which its answers repeat little, like those of that trace; `gsm8k` is the GSM8K
recipe with that policy. With `--dilation 0`, jobs run at this machine's own speed and no time is charged: on a CPU, a
step costs about as much as its tokens, so drafts save less than on a GPU.

A round runs each chosen case once, one after the other on one machine; ratios are taken within a round. The result
file is written after each case and finished cases in it are kept, so that an interrupted benchmark can be resumed and
rounds can be added, also on another machine. Run by `make bench-e2e` and `make compare`.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.common.machine import commit, processor
from benchmarks.common.result_files import RESULTS, bars_table, console, write_result
from benchmarks.drafting.host_gap import HOST_RESULT
from benchmarks.engines.best_suffix import DRAFTER_RESULT, best_suffix
from benchmarks.jobs.cases import LANES, REPLICAS, WORKLOADS, Case, batch_size, cases, suffix_rows
from benchmarks.jobs.emulated_clock import LABEL, EmulatedTime
from benchmarks.jobs.gsm8k_policy import write_questions
from benchmarks.jobs.job_figures import EPOCH_STEPS, bars_of, baseline, figures_by_round, summarize, table
from benchmarks.jobs.replica_job import SAMPLES, analyse
from examples.quickstart.progress import json_lines

EPOCHS = 3
DILATION = 6.0
COMPARED = tuple(
    f"{mode} {rollout}" for mode in ("sync", "colocate") for rollout in ("stock", "suffix best", "rhyme")
) + ("colocate wait 2", "colocate wait 3")
OWN_SPEED = "this machine's own speed"


def main(
    rounds: Annotated[int, typer.Option(min=1, help="Runs per case, interleaved.")] = 1,
    first_round: Annotated[int, typer.Option(min=1, help="Number of the first round; larger to add rounds.")] = 1,
    case: Annotated[
        list[str] | None, typer.Option(help="Run this case (repeatable); see --list. Default: those in the docs.")
    ] = None,
    list_cases: Annotated[bool, typer.Option("--list", help="Print the cases and exit.")] = False,
    workload: Annotated[str, typer.Option(help="One of " + ", ".join(WORKLOADS) + ".")] = "longtail",
    questions: Annotated[Path | None, typer.Option(help="GSM8K's train.jsonl, for gsm8k-noisy and gsm8k.")] = None,
    lanes: Annotated[int, typer.Option(min=SAMPLES, help="Sequences that a replica runs concurrently.")] = LANES,
    model: Annotated[str, typer.Option(help="Model whose published step times are emulated.")] = "qwen2.5-7b",
    dilation: Annotated[
        float, typer.Option(min=0.0, help="Real seconds per emulated second, so that CPUs keep up; 0: no emulation.")
    ] = DILATION,
    epochs: Annotated[int, typer.Option(min=2, help=f"Epochs of {EPOCH_STEPS} steps.")] = EPOCHS,
    drafter: Annotated[Path, typer.Option(help="Result of bench-drafter, for the best `suffix` settings.")] = (
        DRAFTER_RESULT
    ),
    out: Annotated[Path, typer.Option(help="Folder of the jobs' logs and records.")] = Path("runs"),
    result: Annotated[
        Path | None,
        typer.Option(help="Path of the result file; cases in it are not run again. Default: in results."),
    ] = None,
) -> None:
    """Run the cases in rounds and compare."""
    if workload not in WORKLOADS:
        raise typer.BadParameter(f"--workload {workload}: choose from {', '.join(WORKLOADS)}")
    chosen_workload, stem = WORKLOADS[workload], result_name(workload, lanes, dilation)
    out, path = out / stem, result or RESULTS / f"{stem}.json"
    if chosen_workload.task is None and questions is None and not list_cases:
        raise typer.BadParameter(f"--workload {workload} needs --questions")
    train_file = None
    try:
        best = {mode: best_suffix(workload, rows, drafter) for mode, rows in suffix_rows(lanes).items()}
        if chosen_workload.task is None and questions is not None:
            train_file = out / "questions.parquet"
            write_questions(questions, train_file, EPOCH_STEPS * batch_size(lanes))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    known = cases(best)
    if list_cases:
        console.print("\n".join(known), highlight=False)
        return
    unknown = sorted(set(case or ()) - set(known))
    if unknown:
        raise typer.BadParameter(f"--case {unknown[0]}: choose from {', '.join(known)}")
    if not chosen_workload.policy.is_dir():
        raise typer.BadParameter(f"{chosen_workload.policy}: no policy here")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that `timeout` also ends the job's processes
    emulation = f"{model},{dilation:g}" if dilation else ""
    label = f"{LABEL} ({model})" if dilation else OWN_SPEED
    case = case or list(COMPARED)
    stock = baseline(case)
    chosen = [stock, *(name for name in case if name != stock)]  # every round needs the baseline
    settings = {
        "label": label,
        "model": model if dilation else None,
        "host_time": host_time() if dilation else None,
        "dilation": dilation,
        "workload": workload,
        "replicas": REPLICAS,
        "lanes": lanes,
        "batch_size": batch_size(lanes),
        "samples": SAMPLES,
        "num_problems": EPOCH_STEPS * batch_size(lanes),
        "epochs": epochs,
        "warmup_steps": EPOCH_STEPS,
        "suffix_best": best,
    }
    runs = _finished(path, settings)
    machine = {"processor": processor(), "cpu_cores": os.cpu_count()}
    numbers = range(first_round, first_round + rounds)
    for run in runs:
        if run["round"] in numbers and any(run[name] != value for name, value in machine.items()):
            raise typer.BadParameter(f"{path}: round {run['round']} began on another machine: see --first-round")
    for number in numbers:
        for name in chosen:
            if any((run["round"], run["case"]) == (number, name) for run in runs):
                continue
            console.print(f"round {number}, {name} ...")
            started = time.monotonic()
            folder = folder_of(out, number, name)
            job = known[name].job(emulation, epochs, chosen_workload, lanes, train_file)
            job.run(folder, on_step=lambda line: console.print(f"  {line}", highlight=False))
            seconds = time.monotonic() - started
            found = _analysed(known[name], folder, lanes)
            facts = {"round": number, "case": name, "commit": commit(), **machine, "wall_seconds": seconds}
            runs.append({**facts, **found})
            _summarize(runs, settings, path)
    summary, bars = _summarize(runs, settings, path)
    console.print(table(summary, f"{workload}, two replicas of {lanes} lanes, {label}, from epoch 2 on"))
    console.print(bars_table(bars))


def host_time() -> str:
    """Return which measurement of the host time is charged; results with another one are not comparable."""
    content = json.loads(HOST_RESULT.read_text(encoding="utf-8"))
    return f"{HOST_RESULT.name} of {content['date']}, commit {content['commit']}"


def result_name(workload: str = "longtail", lanes: int = LANES, dilation: float = DILATION) -> str:
    """Return the name of a workload's result file, without suffix, and of its folder of runs."""
    parts = {
        "end_to_end": True,
        workload: workload != "longtail",
        str(lanes): lanes != LANES,
        "own_speed": not dilation,
    }
    return "_".join(part for part, is_named in parts.items() if is_named).replace("-", "_")


def folder_of(out: Path, number: int, case: str) -> Path:
    """Return the folder of a case's run in a round."""
    return out / f"round-{number}" / case.replace(" ", "-").replace(",", "")


def _finished(result: Path, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the runs in the result file, which must have the same settings."""
    if not result.is_file():
        return []
    content = json.loads(result.read_text(encoding="utf-8"))
    different = [name for name, value in settings.items() if content.get(name) != value]
    if different:
        raise typer.BadParameter(f"{result}: has runs with another {different[0]}: name another file with --result")
    return content["runs"]


def _summarize(
    runs: list[dict[str, Any]], settings: dict[str, Any], result: Path
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Write the result file, and return the summary and the bars."""
    name = result_name(*(settings[part] for part in ("workload", "lanes", "dilation")))
    by_case = figures_by_round(runs, settings["dilation"] or 1.0)
    summary, bars = summarize(by_case), bars_of(by_case, name)
    write_result(result, {**settings, "bars": bars, "summary": summary, "runs": runs})
    return summary, bars


def _analysed(case: Case, folder: Path, lanes: int) -> dict[str, Any]:
    """Return a finished job's steps in real seconds, and what was emulated in each."""
    found = analyse(folder, case.mode, case.replicas, lanes, EPOCH_STEPS)
    ends = [found["started"] + step["got"] for step in found["steps"]]
    paths = sorted((folder / "times").glob("emulation-*.jsonl"))
    spans = list(itertools.pairwise([0.0, *ends]))
    for step, span in zip(found["steps"], spans, strict=True):
        step["host_seconds"] = most_charged(paths, *span)
    emulated = [emulated_between(paths, *span) for span in spans]
    return {**found, "asynchronous": is_asynchronous(paths) if paths else None, "emulated": emulated}


def emulated_between(paths: list[Path], start: float, end: float) -> dict[str, float]:
    """Return the sums of the replicas' emulations between two points in time (Unix seconds)."""
    sums = dict.fromkeys(vars(EmulatedTime()), 0)
    for path in paths:
        totals = json_lines(path)
        for time_, sign in ((start, -1), (end, 1)):
            line = next((line for line in reversed(totals) if line["time"] <= time_), {})
            sums = {name: value + sign * line.get(name, 0) for name, value in sums.items()}
    return sums


def most_charged(paths: list[Path], start: float, end: float) -> float:
    """Return the host seconds of the replica that was charged most, as a rule the one that the trainer waited for."""
    return max((emulated_between([path], start, end)["host_seconds"] for path in paths), default=0.0)


def is_asynchronous(paths: list[Path]) -> bool:
    """Return whether the engines scheduled asynchronously. Stock engines need not, because they are charged nothing."""
    return all(line["asynchronous"] for path in paths for line in json_lines(path))


if __name__ == "__main__":
    typer.run(main)
