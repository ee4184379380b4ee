"""Drives the real router and the real store with the load of a large job. Run by `make bench-load`.

The load is that of a 7B policy on 1,024 replicas whose lanes are full (`job.py`; docs/tuning.md derives it). Every call
is recorded where it is made. The bars are on those of `Probe`, whose process does nothing else: the played replicas
share a few processes here, so their own calls also wait for each other (`lag`: how late their event loops are).
"""

from __future__ import annotations

import logging
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import ray
import typer
from rich.table import Table

from benchmarks.common.result_files import RESULTS, bar, bars_table, console, write_result
from benchmarks.load.calls import by_phase
from benchmarks.load.control_plane import ControlPlane, spent
from benchmarks.load.job import SAMPLES, LoadedJob
from benchmarks.scheduling.router_speed import decision_microseconds
from rhyme_verl.config import GIB, HistoryConfig

SHARDS = (1, 8)
REST_SECONDS = 4.0
STORM_SECONDS = 8.0  # from the submission of a step
KILL_AFTER_SECONDS = 6.0
LONGEST_MS = 250.0
OBJECT_STORE_GIB = 2
CPUS = 8  # slots of Ray, whose actors here take none
BUSY = 0.5  # share of a core that an actor of the sizing table uses


def play_step(job: LoadedJob, shards: int, budget_gib: float) -> dict[str, Any]:
    """Play one step of a job whose history has one epoch, from its submission to the snapshot after it."""
    with tempfile.TemporaryDirectory() as folder:
        settings = HistoryConfig(budget_gib=budget_gib, shards=shards, snapshot_dir=folder)
        with ControlPlane(job, settings) as plane:
            plane.fill(1, job.prompts)
            plane.take()
            before, began = plane.usage(), time.time()
            time.sleep(REST_SECONDS)
            submitted = time.time()
            submit_s = plane.submit(2)
            played = ray.get(plane.play(2))
            ended, after = time.time(), plane.usage()
            plane.end_step(2)
            saved = time.time()
            calls, sent = plane.take()
            kept = plane.counters()
            cpu_s = spent(before, after)
            phases = {
                "rest": (began, submitted),
                "storm": (submitted, submitted + STORM_SECONDS),
                "flow": (submitted + STORM_SECONDS, ended),
                "end": (ended, saved),
            }
            answers = job.prompts * SAMPLES
            return {
                "shards": shards,
                "answers": answers,
                "seconds": ended - submitted,
                "submit_ms": 1e3 * submit_s,
                "mean_answers_per_s": answers / (ended - submitted),
                "fetched_bytes_per_s": sum(one["fetched_bytes"] for one in played) / (ended - submitted),
                "unanswered_prompts": sum(one["unanswered_prompts"] for one in played),
                "cpu_us_per_answer": {name: 1e6 * seconds / answers for name, seconds in cpu_s.items()},
                "memory_gib": {name: one["gib"] for name, one in plane.usage().items()},
                "sent_tokens": sent.total(),
                "dropped_tokens": sum(one.evicted_tokens for one in kept),
                "lost_tokens": sent.total() - sum(one.tokens + one.evicted_tokens for one in kept),
                "calls": by_phase(calls, phases),
            }


def kill_shard(job: LoadedJob, budget_gib: float) -> dict[str, Any]:
    """Kill the first of eight shards while answers end, some time after its snapshot."""
    with tempfile.TemporaryDirectory() as folder:
        settings = HistoryConfig(budget_gib=budget_gib, shards=SHARDS[-1], snapshot_dir=folder)
        with ControlPlane(job, settings) as plane:
            plane.fill(1, job.prompts)
            plane.end_step(1)
            saved = plane.counters()[0].tokens
            plane.submit(2)
            playing = plane.play(2)
            time.sleep(KILL_AFTER_SECONDS)
            killed = plane.kill_shard(0)
            played = ray.get(playing)
            _, sent = plane.take()
            kept = plane.counters()
            return {
                "seconds_to_answer": killed["seconds"],
                "unanswered_prompts": sum(one["unanswered_prompts"] for one in played),
                "tokens_since_snapshot": killed["held_tokens"] - saved,
                "lost_tokens": sent[0] - kept[0].tokens,
                "lost_tokens_of_others": sum(sent[index] - kept[index].tokens for index in range(1, len(kept))),
            }


