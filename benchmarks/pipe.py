"""HistoPipe against its bars: schedulers and trainer modes on a simulated cluster, over tails, caps, sizes and seeds.

Lengths are log-normal and spread within prompts and epochs as on the recorded trace, so that they are predicted as well
as there. With HistoSpec, a token's cost falls by the ratio of modelled tokens/s, drafted to undrafted, in
results/drafter.json. What real replicas did (results/replicas.json) and what a decision of the router costs are shown
beside it. Run by `make bench-pipe`.
"""

from __future__ import annotations

import json
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.table import Table

from benchmarks.length_errors import RecordedLengths, Spread
from benchmarks.pipe_scenarios import (
    CAP,
    MEDIAN_TOKENS,
    REPLICAS,
    SAMPLES,
    Row,
    drafting,
    pick,
    play_rows,
    ratios,
    scenario,
    stated_fleet,
)
from benchmarks.report import RESULTS, bar, bars_table, console, write_result
from rhyme_verl.histopipe.planner import Mode, plan
from rhyme_verl.histopipe.ranges import Work
from rhyme_verl.sim.experiment import COMBINATIONS, Scenario, play
from rhyme_verl.sim.trainer import TrainerMode
from rhyme_verl.sim.workload import LogNormal, from_distribution

TAILS = (3.0, 5.0, 8.0)  # 99th percentile of lengths by their median
CAPS = (2048, 4096, 8192, 16384)
SPREAD_RUNS = 3  # that a comparison of real jobs takes
SIZES = (1024, 4096)
STEPS = 8
TRAIN_SECONDS = (0.0, 20.0, 40.0, 80.0)
PAPER_ROLLOUT_SHARE = 0.87  # of a step of verl's sync mode; the paper says 84-91 %
MODES: tuple[Mode, ...] = ("barrier", "pipelined")
PLANNED_GROUPS, PLANNED_REPLICAS = 100_000, 4096
TRACE = Path("benchmarks/traces/quickstart.parquet")
TRACE_CAP = 400  # longest answer of the recorded run
TABLE: tuple[tuple[TrainerMode, str], ...] = (
    ("sync", "default"),
    ("sync", "histopipe"),
    ("sync", "perfect"),
    ("one_step_off", "default"),
    ("pairs", "default"),
    ("pairs", "histopipe"),
    ("pairs", "perfect"),
    ("pipelined", "histopipe"),
    ("separate_async", "default"),
)
TRAINED: tuple[tuple[TrainerMode, str], ...] = (
    ("sync", "default"),
    ("one_step_off", "default"),
    ("pairs", "histopipe"),
    ("pipelined", "histopipe"),
    ("colocate_async", "default"),
    ("colocate_async", "histopipe"),
    ("separate_async", "default"),
    ("separate_async", "histopipe"),
)
PAIRED: tuple[tuple[TrainerMode, str], ...] = (("pairs", "histopipe"), ("pipelined", "histopipe"))

Bars = dict[str, dict[str, Any]]


def main(
    seeds: Annotated[int, typer.Option(min=1, help="Workloads drawn of each kind.")] = 5,
    trace: Annotated[Path, typer.Option(help="Recorded trace that says how well lengths are predicted.")] = TRACE,
    drafter: Annotated[Path, typer.Option(help="Result of bench-drafter.")] = RESULTS / "drafter.json",
    replicas: Annotated[Path, typer.Option(help="Result of bench-replicas, shown if it is there.")] = (
        RESULTS / "replicas.json"
    ),
    reality: Annotated[Path, typer.Option(help="Result of benchmarks.pipe_reality, shown if it is there.")] = (
        RESULTS / "pipe_reality.json"
    ),
    result: Annotated[Path, typer.Option(help="Where the result goes.")] = RESULTS / "pipe.json",
    quick: Annotated[bool, typer.Option(help="One seed, one cap, no large clusters, no router.")] = False,
) -> None:
    """Play HistoPipe and its rivals, and print which bars hold."""
    recorded = RecordedLengths(trace, TRACE_CAP)
    spread, errors = recorded.spread(), recorded.errors()
    speedups = drafting_speedups(drafter)
    drawn = range(1 if quick else seeds)
    rows: dict[str, list[Row]] = {"all": [], "caps": [], "training": [], "drafted": [], "sizes": []}
    with ProcessPoolExecutor() as pool, console.status("simulating"):
        played = [pool.submit(play_seed, seed, spread, speedups, quick) for seed in drawn]
        played += [pool.submit(play_size, size, 0, spread) for size in (() if quick else SIZES)]
        for one in played:
            for kind, more in one.result().items():
                rows[kind] += more
    speed: dict[str, Any] = {"planning_seconds": planning_seconds()}
    bars = rollout_bars(rows)
    if not quick:
        from benchmarks import router_speed  # brings verl and Ray

        speed |= {"simulation_seconds": simulation_seconds(), "router": router_speed.measure()}
        bars |= size_bars(rows["sizes"])
    bars |= speed_bars(speed)
    for table in tables(rows, spread, errors):
        console.print(table)
    real = json.loads(replicas.read_text(encoding="utf-8"))["modes"] if replicas.is_file() else {}
    bars |= replica_bars(real)
    bars |= json.loads(reality.read_text(encoding="utf-8"))["bars"] if reality.is_file() else {}
    console.print(bars_table(bars))
    write_result(
        result,
        {
            "settings": {"steps": STEPS, "seeds": len(drawn), "trace": str(trace), "spread": vars(spread)},
            "prediction_on_trace": errors,
            "drafting_speedups": speedups,
            "speed": speed,
            "rows": rows,
            "replicas": {name: one["summary"] for name, one in real.items()},
            "bars": bars,
        },
    )


