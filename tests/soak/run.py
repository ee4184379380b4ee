"""Soaks a real verl job: an hour of short training steps, in which no process may grow and which leaves nothing behind.

The hour begins with the first training step. Every 20 seconds, each process of the job is read: its anonymous memory
(resident memory that no file and no shared segment backs), its open files, sockets and threads. After a sixth of the
time, when the history has long been full, the comparison begins: its first tenth with its last tenth, by medians.
Processes of Ray and Python that run none of verl's or rhyme_verl's code are listed, but not judged. Run by `make soak`.
"""

from __future__ import annotations

import os
import re
import signal
import statistics
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer
from rich.table import Table

from benchmarks.common.result_files import RESULTS, bar, bars_table, console, write_result
from examples.quickstart.job import VerlJob
from examples.quickstart.progress import json_lines
from examples.quickstart.quickstart import FP32_TRAINER, ROLLOUT, job_arguments, make_data

BATCH_SIZE = 4
SAMPLES = 4
NUM_PROBLEMS = 64
FULL_EPOCHS = 3  # history.window_epochs: from then on, the history drops as many answers as it gets
ENDLESS = 1_000_000  # epochs; the soak ends the job
READ_SECONDS = 20.0
END_SECONDS = 60.0  # in which all processes of the job have to end
BEGIN_SHARE, WINDOW_SHARE = 1 / 6, 1 / 10
GROWTH_SHARE, GROWTH_BYTES = 0.02, 8 << 20
MORE_FILES = 2  # that happen to be open when a process is read
# What would hide a leak for hours: oneDNN keeps up to 1024 compiled kernels, one per shape; glibc's heap is left with
# holes after tensors of ever new sizes. In bfloat16, verl's trainer grows in spite of both; in float32 it does not.
QUIET_LIBRARIES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64", "MALLOC_MMAP_THRESHOLD_": "131072"}
UPDATES_PER_MINUTE = 5.0
MIB = 1 << 20
OTHERS = re.compile(
    r"/ray/(?:core|_private|dashboard|autoscaler)/|^ray::(?:IDLE|DashboardAgent|RuntimeEnvAgent)"
    r"|multiprocessing\.resource_tracker"
)
NAME = re.compile(r"^(?:ray|VLLM)::\w+|(?<=-m )[\w.]+|resource_tracker|gcs_server|raylet|\w+\.py\b")


@dataclass(frozen=True)
class Reading:
    """One process at one time: `memory` is its anonymous memory in bytes; `files` includes the sockets."""

    minute: float
    memory: int
    files: int
    sockets: int
    threads: int


class Watch:
    """Reads the processes below this one.

    Attributes:
        commands: latest command line of each process; Ray's actors and vLLM's engines write their class into it.
        readings: of each process, in the order of time.
    """

    def __init__(self) -> None:
        self.commands: dict[psutil.Process, str] = {}
        self.readings: dict[psutil.Process, list[Reading]] = {}

    def read(self, minute: float) -> None:
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):  # it has just ended
                command, memory, files = (
                    " ".join(process.cmdline()).strip(),
                    process.memory_info(),
                    _open_files(process),
                )
                sockets = sum(target.startswith("socket:") for target in files)
                reading = Reading(minute, memory.rss - memory.shared, len(files), sockets, process.num_threads())
                self.commands[process] = command
                self.readings.setdefault(process, []).append(reading)


def _open_files(process: psutil.Process) -> list[str]:
    targets = []
    folder = Path(f"/proc/{process.pid}/fd")
    for link in os.listdir(folder):
        with suppress(FileNotFoundError):  # closed meanwhile
            targets.append(os.readlink(folder / link))
    return targets