def fill_store(job: LoadedJob, num_prompts: int, budget_gib: float) -> dict[str, Any]:
    """Send the answers to more prompts than the budget keeps, as fast as one shard takes them."""
    with ControlPlane(job, HistoryConfig(budget_gib=budget_gib)) as plane:
        before, began = plane.usage(), time.time()
        plane.fill(1, num_prompts)
        ended, after = time.time(), plane.usage()
        calls, sent = plane.take()
        (kept,) = plane.counters()
        answers = num_prompts * SAMPLES
        return {
            "prompts": num_prompts,
            "budget_gib": budget_gib,
            "answers_per_s": answers / (ended - began),
            "bytes_per_s": 4 * sent.total() / (ended - began),
            "cpu_us_per_answer": 1e6 * spent(before, after)["busiest shard"] / answers,
            "memory_gib": after["shard 0"]["gib"],
            "bytes_per_token": kept.bytes / kept.tokens,
            "kept": asdict(kept),
            "sent_tokens": sent.total(),
            "lost_tokens": sent.total() - kept.tokens - kept.evicted_tokens,
            "calls": by_phase(calls, {"fill": (began, ended)}),
        }


def bars_of(steps: Sequence[dict[str, Any]], killed: dict[str, Any], filled: dict[str, Any]) -> dict[str, Any]:
    """Return the bars of all parts."""
    bars = {}
    for one in steps:
        name = f"{one['shards']} shards" if one["shards"] > 1 else "1 shard"
        probed = [row for row in one["calls"] if row["call"].startswith("probe: ") and row["call"] != "probe: lag"]
        fetches = [row for row in probed if row["call"] == "probe: fetch"]
        router = [one["submit_ms"], *(row["max_ms"] for row in probed if row not in fetches)]
        rest = [row["max_ms"] for row in fetches if row["phase"] != "storm"]
        storm = [row["max_ms"] for row in fetches if row["phase"] == "storm"]
        bars[f"load, {name}: longest call of the router, ms"] = bar(max(router), at_most=LONGEST_MS)
        bars[f"load, {name}: longest fetch of a prompt's history, ms"] = bar(max(rest), at_most=LONGEST_MS)
        bars[f"load, {name}: the same while a step begins, ms"] = bar(max(storm), at_most=LONGEST_MS)
        bars[f"load, {name}: tokens lost but not counted"] = bar(one["lost_tokens"], at_most=0)
    bars["load, store beyond its budget: tokens lost but not counted"] = bar(filled["lost_tokens"], at_most=0)
    bars["load, store beyond its budget: memory by budget"] = bar(
        filled["kept"]["bytes"] / (filled["budget_gib"] * GIB), at_most=1.0
    )
    since = max(1, killed["tokens_since_snapshot"])
    bars["load, a killed shard: lost tokens by those since its snapshot"] = bar(
        killed["lost_tokens"] / since, at_most=1.02
    )
    bars["load, a killed shard: lost tokens of the others"] = bar(killed["lost_tokens_of_others"], at_most=0)
    bars["load, a killed shard: seconds until it answers"] = bar(killed["seconds_to_answer"], at_most=30.0)
    return bars


def sizing_of(job: LoadedJob, steps: Sequence[dict[str, Any]]) -> list[dict[str, float]]:
    """Return, per size of the store, the replicas that keep the router and a shard busy for half a core each."""
    rows = []
    for one in steps:
        cpu_us = one["cpu_us_per_answer"]
        router, shard = (BUSY * 1e6 / cpu_us[name] for name in ("router", "busiest shard"))  # answers per second
        per_replica = job.answers_per_s / job.replicas
        rows.append(
            {
                "shards": one["shards"],
                "router_us_per_answer": cpu_us["router"],
                "shard_us_per_answer": cpu_us["busiest shard"],
                "router_replicas": router / per_replica,
                "shard_replicas": shard / per_replica,
                "shard_tokens_per_s": shard * job.mean_tokens / one["shards"],
            }
        )
    return rows


