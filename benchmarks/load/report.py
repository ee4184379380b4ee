"""The tables of the load test, and what its numbers say about the size of a job."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from benchmarks.common.result_files import console

BUSY = 0.5  # share of a core that an actor of the sizing table uses


def calls_table(title: str, rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(title=title)
    for heading in ("phase", "call", "calls", "per second", "p50 ms", "p99 ms", "max ms"):
        table.add_column(heading, justify="left" if heading in ("phase", "call") else "right")
    for row in rows:
        shown = (f"{row[name]:,.1f}" for name in ("per_s", "p50_ms", "p99_ms", "max_ms"))
        table.add_row(row["phase"], row["call"], f"{row['calls']:,}", *shown)
    return table


def show_step(one: dict[str, Any]) -> None:
    """Print what a step measured."""
    title = f"{one['replicas']:,} replicas, {one['workers']} workers, one of {one['shards']} shards"
    console.print(calls_table(title, one["calls"]))
    console.print(
        f"peak {one['peak_answers_per_s']:,.0f} of {one['load_answers_per_s']:,.0f} answers/s; submit "
        f"{one['submit_ms']:,.0f} ms; the shard sent {one['shard_fetched_bytes_per_s'] / 1e6:,.1f} MB/s; processor "
        f"time per answer: router {one['router_us_per_answer']:,.0f} us, shard {one['shard_us_per_answer']:,.0f} us; "
        f"router {one['memory_gib']['router']:.2f} GiB, shard {one['memory_gib']['shard 0']:.2f} GiB; "
        f"{one['lost_tokens']:,} tokens lost, {one['dropped_tokens']:,} dropped"
    )


def sizing_of(one: dict[str, Any], mean_tokens: int) -> dict[str, float]:
    """Return the load with which the router, or a shard of the store, uses half a core."""
    router, shard = (BUSY * 1e6 / one[f"{name}_us_per_answer"] for name in ("router", "shard"))  # answers per second
    per_replica = one["load_answers_per_s"] / one["replicas"]
    return {
        "replicas": one["replicas"],
        "shards": one["shards"],
        "router_us_per_answer": one["router_us_per_answer"],
        "router_replicas": router / per_replica,
        "shard_us_per_answer": one["shard_us_per_answer"],
        "shard_replicas": shard / per_replica,
        "shard_tokens_per_s": shard * mean_tokens,
    }


def sizing_table(rows: Sequence[dict[str, float]]) -> Table:
    table = Table(title="half a core of each actor")
    for heading in ("driven with", "router: us per answer", "replicas", "shard: us per answer", "replicas", "tokens/s"):
        table.add_column(heading, justify="right")
    for row in rows:
        names = (
            "router_us_per_answer",
            "router_replicas",
            "shard_us_per_answer",
            "shard_replicas",
            "shard_tokens_per_s",
        )
        driven = f"{row['replicas']:,} replicas, {row['shards']} shards"
        table.add_row(driven, *(f"{row[name]:,.0f}" for name in names))
    return table