def main(
    minutes: Annotated[float, typer.Option(min=12.0, help="Duration from the first training step.")] = 60.0,
    out: Annotated[
        Path, typer.Option(help="Folder of the job's data and logs; its contents are deleted first.")
    ] = Path("runs/soak"),
    stock: Annotated[
        bool, typer.Option(help="Soak verl's own rollout with its bfloat16 trainer: what grows without rhyme_verl.")
    ] = False,
    result: Annotated[Path | None, typer.Option(help="Path of the result file. Default: in results.")] = None,
) -> None:
    """Run the job, compare its processes at the end with those at the beginning, and exit with 1 if a bar fails."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that `timeout` also ends the job's processes
    out = out.resolve()
    make_data(out, NUM_PROBLEMS)
    watch = Watch()
    variables = {"VERL_FILE_LOGGER_PATH": str(out / "metrics.jsonl"), **QUIET_LIBRARIES}
    with VerlJob(_arguments(out, stock), out / "verl.log", variables) as job:
        (driver,) = psutil.Process().children()
        timeline = _follow(job, watch, out, minutes)
        left = [_name(watch.commands.get(process, "")) for process in _end(job, driver, watch)]
    rows, ended = compare(watch, minutes)
    begin = next(line for line in timeline if line["minute"] >= minutes * BEGIN_SHARE)
    updates = begin["weight_updates"], timeline[-1]["weight_updates"]
    bars = {} if stock else _bars(rows, ended, left, *updates, minutes)
    console.print(_table(rows))
    console.print(bars_table(bars))
    content = {"minutes": minutes, "bars": bars, "ended": ended, "left": left, "processes": rows, "timeline": timeline}
    write_result(result or RESULTS / ("soak_stock.json" if stock else "soak.json"), content)
    if not all(entry["holds"] for entry in bars.values()):
        raise typer.Exit(1)


def _arguments(out: Path, stock: bool) -> list[str]:
    return [
        *job_arguments(out, ENDLESS, "vllm" if stock else "rhyme"),
        "trainer.v1.trainer_mode=colocate_async",
        f"data.train_batch_size={BATCH_SIZE}",
        "data.max_response_length=200",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={BATCH_SIZE}",
        f"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={BATCH_SIZE * SAMPLES}",
        f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu={BATCH_SIZE * SAMPLES}",
        f"{ROLLOUT}.n={SAMPLES}",
        f"{ROLLOUT}.agent.num_workers=2",
        "ray_kwargs.ray_init.num_cpus=32",
        *([] if stock else [FP32_TRAINER]),
    ]


def _follow(job: VerlJob, watch: Watch, out: Path, minutes: float) -> list[dict[str, Any]]:
    """Read the job's processes from its first training step on. Returns the totals of each minute."""
    console.print("waiting for the job's first training step")
    while not json_lines(out / "metrics.jsonl"):
        _exit_if_ended(job)
        time.sleep(1.0)
    started = time.monotonic()
    timeline: list[dict[str, Any]] = []
    while (minute := (time.monotonic() - started) / 60) < minutes:
        _exit_if_ended(job)
        watch.read(minute)
        if minute >= len(timeline):
            timeline.append(_totals(watch, out, minute))
            console.print("  ".join(f"{name} {value:,}" for name, value in timeline[-1].items()), highlight=False)
        time.sleep(READ_SECONDS)
    return timeline


def _exit_if_ended(job: VerlJob) -> None:
    if job.poll() is not None:
        console.print(f"the job has ended by itself; the end of {job.log_path}:")
        console.print(job.log_tail(), markup=False, highlight=False)
        raise typer.Exit(1)


def _totals(watch: Watch, out: Path, minute: float) -> dict[str, Any]:
    latest = [readings[-1] for readings in watch.readings.values() if readings[-1].minute == minute]
    stats = json_lines(out / "stats/replica-0.jsonl")
    return {
        "minute": round(minute, 1),
        "weight_updates": len(json_lines(out / "metrics.jsonl")),  # one per training step
        "history_tokens": stats[-1].get("history_store_tokens", 0) if stats else 0,
        "processes": len(latest),
        "memory_mib": sum(reading.memory for reading in latest) // MIB,
        "shared_memory_mib": psutil.disk_usage("/dev/shm").used // MIB,
    }