def calls_table(title: str, rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(title=title)
    for heading in ("phase", "call", "calls", "per second", "p50 ms", "p99 ms", "max ms"):
        table.add_column(heading, justify="left" if heading in ("phase", "call") else "right")
    for row in rows:
        shown = (f"{row[name]:,.1f}" for name in ("per_s", "p50_ms", "p99_ms", "max_ms"))
        table.add_row(row["phase"], row["call"], f"{row['calls']:,}", *shown)
    return table


def show_step(job: LoadedJob, one: dict[str, Any]) -> None:
    console.print(
        calls_table(f"{job.replicas:,} replicas, {job.workers} workers, {one['shards']} shard(s)", one["calls"])
    )
    cpu = ", ".join(f"{name} {us:,.0f} us" for name, us in one["cpu_us_per_answer"].items())
    memory = max(gib for name, gib in one["memory_gib"].items() if name != "router")
    console.print(
        f"{one['mean_answers_per_s']:,.0f} answers/s, {one['fetched_bytes_per_s'] / 1e6:,.0f} MB/s fetched, submit "
        f"{one['submit_ms']:,.0f} ms; CPU per answer: {cpu}; router {one['memory_gib']['router']:.2f} GiB, "
        f"largest shard {memory:.2f} GiB; {one['lost_tokens']:,} tokens lost, {one['dropped_tokens']:,} dropped"
    )


def main(
    quick: Annotated[bool, typer.Option("--quick", help="A job of 16 replicas and short answers (~1 minute).")] = False,
    replicas: Annotated[int, typer.Option(min=2, help="Number of replicas.")] = 1024,
    prompts: Annotated[int, typer.Option(min=1, help="Number of prompts beyond the budget.")] = 300_000,
    budget_gib: Annotated[float, typer.Option(help="The store's budget for them, in GiB.")] = 4.0,
    result: Annotated[Path, typer.Option(help="Path of the result file.")] = RESULTS / "load.json",
) -> None:
    """Measure the router and the store under load (~10 minutes on two cores), and print which bars hold."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that `timeout` also ends the actors
    job = LoadedJob(replicas=16, mean_tokens=150) if quick else LoadedJob(replicas=replicas)
    prompts, budget_gib = (2000, 0.004) if quick else (prompts, budget_gib)
    console.print("[1/4] the scheduler alone, 4,096 replicas")
    decisions = decision_microseconds(64 if quick else 4096, 64 if quick else 16384)
    ray.init(
        num_cpus=CPUS, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR,
        object_store_memory=OBJECT_STORE_GIB * GIB,
    )  # fmt: skip
    try:
        steps = []
        for shards in SHARDS:
            console.print(f"[2/4] a step of {job.prompts:,} prompts, a store of {shards} shard(s)")
            steps.append(play_step(job, shards, 4.0))
            show_step(job, steps[-1])
        console.print("[3/4] a killed shard")
        killed = kill_shard(job, 4.0)
        console.print(f"[4/4] {prompts:,} prompts for a budget of {budget_gib:g} GiB")
        filled = fill_store(job, prompts, budget_gib)
        console.print(calls_table("store beyond its budget", filled["calls"]))
    finally:
        ray.shutdown()
    bars = bars_of(steps, killed, filled)
    console.print(bars_table(bars))
    load = {**asdict(job), "prompts": job.prompts, "workers": job.workers, "answers_per_s": job.answers_per_s}
    content = {"load": load, "decisions": decisions, "sizing": sizing_of(job, steps), "steps": steps}
    write_result(result, {**content, "killed": killed, "filled": filled, "bars": bars})


if __name__ == "__main__":
    typer.run(main)
