"""Compares the simulator with a recorded `sync` run of real replicas.

Reads the folder `times` of a job that benchmarks.jobs.replica_job recorded (every request and every batch) and a
step-cost table: one from `rhyme calibrate`, measured on an engine with as many processors as one replica, or, if the
trainer shares the processors, one fitted to another recorded run. Each step is simulated twice. `replayed` gives every
replica the requests that it received at the times when they arrived, which tests the model of engines alone.
`scheduled` submits all requests at once to the system of the run, with lengths predicted from the previous steps.
"""

from __future__ import annotations

import json
import statistics
from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.table import Table

from benchmarks.common.occupancy import Interval, occupancy
from benchmarks.common.result_files import RESULTS, bar, bars_table, console, write_result
from rhyme_verl.histopipe.replica_cost import MeasuredCost, load
from rhyme_verl.sim.cluster import Fleet, Replica
from rhyme_verl.sim.experiment import Case, Scenario, play
from rhyme_verl.sim.workload import from_recorded

WARM_UP_STEPS = 2
RESULT = RESULTS / "pipe_reality.json"


@dataclass(frozen=True, kw_only=True)
class Request:
    """One request of a replica.

    Attributes:
        key: key of its prompt.
        start, end: arrival at the replica and end of the answer, in seconds.
        tokens: tokens of the answer.
        prefill_tokens: tokens of the prompt that were not in the prefix cache.
    """

    key: int
    start: float
    end: float
    tokens: int
    prefill_tokens: int


@dataclass(frozen=True)
class Figures:
    """One step: `makespan` from the first arrival to the last answer in seconds, and shares from `occupancy`."""

    makespan: float
    bubble: float


Step = list[list[Request]]  # by replica


def recorded_steps(times: Path, replicas: int) -> list[Step]:
    """Return the steps of a recorded `sync` run after the warm-up.

    Raises:
        ValueError: requests were aborted, so it is not a `sync` run.
    """
    samples = _lines(times / "samples.jsonl")
    origin = samples[0]["asked"]  # Unix seconds as floats are too coarse for fractions of a token
    windows = [(line["asked"] - origin, line["got"] - origin) for line in samples[WARM_UP_STEPS:]]
    by_replica = []
    for replica in range(replicas):
        lines = _lines(times / f"requests-{replica}.jsonl")
        if any(line["aborted"] for line in lines):
            raise ValueError(f"{times}: requests were aborted: pass a run of the trainer mode sync")
        by_replica.append(
            [
                Request(
                    key=line["key"],
                    start=line["start"] - origin,
                    end=line["end"] - origin,
                    tokens=line["tokens"],
                    prefill_tokens=line["prompt"] - line["cached"],
                )
                for line in lines
            ]
        )
    return [
        [
            sorted((one for one in requests if begin <= one.end <= end), key=lambda one: one.start)
            for requests in by_replica
        ]
        for begin, end in windows
    ]


def fitted_cost(steps: list[Step], lanes: int) -> MeasuredCost:
    """Return the step cost, affine in the number of running sequences, that best explains the tokens of each replica.

    It includes everything else that takes time in a job, for example prefill.
    """
    seconds = np.array([_seconds_by_running(requests, lanes) for step in steps for requests in step])
    tokens = np.array([sum(one.tokens for one in requests) for step in steps for requests in step])
    running = np.arange(1, lanes + 1)
    best = (np.inf, 0.0, 0.0)
    for slope in np.logspace(-4.0, 1.0, 251):  # cost of a sequence relative to the fixed cost of a step
        shares = seconds @ (running / (1.0 + slope * running)) / tokens
        rate = shares.sum() / (shares**2).sum()
        best = min(best, (float(((rate * shares - 1.0) ** 2).sum()), 1.0 / rate, slope / rate))
    _, base, per_sequence = best
    cost = base + per_sequence * running
    return MeasuredCost(running=tuple(running.tolist()), seconds=tuple(cost.tolist()), prefill_seconds_per_token=0.0)


def _seconds_by_running(requests: list[Request], lanes: int) -> np.ndarray:
    """Return the seconds [lanes] in which 1, 2, ... sequences ran on a replica."""
    changes = sorted([(one.start, 1) for one in requests] + [(one.end, -1) for one in requests])
    times, present = np.array([time for time, _ in changes]), np.cumsum([change for _, change in changes])
    return np.bincount(np.minimum(present[:-1], lanes), weights=np.diff(times), minlength=lanes + 1)[1:]


def real(step: Step, lanes: int) -> Figures:
    """Return the recorded figures of a step."""
    return _figures([[(one.start, one.end) for one in requests] for requests in step], lanes)


def replayed(step: Step, lanes: int, measured: MeasuredCost) -> Figures:
    """Simulate the same requests on the same replicas with the same arrivals."""
    table = measured.table(lanes).seconds.tolist()
    return _figures([answer_intervals(requests, Replica(table, lanes), measured) for requests in step], lanes)


def answer_intervals(requests: list[Request], engine: Replica, measured: MeasuredCost) -> list[Interval]:
    """Return the interval from arrival to answer of each request of one engine, in order of arrival."""
    ends = [0.0] * len(requests)
    coming = deque(range(len(requests)))
    while coming or len(engine):
        arrival = requests[coming[0]].start if coming else float("inf")
        now = min(arrival, engine.next_end())
        for index, _ in engine.pop_ended(now):
            ends[index] = now
        if arrival == now:
            index = coming.popleft()
            prefill = requests[index].prefill_tokens * measured.prefill_seconds_per_token
            engine.start(index, requests[index].tokens, now, recompute=prefill)
    return [(one.start, end) for one, end in zip(requests, ends, strict=True)]