def play_seed(seed: int, spread: Spread, speedups: dict[int, float], quick: bool) -> dict[str, list[Row]]:
    """Play all that is played with every seed; return the rows by kind."""
    rows: dict[str, list[Row]] = {"all": [], "caps": [], "training": [], "drafted": []}
    for tail in TAILS:
        stated = scenario(spread, tail=tail, steps=STEPS, seed=seed)
        rows["all"] += play_rows(stated, COMBINATIONS, tail=tail, cap=CAP, seed=seed)
        for cap in () if quick else CAPS[:-1]:
            capped = scenario(spread, tail=tail, cap=cap, steps=STEPS // 2, seed=seed)
            rows["caps"] += play_rows(capped, TABLE, tail=tail, cap=cap, seed=seed)
    for seconds in TRAIN_SECONDS:
        trained = scenario(spread, tail=8.0, steps=STEPS, seed=seed, train_seconds=seconds)
        rows["training"] += play_rows(trained, TRAINED, train_seconds=seconds, seed=seed)
        rows["drafted"] += play_rows(drafting(trained, speedups), TRAINED, train_seconds=seconds, seed=seed)
    return rows | ({} if quick else play_size(REPLICAS, seed, spread))


def play_size(replicas: int, seed: int, spread: Spread) -> dict[str, list[Row]]:
    """Play a pair of steps on so many replicas."""
    pair = scenario(spread, tail=8.0, steps=2, seed=seed, replicas=replicas)
    return {"sizes": play_rows(pair, PAIRED, replicas=replicas, seed=seed)}


def drafting_speedups(path: Path) -> dict[int, float]:
    """Return modelled tokens/s with rhyme by those without drafts, by running sequences.

    They are of the trace whose lengths have a long tail, if that was replayed, else of the quickstart job's.
    """
    traces = json.loads(path.read_text(encoding="utf-8"))["traces"]
    rows = traces.get("longtail") or traces["quickstart"]
    return {
        int(running): row["modelled_tokens_per_s"] / rows["none"][running]["modelled_tokens_per_s"]
        for running, row in rows["rhyme"].items()
    }


def planning_seconds(groups: int = PLANNED_GROUPS, replicas: int = PLANNED_REPLICAS) -> dict[str, float]:
    """Return how long it takes to plan so many groups of 16, by the planner's mode, the best of three."""
    rng = np.random.default_rng(0)
    p50 = np.minimum(MEDIAN_TOKENS * rng.lognormal(0.0, 0.9, groups), CAP)
    samples = np.full(groups, SAMPLES, dtype=np.int64)
    work = Work(tokens=1.05 * p50, p50=p50, p90=np.minimum(1.4 * p50, CAP), samples=samples, max_tokens=CAP)
    best = {}
    for mode in MODES:
        seconds = []
        for _ in range(3):
            started = time.perf_counter()
            plan(work, stated_fleet(replicas), mode)
            seconds.append(time.perf_counter() - started)
        best[mode] = min(seconds)
    return best


def simulation_seconds() -> float:
    """Return how long 50 steps of 8,192 sequences take on 1,024 simulated replicas, lengths drawn and planned."""
    started = time.perf_counter()
    workload = from_distribution(LogNormal(), steps=50, groups=512, samples=SAMPLES)
    play(Scenario(workload=workload, fleet=stated_fleet(1024)), "pairs", "histopipe")
    return time.perf_counter() - started


def rollout_bars(rows: dict[str, list[Row]]) -> Bars:
    """Return the bars of the stated cluster, each of the worst seed unless it says otherwise."""
    bars: Bars = {}
    played = rows["all"]
    for tail, share in ((8.0, 0.87), (3.0, 0.95)):
        for mode, policy in PAIRED:
            worst = min(row["of_bound"] for row in pick(played, tail=tail, mode=mode, policy=policy))
            bars[f"{mode}, tail {tail:g}: throughput / lower bound of a pair"] = bar(worst, at_least=share)
    for tail in TAILS:
        perfect = {"tail": tail, "mode": "pairs", "policy": "perfect"}
        shares = ratios(played, "steps_per_hour", {**perfect, "policy": "histopipe"}, perfect)
        bars[f"pairs, tail {tail:g}: predicted / perfect lengths, mean"] = bar(statistics.mean(shares), at_least=0.96)
        bars[f"pairs, tail {tail:g}: predicted / perfect lengths, worst"] = bar(min(shares), at_least=0.96)
    for tail in TAILS:
        perfect = {"tail": tail, "mode": "sync", "policy": "perfect"}
        slowest = max(1.0 / row["of_step_bound"] for row in pick(played, **perfect))
        bars[f"sync, tail {tail:g}: makespan / lower bound, true lengths"] = bar(slowest, at_most=1.1)
    every = played + rows["caps"]
    worst_ratio = max(
        max(
            ratios(
                pick(every, tail=tail, cap=cap, mode="sync"),
                "rollout_seconds",
                {"policy": "histopipe"},
                {"policy": "default"},
            ),
            default=0.0,
        )
        for tail in TAILS
        for cap in CAPS
    )
    bars["sync, all tails and caps: makespan / verl's default"] = bar(worst_ratio, at_most=1.0)
    for mode, policy in PAIRED:
        for seconds in (0.0, paper_train_seconds(rows["training"])):
            rival = {"train_seconds": seconds, "mode": "one_step_off", "policy": "default"}
            own = {"train_seconds": seconds, "mode": mode, "policy": policy}
            gain = min(ratios(rows["training"], "steps_per_hour", own, rival))
            bars[f"{mode}, training {seconds:g} s: steps per hour / one step off"] = bar(gain, at_least=1.8)
            gain = min(_drafted_gains(rows, seconds, mode, policy))
            bars[f"{mode} and HistoSpec, training {seconds:g} s: steps per hour / sync"] = bar(gain, at_least=2.6)
    return bars


def size_bars(rows: list[Row]) -> Bars:
    """Return the bars of large clusters."""
    bars: Bars = {}
    for mode, policy in PAIRED:
        small = [row["of_bound"] for row in pick(rows, replicas=REPLICAS, mode=mode, policy=policy)]
        for size in SIZES:
            (row,) = pick(rows, replicas=size, mode=mode, policy=policy)
            points = 100.0 * (statistics.mean(small) - row["of_bound"])
            bars[f"{mode}, {size} replicas: points below {REPLICAS} replicas"] = bar(points, at_most=3.0)
    return bars


def speed_bars(speed: dict[str, Any]) -> Bars:
    """Return the bars of what planning, simulating and routing take; those that were measured."""
    slowest = max(speed["planning_seconds"].values())
    bars = {f"planning {PLANNED_GROUPS:,} groups on {PLANNED_REPLICAS:,} replicas, s": bar(slowest, at_most=1.0)}
    if "simulation_seconds" in speed:
        name = "simulating 1,024 replicas, 50 steps of 8,192 sequences, s"
        bars[name] = bar(speed["simulation_seconds"], at_most=120.0)
    if "router" in speed:
        for one in speed["router"]["decisions"]:
            bars[f"router, {one['replicas']:,} replicas: us a decision"] = bar(one["mean_us"], at_most=50.0)
        waiting = speed["router"]["waiting"]
        share = max(waiting["worker_share"], waiting["router_share"] - waiting["router_idle_share"])
        bars[f"{waiting['waiting']:,} waiting answers: share of a processor"] = bar(share, at_most=0.01)
    return bars


def replica_bars(modes: dict[str, Any]) -> Bars:
    """Return the bars of real replicas: HistoPipe's modes against verl's schedule, beyond the spread of three runs."""
    bars: Bars = {}
    summaries = {name: one["summary"] for name, one in modes.items() if "off" in one["summary"]}
    for name, case, summary in [(name, case, one) for name, one in summaries.items() for case in one if case != "off"]:
        off, on = summary["off"], summary[case]
        theirs, ours = off["rollout_seconds_per_step"], on["rollout_seconds_per_step"]
        if min(len(theirs["runs"]), len(ours["runs"])) < SPREAD_RUNS:
            continue  # shown among the replicas, but no bar: runs of one case differ by a tenth
        bars[f"real, {name}: rollout seconds, {case} / off"] = {
            "measured": ours["median"] / theirs["median"],
            "target": "< 1, all runs",
            "holds": ours["max"] < theirs["min"],
        }
        theirs, ours = off["steps_per_hour"], on["steps_per_hour"]
        bars[f"real, {name}: steps per hour, {case} / off"] = {
            "measured": ours["median"] / theirs["median"],
            "target": "> 1, all runs",
            "holds": ours["min"] > theirs["max"],
        }
        stalest = off["staleness_mean"]["median"]
        bars[f"real, {name}: mean staleness, {case}"] = bar(on["staleness_mean"]["median"], at_most=stalest)
    return bars


def _drafted_gains(rows: dict[str, list[Row]], seconds: float, mode: str, policy: str) -> list[float]:
    """Return steps per hour of a drafted mode by those of verl's undrafted sync, seed by seed."""
    own = [{**row, "drafted": True} for row in pick(rows["drafted"], train_seconds=seconds)]
    both = own + [{**row, "drafted": False} for row in pick(rows["training"], train_seconds=seconds)]
    drafted = {"drafted": True, "mode": mode, "policy": policy}
    return ratios(both, "steps_per_hour", drafted, {"drafted": False, "mode": "sync", "policy": "default"})


def paper_train_seconds(rows: list[Row]) -> float:
    """Return the played training time that makes rollout about the paper's share of a step of verl's sync mode."""
    untrained = pick(rows, train_seconds=0.0, mode="sync", policy="default")
    step = statistics.mean(3600.0 / row["steps_per_hour"] for row in untrained)
    wanted = step * (1.0 / PAPER_ROLLOUT_SHARE - 1.0)
    return min(TRAIN_SECONDS, key=lambda seconds: abs(seconds - wanted))


def tables(rows: dict[str, list[Row]], spread: Spread, errors: list[dict[str, Any]]) -> list[Table]:
    """Return what is printed, medians over the seeds."""
    found = Table(title="lengths on the trace, predicted from the epochs before")
    for heading in ("epoch", "rank correlation", "at most p50", "at most p90"):
        found.add_column(heading, justify="right")
    for one in errors:
        numbers = (one["rank_correlation"], one["below_p50"], one["below_p90"])
        found.add_row(str(one["epoch"]), *(f"{number:.3f}" for number in numbers))
    found.caption = (
        f"within prompts {spread.within_group:.2f}, from epoch to epoch {spread.epoch_noise:.2f} of the spread"
    )
    modes = [_modes_table(pick(rows["all"], tail=tail), tail) for tail in TAILS]
    caps = Table(title="share of the lower bound by cap and tail (sync: of steps, others: of pairs)")
    for heading in ("trainer", "policy"):
        caps.add_column(heading)
    played = rows["all"] + rows["caps"]
    columns = [(cap, tail) for cap in sorted({row["cap"] for row in played}) for tail in TAILS]
    for cap, tail in columns:
        caps.add_column(f"{cap // 1024}k, {tail:g}", justify="right")
    for mode, policy in TABLE:
        name = "of_step_bound" if mode == "sync" else "of_bound"
        cells = [
            f"{_median(pick(played, cap=cap, tail=tail, mode=mode, policy=policy), name):.1%}" for cap, tail in columns
        ]
        caps.add_row(mode, policy, *cells)
    training = Table(title="steps per hour by seconds of training, tail 8; below, with HistoSpec")
    for heading in ("trainer", "policy"):
        training.add_column(heading)
    for seconds in TRAIN_SECONDS:
        training.add_column(f"{seconds:g} s", justify="right")
    for name in ("training", "drafted"):
        for mode, policy in TRAINED:
            some = pick(rows[name], mode=mode, policy=policy)
            cells = [f"{_median(pick(some, train_seconds=s), 'steps_per_hour'):.1f}" for s in TRAIN_SECONDS]
            training.add_row(mode, policy, *cells)
        training.add_section()
    return [found, *modes, caps, training]


def _modes_table(rows: list[Row], tail: float) -> Table:
    table = Table(title=f"{REPLICAS} replicas, tail {tail:g}, cap {CAP}, no training time")
    for heading in ("trainer", "policy"):
        table.add_column(heading)
    for heading in ("of bound", "worst", "steps/h", "bubble", "staleness / max", "spanning", "recompute s"):
        table.add_column(heading, justify="right")
    for mode, policy in COMBINATIONS:
        some = pick(rows, mode=mode, policy=policy)
        table.add_row(
            mode,
            policy,
            f"{_median(some, 'of_bound'):.1%}",
            f"{min(row['of_bound'] for row in some):.1%}",
            f"{_median(some, 'steps_per_hour'):.1f}",
            f"{_median(some, 'bubble'):.0%}",
            f"{_median(some, 'staleness_mean'):.2f} / {max(row['staleness_max'] for row in some):g}",
            f"{_median(some, 'spanning'):.0%}",
            f"{_median(some, 'recompute_seconds'):,.0f}",
        )
    return table


def _median(rows: list[Row], name: str) -> float:
    return statistics.median(row[name] for row in rows)


if __name__ == "__main__":
    typer.run(main)
