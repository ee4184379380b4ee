"""Compares HistoPipe with verl's trainer modes on a simulated cluster in the steady state. Run by `make bench-pipe`.

HistoPipe is the production code; verl's balancer, partial rollout and `wait` strategy are modelled. Base scenario: 64
replicas of 128 lanes, steps of 512 groups x 16 answers, median 2,000 tokens, p99 eight times that, cap 16,384; an
engine step costs 15 ms + 50 us per sequence. One factor changes at a time: drafts (the engines' tokens/s relative to no
drafts by running sequences, from results/rollout.json for the long-tail trace), the cost of recomputing a prefix,
training time, tail, predictions, and dynamic sampling.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.table import Table

from benchmarks.common.result_files import RESULTS, bar, bars_table, console, write_result
from benchmarks.engines.running import mean_running
from benchmarks.scheduling.scenarios import (
    AS_RECORDED,
    NOISY,
    REPLICAS,
    STEPS,
    TAIL,
    Row,
    pick,
    play_case,
    stated_step_seconds,
    workload,
    worst_ratio,
)
from rhyme_verl.histopipe.units import UnitShape
from rhyme_verl.sim.experiment import Case
from rhyme_verl.sim.trainer import Scenario

AGES = (1, 2, 3)
OURS = tuple(Case(mode="colocate_async", system="histopipe", max_age=age) for age in AGES)
STOCK = Case(mode="colocate_async")
VERL = (
    Case(mode="sync"),
    Case(mode="one_step_off"),
    STOCK,
    Case(mode="colocate_async", wait_threshold=2),
    Case(mode="colocate_async", wait_threshold=3),
)
ALL = (
    *VERL,
    Case(mode="pipelined", system="two-tier"),
    Case(mode="sync", system="histopipe"),
    *OURS,
    Case(mode="separate_async"),
    Case(mode="separate_async", system="histopipe"),
)
RECOMPUTES = (0, 10, 50)  # us per prefix token
TRAIN_SECONDS = (0.0, 40.0)
TAILS = (3.0, 5.0)
FILTERED = (0.1, 0.5)


@dataclass(frozen=True)
class Job:
    """The parameters of one simulation."""

    factor: str
    case: Case
    seed: int
    recompute_us: float = 50.0
    train_seconds: float = 0.0
    tail: float = TAIL
    spread: tuple[float, float] = AS_RECORDED
    filtered: float = 0.0
    drafted: bool = False


def jobs(seeds: int) -> Iterator[Job]:
    """Yield all simulations: the base scenario, and variants with one factor changed."""
    for seed in range(seeds):
        for drafted in (False, True):
            for case in ALL:
                yield Job("base", case, seed, drafted=drafted)
            for case in (STOCK, *OURS):
                for us in RECOMPUTES[:-1]:
                    yield Job("recompute", case, seed, recompute_us=us, drafted=drafted)
            for case in (Case(mode="sync"), STOCK, *OURS):
                yield Job("training", case, seed, train_seconds=TRAIN_SECONDS[1], drafted=drafted)
            for case in (STOCK, OURS[1]):
                yield Job("predictions", case, seed, spread=NOISY, drafted=drafted)
                if seed == 0:
                    for tail in TAILS:
                        yield Job("tail", case, seed, tail=tail, drafted=drafted)
        for shape in (UnitShape(2, 128), UnitShape(2, 256), UnitShape(2, 384), UnitShape(3, 0)):
            case = Case(mode="colocate_async", system="histopipe", max_age=2, shape=shape)
            yield Job("predictions", case, seed, spread=NOISY)
            yield Job("shape", case, seed)
        for share in FILTERED:
            yield Job("filtered", OURS[1], seed, filtered=share)


def run(job: Job, speedups: dict[float, float]) -> Row:
    """Run one simulation."""
    scenario = Scenario(
        workload=workload(tail=job.tail, spread=job.spread, seed=job.seed),
        speeds=np.ones(REPLICAS),
        step_seconds=stated_step_seconds(speedups if job.drafted else None),
        steps=STEPS,
        train_seconds=job.train_seconds,
        recompute_seconds_per_token=job.recompute_us / 1e6,
        filtered=job.filtered,
        seed=job.seed,
    )
    facts = {name: value for name, value in vars(job).items() if name not in ("case", "spread")}
    correlation = scenario.workload.rank_correlation
    return {**play_case(scenario, job.case), **facts, "rank_correlation": correlation, "noisy": job.spread == NOISY}


def drafting_speedups(path: Path) -> dict[float, float]:
    """Return tokens/s with rhyme relative to no drafts on the long-tail text, by running sequences.

    These are means over the undrafted engine's steps, because answers run out at the end of a run.
    """
    measured = json.loads(path.read_text(encoding="utf-8"))["loads"]["longtail"]["full history, scale 1"]
    return {
        mean_running(measured["runs"]["none"][most]): row["ratio"]["median"]
        for most, row in measured["summary"]["rhyme"].items()
    }


def bars_of(rows: list[Row]) -> dict[str, dict[str, Any]]:
    """Return the bars, each for the worst seed."""
    bars: dict[str, dict[str, Any]] = {}
    targets = {2: {50: (0.96, 1.07), 10: (0.85, 0.88)}, 3: {50: (1.12, 1.25), 10: (0.97, 1.0)}}
    for age, by_recompute in targets.items():
        ours = OURS[AGES.index(age)].name
        for us, both in by_recompute.items():
            for drafted, target in zip((False, True), both, strict=True):
                facts = {"factor": "base" if us == 50 else "recompute", "recompute_us": us, "drafted": drafted}
                ratio = worst_ratio(rows, {**facts, "case": ours}, {**facts, "case": STOCK.name})
                what = "drafted" if drafted else "undrafted"
                bars[f"max_age {age}, {what}, recompute {us} us: steps/h / colocate_async"] = bar(
                    ratio, at_least=target
                )
    two = pick(rows, factor="base", case=OURS[1].name)
    bars["max_age 2: mixed answers"] = bar(max(row["mixed"] for row in two), at_most=0.07)
    for age, case in zip(AGES, OURS, strict=True):
        oldest = max(row["age_max"] for row in rows if row["case"].startswith(case.name))
        bars[f"max_age {age}: maximum age, all scenarios"] = bar(oldest, at_most=age)
    base = {"factor": "base", "drafted": False}
    wait = {**base, "case": VERL[-1].name}
    bars["max_age 2: steps/h / verl's wait at the same age"] = bar(
        worst_ratio(rows, {**base, "case": OURS[1].name}, wait), at_least=1.28
    )
    one = min(row["of_bound"] for row in pick(rows, **base, case=OURS[0].name))
    bars["max_age 1, undrafted: share of the lower bound"] = bar(one, at_least=0.86)
    noisy = {"factor": "predictions", "drafted": False, "noisy": True}
    best = max(
        worst_ratio(rows, {**noisy, "case": name}, {**noisy, "case": STOCK.name})
        for name in {row["case"] for row in pick(rows, **noisy)} - {STOCK.name}
    )
    bars["max_age 2, rank correlation .75: steps/h / colocate_async, best shape"] = bar(best, at_least=1.0)
    for share in FILTERED:
        facts = {"factor": "filtered", "filtered": share}
        ratios = [
            row["steps_per_hour"] / pick(two, seed=row["seed"], drafted=False)[0]["steps_per_hour"]
            for row in pick(rows, **facts)
        ]
        bars[f"dynamic sampling, {share:.0%} filtered: steps/h / unfiltered x (1 - share)"] = bar(
            min(ratios) / (1.0 - share), at_least=0.9
        )
    return bars


def table_of(rows: list[Row], title: str, **facts: Any) -> Table:
    """Return a table of medians over the seeds, undrafted and drafted."""
    table = Table(title=title)
    for heading in ("case", "steps/h", "drafted", "of bound", "drafted", "bubble", "age / max", "mixed", "tokens"):
        table.add_column(heading, justify="left" if heading == "case" else "right", no_wrap=True)
    chosen = pick(rows, **facts)
    for case in dict.fromkeys(row["case"] for row in chosen):
        plain, drafted = (_median(pick(chosen, case=case, drafted=value)) for value in (False, True))
        if plain is None:
            continue
        table.add_row(
            case,
            f"{plain['steps_per_hour']:.1f}",
            f"{drafted['steps_per_hour']:.1f}" if drafted else "-",
            _percent(plain["of_bound"]),
            _percent(drafted["of_bound"]) if drafted else "-",
            f"{plain['bubble']:.0%}",
            f"{plain['age_mean']:.2f} / {plain['age_max']}",
            f"{plain['mixed']:.1%}",
            f"{plain['tokens_per_answer']:,.0f}",
        )
    return table


def _median(rows: list[Row]) -> Row | None:
    return sorted(rows, key=lambda row: row["steps_per_hour"])[len(rows) // 2] if rows else None


def _percent(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.0%}"


def main(
    seeds: Annotated[int, typer.Option(min=1, help="Random workloads per kind.")] = 3,
    rollout: Annotated[Path, typer.Option(help="Result file of bench-rollout.")] = RESULTS / "rollout.json",
    router: Annotated[bool, typer.Option(help="Also measure the router's cost; needs an idle machine.")] = True,
    result: Annotated[Path, typer.Option(help="Path of the result file.")] = RESULTS / "pipe.json",
) -> None:
    """Simulate all scenarios, measure the router, and print which bars hold."""
    speedups = drafting_speedups(rollout)
    measured: dict[str, Any] = {}
    if router:
        from benchmarks.scheduling import router_speed

        measured = router_speed.measure()
    todo, rows = list(jobs(seeds)), []
    with ProcessPoolExecutor() as pool:
        for done, row in enumerate(pool.map(run, todo, [speedups] * len(todo)), start=1):
            rows.append(row)
            if done % 20 == 0:
                console.print(f"{done} of {len(todo)} simulations")
    bars = bars_of(rows)
    if measured:
        bars |= router_speed.bars_of(measured)
    console.print(table_of(rows, "base scenario, recompute 50 us", factor="base"))
    for us in RECOMPUTES[:-1]:
        console.print(table_of(rows, f"recompute {us} us", factor="recompute", recompute_us=us))
    console.print(table_of(rows, f"training {TRAIN_SECONDS[1]:g} s", factor="training"))
    console.print(table_of(rows, "predictions of rank correlation .75", factor="predictions"))
    console.print(table_of(rows, "shapes of units at max_age 2", factor="shape"))
    for tail in TAILS:
        console.print(table_of(rows, f"tail {tail:g}", factor="tail", tail=tail))
    for share in FILTERED:
        console.print(table_of(rows, f"{share:.0%} filtered", factor="filtered", filtered=share))
    console.print(bars_table(bars))
    content = {"steps": STEPS, "seeds": seeds, "drafting_speedups": speedups, "router": measured}
    write_result(result, {**content, "rows": rows, "bars": bars})


if __name__ == "__main__":
    typer.run(main)
