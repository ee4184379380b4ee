"""Compares the simulator with the recorded jobs of `make bench-e2e`.

Each job is simulated with the lengths that its answers had, lengths predicted from earlier steps, and a step cost that
was fitted to the same case in another round. Fitted and compared are the steps from the second epoch on; compared are
the seconds per step in which any replica generates.
"""

from __future__ import annotations

import json
import statistics
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.table import Table
from scipy.optimize import nnls

from benchmarks.common.occupancy import Interval, clip, open_intervals
from benchmarks.common.result_files import RESULTS, bar, bars_table, console, write_result
from benchmarks.jobs import end_to_end
from benchmarks.jobs.cases import LANES, THRESHOLD, batch_size, cases
from benchmarks.jobs.job_figures import EPOCH_STEPS
from rhyme_verl.sim.experiment import Case, play
from rhyme_verl.sim.trainer import Scenario
from rhyme_verl.sim.workload import from_recorded

RESULT = RESULTS / "pipe_reality.json"
TOLERANCE = 0.1  # relative deviation of the makespan
KNOTS = (1, 4, 16, 64, 256)  # running sequences


@dataclass(frozen=True, kw_only=True)
class Request:
    """One request of a replica; an interrupted answer has several.

    Attributes:
        key: key of its prompt.
        start, end: arrival at the replica and end of the answer or of this part of it, in seconds.
        tokens: tokens generated.
        resumed: tokens of the answer that earlier requests generated.
        aborted: whether new weights interrupted it.
    """

    key: int
    start: float
    end: float
    tokens: int
    resumed: int
    aborted: bool


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """A recorded job: its requests by replica, when its replicas were open, and the seconds at which it got batches."""

    requests: list[list[Request]]
    windows: list[Interval]
    got: list[float]

    def busy_seconds(self, warmup_steps: int) -> float:
        """Return the mean seconds per step, after the warm-up, in which any replica generates."""
        inside = clip(self.windows, self.got[warmup_steps - 1], self.got[-1])
        every = sorted((one.start, one.end) for requests in self.requests for one in requests)
        total, until = 0.0, float("-inf")
        for start, end in every:
            total += sum(b - a for a, b in clip(inside, max(start, until), end))
            until = max(until, end)
        return total / (len(self.got) - warmup_steps)


def recorded(times: Path, replicas: int, mode: str) -> Recorded:
    """Read the folder `times` of a job that benchmarks.jobs.replica_job recorded."""
    samples = _lines(times / "samples.jsonl")
    origin = samples[0]["asked"]  # Unix seconds as floats are too coarse for fractions of a token
    requests = [
        [
            Request(
                key=line["key"],
                start=line["start"] - origin,
                end=line["end"] - origin,
                tokens=line["tokens"],
                resumed=line["resumed"],
                aborted=line["aborted"],
            )
            for line in _lines(times / f"requests-{replica}.jsonl")
        ]
        for replica in range(replicas)
    ]
    got = [line["got"] - origin for line in samples]
    if mode == "sync":
        windows = [(line["asked"] - origin, line["got"] - origin) for line in samples]
    else:
        gates = [
            [(line["time"] - origin, line["open"]) for line in _lines(times / f"gates-{replica}.jsonl")]
            for replica in range(replicas)
        ]
        began = min(request.start for replica in requests for request in replica)
        windows = open_intervals(gates, began, got[-1])
    return Recorded(requests=requests, windows=windows, got=got)


def fitted_cost(job: Recorded, lanes: int, warmup_steps: int) -> np.ndarray:
    """Return the step cost by running sequences with which each request yields about the tokens that it had.

    Only requests that begin after the warm-up count, because it accepts fewer drafts. Steps per second are interpolated
    between KNOTS and never rise with the number of sequences. The cost includes everything else that takes time in a
    job, such as prefill, and is lower where drafts are accepted.
    """
    running = np.arange(1, lanes + 1)
    knots = np.unique(np.minimum(KNOTS, lanes))
    weights = np.stack([np.interp(np.log(running), np.log(knots), row) for row in np.eye(len(knots))], axis=1)
    falls = np.triu(np.ones((len(knots), len(knots))))  # steps per second at a knot: the sum of this and later falls
    seconds = np.concatenate([_seconds_by_running(requests, job.windows, lanes) for requests in job.requests])
    every = [one for requests in job.requests for one in requests]
    tokens = np.array([one.tokens for one in every], dtype=np.float64)
    counts = np.array([one.start >= job.got[warmup_steps - 1] for one in every])
    found, _ = nnls(seconds[counts] @ weights @ falls, tokens[counts])
    steps_per_second = weights @ falls @ found
    return np.concatenate([1.0 / steps_per_second[:1], 1.0 / steps_per_second])


def simulated_seconds(
    job: Recorded, case: Case, step_seconds: np.ndarray, *, batch_size: int, samples: int, warmup_steps: int
) -> float:
    """Return the simulator's seconds per step for the same answers, without training, after the warm-up."""
    keys, lengths = _groups(job, samples)
    batches = len(keys) // batch_size
    workload = from_recorded(
        np.array(keys[: batches * batch_size], dtype=np.uint64).reshape(batches, batch_size),
        np.array(lengths[: batches * batch_size]).reshape(batches, batch_size, samples),
    )
    steps = len(job.got)
    scenario = Scenario(
        workload=workload,
        speeds=np.ones(len(job.requests)),
        step_seconds=step_seconds,
        steps=steps,
        recompute_seconds_per_token=0.0,  # in `step_seconds`
    )
    _, run = play(scenario, case)
    return (run.trained[-1] - run.trained[warmup_steps - 1]) / (steps - warmup_steps)