def scheduled(steps: list[Step], system: str, lanes: int, measured: MeasuredCost) -> list[Figures]:
    """Simulate each step under a system, with all requests known at its beginning."""
    in_order = [sorted((one for requests in step for one in requests), key=lambda one: one.start) for step in steps]
    keys, lengths = [], []
    for requests in in_order:
        by_key: dict[int, list[int]] = {}
        for one in requests:
            by_key.setdefault(one.key, []).append(one.tokens)
        keys.append(list(by_key))
        lengths.append(list(by_key.values()))
    workload = from_recorded(np.array(keys, dtype=np.uint64), np.array(lengths))
    num_replicas = len(steps[0])
    fleet = Fleet(speeds=np.ones(num_replicas), max_running=lanes, cost=measured.table(lanes))
    _, run = play(Scenario(workload=workload, fleet=fleet, steps=len(steps)), Case(mode="sync", system=system))
    step_size = workload.lengths[0].size
    found = []
    for number, opened in enumerate([0.0, *run.trained[:-1]]):
        own = [one for one in run.segments if one[1] // step_size == number]
        parts = [[(opened, end) for replica, _, _, end in own if replica == r] for r in range(num_replicas)]
        if system != "verl":  # a request arrives when it gets a lane
            parts = [[(start, end) for replica, _, start, end in own if replica == r] for r in range(num_replicas)]
        found.append(_figures(parts, lanes))
    return found


def compare(times: Path, replicas: int, lanes: int, measured: MeasuredCost, system: str) -> dict[str, Any]:
    """Return the figures of each step and the median deviations of the simulator.

    Deviations of makespans are relative; those of bubbles are differences of shares.
    """
    steps = recorded_steps(times, replicas)
    rows = [
        {
            "real": asdict(real(step, lanes)),
            "replayed": asdict(replayed(step, lanes, measured)),
            "scheduled": asdict(one),
        }
        for step, one in zip(steps, scheduled(steps, system, lanes, measured), strict=True)
    ]
    result: dict[str, Any] = {"system": system, "steps": rows}
    for kind in ("replayed", "scheduled"):
        result[kind] = {
            "makespan": statistics.median(row[kind]["makespan"] / row["real"]["makespan"] - 1.0 for row in rows),
            "bubble": statistics.median(row[kind]["bubble"] - row["real"]["bubble"] for row in rows),
        }
    return result


def _figures(requests: list[list[Interval]], lanes: int) -> Figures:
    window = (min(a for one in requests for a, _ in one), max(b for one in requests for _, b in one))
    full = occupancy(requests, [window], lanes)
    return Figures(window[1] - window[0], full.bubble)


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def main(
    times: Annotated[Path, typer.Argument(help="Folder `times` of a recorded sync run.")],
    step_cost: Annotated[Path | None, typer.Option(help="Step-cost table from `rhyme calibrate`.")] = None,
    fit_on: Annotated[Path | None, typer.Option(help="Instead: folder `times` of another such run to fit.")] = None,
    replicas: Annotated[int, typer.Option(min=1, help="Number of replicas in the run.")] = 2,
    lanes: Annotated[int, typer.Option(min=1, help="Sequences that a replica ran concurrently.")] = 32,
    system: Annotated[str, typer.Option(help="System that scheduled the run: verl or histopipe.")] = "verl",
    name: Annotated[str, typer.Option(help="Name of this comparison in the result. Default: the system.")] = "",
    result: Annotated[Path, typer.Option(help="Path of the result file; other names in it are kept.")] = RESULT,
) -> None:
    """Compare a recorded run of real replicas with the simulator."""
    if (step_cost is None) == (fit_on is None):
        raise typer.BadParameter("give either --step-cost or --fit-on")
    try:
        cost = load(step_cost) if step_cost else fitted_cost(recorded_steps(fit_on or times, replicas), lanes)
        found = compare(times, replicas, lanes, cost, system)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    table = Table(title=f"{system}, {replicas} replicas of {lanes} lanes: medians of {len(found['steps'])} steps")
    for heading in ("", "real", "replayed", "scheduled"):
        table.add_column(heading, justify="left" if not heading else "right")
    for figure in ("makespan", "bubble"):
        columns = [
            statistics.median(row[kind][figure] for row in found["steps"]) for kind in ("real", "replayed", "scheduled")
        ]
        table.add_row(figure.replace("_", " "), *(f"{number:.3f}" for number in columns))
    console.print(table)
    kept = json.loads(result.read_text(encoding="utf-8"))["runs"] if result.is_file() else {}
    facts = {"lanes": lanes, "replicas": replicas, "cost_ms": [1e3 * one for one in cost.seconds]}
    kept[name or system] = {**facts, "fitted_to_another_run": fit_on is not None, **found}
    bars = {name: one for run in kept for name, one in reality_bars(run, kept[run]).items()}
    console.print(bars_table(bars))
    write_result(result, {"runs": kept, "bars": bars})


def reality_bars(name: str, found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the bars of one comparison."""
    return {
        f"simulator, {name}, {kind}: deviation of {figure}": bar(abs(found[kind][figure]), at_most=0.15)
        for kind in ("replayed", "scheduled")
        for figure in ("makespan", "bubble")
    }


if __name__ == "__main__":
    typer.run(main)
