"""Drives the real router and the real store with the load of a large job. Run by `make bench-load`.

The load is that of a 7B policy on up to 1,024 replicas with full lanes (`job.py`; docs/tuning.md derives it). The
router carries all of it. Of the store, one shard is driven, with its share of the prompts and calls from all replicas.
Every call is recorded where it is made. The bars are on those of `Probe`, whose process does nothing else: the played
replicas share two processes here, so that their own calls also wait for each other (`lag`: how late their event loops
are).
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import ray
import typer

from benchmarks.common.result_files import RESULTS, bar, bars_table, console, write_result
from benchmarks.load.calls import by_phase
from benchmarks.load.control_plane import ControlPlane, spent
from benchmarks.load.job import SAMPLES, LoadedJob
from benchmarks.load.report import calls_table, show_step, sizing_of, sizing_table
from benchmarks.scheduling.router_speed import decision_microseconds
from rhyme_verl.config import GIB, HistoryConfig

SIZES = ((64, 1), (1024, 8), (1024, 16))  # replicas, shards of the store
KILL_SIZE = (64, 2)
BUDGET_GIB = 1.0  # enough for a shard's share of a step
REST_SECONDS = 4.0
STORM_SECONDS = 8.0  # from the submission of a step
PEAK_SECONDS = 5.0
KILL_AFTER_SECONDS = 10.0
LONGEST_MS = 250.0
TICK_SECONDS = 1.0 / os.sysconf("SC_CLK_TCK")  # the least processor time that can be told from none
OBJECT_STORE_GIB = 2
CPUS = 8  # slots of Ray, whose actors here take none


def play_step(job: LoadedJob, shards: int) -> dict[str, Any]:
    """Play one step of a job whose history has one epoch, from its submission to the snapshot after it."""
    with tempfile.TemporaryDirectory() as folder:
        settings = HistoryConfig(budget_gib=BUDGET_GIB * shards, shards=shards, snapshot_dir=folder)
        with ControlPlane(job, settings) as plane:
            plane.fill(1, job.prompts)
            groups = plane.prepare(2)
            plane.take()
            before, began = plane.usage(), time.time()
            time.sleep(REST_SECONDS)
            rested, submitted = plane.usage(), time.time()
            submit_s = plane.submit(groups)
            played = ray.get(plane.play())
            ended, after = time.time(), plane.usage()
            plane.end_step(2)
            saved = time.time()
            calls, sent, ends = plane.take()
            (kept,) = plane.counters()
            memory = {name: one["gib"] for name, one in plane.usage().items()}
    storm_ended = min(submitted + STORM_SECONDS, ended)
    phases = {
        "rest": (began, submitted),
        "storm": (submitted, storm_ended),
        "flow": (storm_ended, ended),
        "end": (ended, saved),
    }
    in_window = np.searchsorted(ends, ends + PEAK_SECONDS) - np.arange(len(ends))
    answers = job.prompts * SAMPLES
    of_shard = answers * kept.prompts / job.prompts
    idle_s, cpu_s, scale = spent(before, rested), spent(rested, after), (ended - submitted) / (submitted - began)
    # What the probe costs is no part of it.
    cpu_s = {name: max(TICK_SECONDS, seconds - idle_s[name] * scale) for name, seconds in cpu_s.items()}
    return {
        "replicas": job.replicas,
        "workers": job.workers,
        "prompts": job.prompts,
        "shards": shards,
        "answers": answers,
        "seconds": ended - submitted,
        "load_answers_per_s": job.answers_per_s,
        "peak_answers_per_s": float(in_window.max()) / PEAK_SECONDS,
        "submit_ms": 1e3 * submit_s,
        "shard_share": kept.prompts / job.prompts,
        "shard_fetched_bytes_per_s": sum(one["fetched_bytes"] for one in played) / (ended - submitted),
        "unanswered_prompts": sum(one["unanswered_prompts"] for one in played),
        "router_us_per_answer": 1e6 * cpu_s["router"] / answers,
        "shard_us_per_answer": 1e6 * cpu_s["shard 0"] / of_shard,
        "memory_gib": memory,
        "sent_tokens": sent.total(),
        "dropped_tokens": kept.evicted_tokens,
        "lost_tokens": sent.total() - kept.tokens - kept.evicted_tokens,
        "calls": by_phase(calls, phases),
    }


def kill_shard(job: LoadedJob, shards: int) -> dict[str, Any]:
    """Kill the store's first shard while answers end, some time after its snapshot."""
    with tempfile.TemporaryDirectory() as folder:
        settings = HistoryConfig(budget_gib=BUDGET_GIB * shards, shards=shards, snapshot_dir=folder)
        with ControlPlane(job, settings, num_driven=shards) as plane:
            plane.fill(1, job.prompts)
            plane.end_step(1)
            saved = plane.counters()[0].tokens
            plane.submit(plane.prepare(2))
            playing = plane.play()
            time.sleep(KILL_AFTER_SECONDS)
            killed = plane.kill_shard(0)
            played = ray.get(playing)
            _, sent, _ = plane.take()
            kept = plane.counters()
    return {
        "replicas": job.replicas,
        "shards": shards,
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
        calls, sent, _ = plane.take()
        (kept,) = plane.counters()
    answers = num_prompts * SAMPLES
    return {
        "prompts": num_prompts,
        "budget_gib": budget_gib,
        "answers_per_s": answers / (ended - began),
        "bytes_per_s": 4 * sent.total() / (ended - began),
        "shard_us_per_answer": 1e6 * spent(before, after)["shard 0"] / answers,
        "memory_gib": after["shard 0"]["gib"],
        "bytes_per_token": kept.bytes / kept.tokens,
        "kept": kept._asdict(),
        "sent_tokens": sent.total(),
        "lost_tokens": sent.total() - kept.tokens - kept.evicted_tokens,
        "calls": by_phase(calls, {"fill": (began, ended)}),
    }


def bars_of(steps: Sequence[dict[str, Any]], killed: dict[str, Any], filled: dict[str, Any]) -> dict[str, Any]:
    """Return the bars of all parts."""
    bars = {}
    for one in steps:
        name = f"load, {one['replicas']:,} replicas, {one['shards']} shards" if one["shards"] > 1 else "load, 1 shard"
        probed = [row for row in one["calls"] if row["call"].startswith("probe: ") and row["call"] != "probe: lag"]
        fetches = [row for row in probed if row["call"] == "probe: fetch"]
        router = [one["submit_ms"], *(row["max_ms"] for row in probed if row not in fetches)]
        peak = one["peak_answers_per_s"] / one["load_answers_per_s"]
        bars[f"{name}: answers per second at the peak, by the load"] = bar(peak, at_least=0.9)
        bars[f"{name}: longest call of the router, ms"] = bar(max(router), at_most=LONGEST_MS)
        longest = max(row["max_ms"] for row in fetches)
        bars[f"{name}: longest fetch of a prompt's history, ms"] = bar(longest, at_most=LONGEST_MS)
        bars[f"{name}: tokens lost but not counted"] = bar(one["lost_tokens"], at_most=0)
    bars["load, store beyond its budget: tokens lost but not counted"] = bar(filled["lost_tokens"], at_most=0)
    used = filled["kept"]["bytes"] / (filled["budget_gib"] * GIB)
    bars["load, store beyond its budget: bytes by budget"] = bar(used, at_most=1.0)
    lost = killed["lost_tokens"] / max(1, killed["tokens_since_snapshot"])
    bars["load, a killed shard: lost tokens by those since its snapshot"] = bar(lost, at_most=1.02)
    bars["load, a killed shard: lost tokens of the others"] = bar(killed["lost_tokens_of_others"], at_most=0)
    bars["load, a killed shard: seconds until it answers"] = bar(killed["seconds_to_answer"], at_most=30.0)
    return bars


def main(
    quick: Annotated[bool, typer.Option("--quick", help="Few replicas and short answers, in about a minute.")] = False,
    prompts: Annotated[int, typer.Option(min=1, help="Number of prompts beyond the budget.")] = 300_000,
    budget_gib: Annotated[float, typer.Option(help="The store's budget for them, in GiB.")] = 4.0,
    result: Annotated[Path, typer.Option(help="Path of the result file.")] = RESULTS / "load.json",
) -> None:
    """Measure the router and the store under load (~10 minutes on two idle cores), and print which bars hold."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that `timeout` also ends the actors
    sizes, kill_size, mean_tokens = SIZES, KILL_SIZE, LoadedJob.mean_tokens
    if quick:
        sizes, kill_size, mean_tokens, prompts, budget_gib = ((4, 1), (8, 2)), (4, 2), 150, 1000, 0.002
    console.print("[1/4] the scheduler alone")
    decisions = decision_microseconds(*((64, 64) if quick else (4096, 16384)))
    ray.init(
        address="local",  # never a cluster that runs here
        num_cpus=CPUS,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        object_store_memory=OBJECT_STORE_GIB * GIB,
    )
    try:
        steps = []
        for replicas, shards in sizes:
            job = LoadedJob(replicas=replicas, mean_tokens=mean_tokens)
            console.print(f"[2/4] a step of {job.prompts:,} prompts: {replicas:,} replicas, one of {shards} shards")
            steps.append(play_step(job, shards))
            show_step(steps[-1])
        console.print("[3/4] a killed shard")
        killed = kill_shard(LoadedJob(replicas=kill_size[0], mean_tokens=mean_tokens), kill_size[1])
        console.print(f"[4/4] {prompts:,} prompts for a budget of {budget_gib:g} GiB")
        filled = fill_store(LoadedJob(replicas=sizes[0][0], mean_tokens=mean_tokens), prompts, budget_gib)
        console.print(calls_table("store beyond its budget", filled["calls"]))
    finally:
        ray.shutdown()
    bars = bars_of(steps, killed, filled)
    sizing = [sizing_of(one, mean_tokens) for one in steps]
    console.print(sizing_table(sizing))
    console.print(bars_table(bars))
    content = {"scheduler": decisions, "sizing": sizing, "steps": steps, "killed": killed, "filled": filled}
    write_result(result, {**content, "bars": bars})


if __name__ == "__main__":
    typer.run(main)