def _groups(job: Recorded, samples: int) -> tuple[list[int], list[list[int]]]:
    """Return the prompt keys and answer lengths of the groups, in the order in which they began.

    Answers that were not finished when the job ended count with the tokens that they had at the last interruption:
    without them, the workload would lack the longest answers, which replicas generated for a part.
    """
    every = sorted((one for requests in job.requests for one in requests), key=lambda one: one.start)
    began: dict[int, list[float]] = defaultdict(list)
    ended: dict[int, list[tuple[float, int]]] = defaultdict(list)
    unfinished: dict[int, list[int]] = defaultdict(list)
    for request in every:
        if request.resumed:
            unfinished[request.key].remove(request.resumed)
        elif request.tokens:
            began[request.key].append(request.start)
        tokens = request.resumed + request.tokens
        if not request.aborted:
            ended[request.key].append((request.end, tokens))
        elif tokens:
            unfinished[request.key].append(tokens)
    groups = []
    for key, starts in began.items():
        lengths = [tokens for _, tokens in sorted(ended[key])] + unfinished[key]
        for first in range(0, len(lengths) - samples + 1, samples):
            groups.append((starts[first], key, lengths[first : first + samples]))
    groups.sort(key=lambda group: group[0])
    return [key for _, key, _ in groups], [lengths for _, _, lengths in groups]


def _seconds_by_running(requests: Sequence[Request], windows: Sequence[Interval], lanes: int) -> np.ndarray:
    """Return the seconds [requests, lanes] of each request of a replica in which it ran among 1, 2, ... sequences."""
    running = _running(requests, lanes)
    changes = sorted(
        [(start, 1, 0) for start, _ in running]
        + [(end, -1, 0) for _, end in running]
        + [(start, 0, 1) for start, _ in windows]
        + [(end, 0, -1) for _, end in windows]
    )
    times = np.array([time for time, _, _ in changes])
    present, is_open = (np.cumsum([change[which] for change in changes]) for which in (1, 2))
    seconds = np.zeros((len(times), lanes))
    seconds[np.arange(1, len(times)), np.clip(present[:-1], 1, lanes) - 1] = np.diff(times) * is_open[:-1]
    until = np.cumsum(seconds, axis=0)
    starts, ends = (np.searchsorted(times, column) for column in zip(*running, strict=True))
    return until[ends] - until[starts]


def _running(requests: Sequence[Request], lanes: int) -> list[Interval]:
    """Return when each request ran: beyond `lanes`, requests wait in the order of arrival."""
    starts = [one.end for one in requests]  # of a request that ends while it waits
    changes = sorted(
        [(one.end, 0, n) for n, one in enumerate(requests)] + [(one.start, 1, n) for n, one in enumerate(requests)]
    )
    waiting: deque[int] = deque()
    num_running = 0
    for time, is_start, number in changes:
        if is_start:
            waiting.append(number)
        elif starts[number] < time:
            num_running -= 1
        else:
            waiting.remove(number)
        while waiting and num_running < lanes:
            starts[waiting.popleft()] = time
            num_running += 1
    return [(start, one.end) for start, one in zip(starts, requests, strict=True)]


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def main(
    runs: Annotated[Path, typer.Argument(help="Folder of `make bench-e2e`.")] = Path("runs/end_to_end"),
    case: Annotated[list[str] | None, typer.Option(help="Only this case (repeatable).")] = None,
    result: Annotated[Path, typer.Option(help="Path of the result file.")] = RESULT,
) -> None:
    """Simulate recorded jobs of real replicas, and compare their rollout seconds."""
    table = Table(title="busy seconds per step, each round with the step cost of another")
    for heading in ("case", "real", "simulated", "simulated / real"):
        table.add_column(heading, justify="left" if heading == "case" else "right")
    finished = json.loads((RESULTS / f"{end_to_end.result_name()}.json").read_text(encoding="utf-8"))["runs"]
    found, bars = {}, {}
    for name, kind in cases({}).items():
        folders = [end_to_end.folder_of(runs, run["round"], name) for run in finished if run["case"] == name]
        rounds = [folder / "times" for folder in folders if folder.is_dir()]
        if len(rounds) < 2 or (case and name not in case):
            continue
        jobs = [recorded(times, kind.replicas, kind.mode) for times in rounds]
        costs = [fitted_cost(job, LANES, EPOCH_STEPS) for job in jobs]
        scheduled = Case(
            mode=kind.mode,
            system="verl" if kind.pipe is None else "histopipe",
            max_age=kind.pipe or 0,
            wait_threshold=next(
                (int(one.removeprefix(f"{THRESHOLD}=")) for one in kind.overrides if THRESHOLD in one), None
            ),
        )
        rows = []
        for number, job in enumerate(jobs):
            simulated = simulated_seconds(
                job,
                scheduled,
                costs[number - 1],
                batch_size=batch_size(LANES),
                samples=end_to_end.SAMPLES,
                warmup_steps=EPOCH_STEPS,
            )
            real = job.busy_seconds(EPOCH_STEPS)
            rows.append({"real": real, "simulated": simulated, "ratio": simulated / real})
        figures = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
        table.add_row(name, *(f"{figures[key]:.2f}" for key in ("real", "simulated", "ratio")))
        found[name] = {**figures, "rounds": rows}
        bars[f"{name}: deviation of the simulated makespan"] = bar(abs(figures["ratio"] - 1.0), at_most=TOLERANCE)
    if not found:
        raise typer.BadParameter(f"{runs}: no case has run in two rounds: run `make bench-e2e` with --rounds 2")
    console.print(table)
    console.print(bars_table(bars))
    write_result(result, {"cases": found, "bars": bars})


if __name__ == "__main__":
    typer.run(main)