def _end(job: VerlJob, driver: psutil.Process, watch: Watch) -> list[psutil.Process]:
    """End the job with SIGTERM, and return those of its processes that are there END_SECONDS later."""
    processes = {*watch.readings, *psutil.Process().children(recursive=True)} - {driver}
    driver.terminate()
    deadline = time.monotonic() + END_SECONDS
    while job.poll() is None and time.monotonic() < deadline:
        time.sleep(0.2)
    running = [process for process in processes if process.is_running()]
    _, alive = psutil.wait_procs(running, timeout=max(1.0, deadline - time.monotonic()))
    if job.poll() is None:
        alive.append(driver)
    return alive


def compare(watch: Watch, minutes: float) -> tuple[list[dict[str, Any]], list[str]]:
    """Compare the processes at the end with those when the comparison begins.

    Returns:
        A row for each process that was there at both times, and the names of the judged ones that ended in between.
    """
    begin = minutes * BEGIN_SHARE
    window = (minutes - begin) * WINDOW_SHARE
    rows: list[dict[str, Any]] = []
    ended = []
    for process, readings in watch.readings.items():
        command = watch.commands[process]
        name, is_judged = _name(command), OTHERS.search(command) is None
        first = [reading for reading in readings if begin <= reading.minute < begin + window]
        last = [reading for reading in readings if reading.minute >= minutes - window]
        if first and last:
            rows.append({"process": name, "pid": process.pid, "judged": is_judged, **_growth(first, last)})
        elif first and is_judged:
            ended.append(name)
    return sorted(rows, key=lambda row: (not row["judged"], -row["growth_mib"])), ended


def _growth(first: list[Reading], last: list[Reading]) -> dict[str, Any]:
    before, after = (statistics.median(reading.memory for reading in part) for part in (first, last))
    found: dict[str, Any] = {
        "memory_mib": [round(before / MIB, 2), round(after / MIB, 2)],
        "growth_mib": round((after - before) / MIB, 2),
        "limit_mib": round(max(GROWTH_SHARE * before, GROWTH_BYTES) / MIB, 2),
    }
    for name in ("files", "sockets", "threads"):
        found[name] = [round(statistics.median(getattr(reading, name) for reading in part)) for part in (first, last)]
    return found


def _name(command: str) -> str:
    found = NAME.search(command)
    return found[0] if found else command[:40]


def _bars(
    rows: list[dict[str, Any]], ended: list[str], left: list[str], before: int, updates: int, minutes: float
) -> dict[str, dict[str, Any]]:
    judged = [row for row in rows if row["judged"]]

    def most(name: str) -> int:
        return max((row[name][1] - row[name][0] for row in judged), default=0)

    growth = max((row["growth_mib"] / row["limit_mib"] for row in judged), default=0.0)
    return {
        "weight updates": bar(updates, at_least=UPDATES_PER_MINUTE * minutes),
        "weight updates before the comparison": bar(before, at_least=FULL_EPOCHS * NUM_PROBLEMS / BATCH_SIZE),
        "judged processes": bar(len(judged), at_least=1),
        "growth of memory as a share of its limit, most of any process": bar(growth, at_most=1.0),
        "additional open files, most of any process": bar(most("files"), at_most=MORE_FILES),
        "additional sockets, most of any process": bar(most("sockets"), at_most=MORE_FILES),
        "processes that ended during the comparison": bar(len(ended), at_most=0),
        "processes left at the end": bar(len(left), at_most=0),
    }


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="first and last tenth of the comparison; processes of Ray and Python in grey")
    for heading in ("process", "memory MiB", "growth", "limit", "files", "sockets", "threads"):
        table.add_column(heading, justify="left" if heading == "process" else "right")
    for row in rows:
        before, after = row["memory_mib"]
        counts = (f"{first} {last}" for first, last in (row["files"], row["sockets"], row["threads"]))
        growth, limit = row["growth_mib"], row["limit_mib"]
        style = None if row["judged"] else "dim"
        table.add_row(
            row["process"], f"{before:,.1f} {after:,.1f}", f"{growth:+.2f}", f"{limit:.1f}", *counts, style=style
        )
    return table


if __name__ == "__main__":
    typer.run(main)
