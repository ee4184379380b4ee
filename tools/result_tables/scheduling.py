"""Tables of simulated clusters."""

from __future__ import annotations

import statistics
from typing import Any

from tools.result_tables.markdown import RESULTS, head, result_of, row_of, with_machine

TIERS = {
    "sync, verl": "verl's `sync`",
    "pipelined, two-tier": "the paper's order",
    "colocate async, histopipe, max_age 1": "units, `max_age` 1",
    "colocate async, histopipe, max_age 2": "units, `max_age` 2",
    "colocate async, histopipe, max_age 3": "units, `max_age` 3",
    "colocate async, verl": "verl's `colocate_async`",
}


def tiers() -> str:
    """Batches of several steps that are generated together, on the simulated cluster of bench-pipe."""
    result = result_of("pipe")
    relative = "relative to `sync`"
    lines = head("", "steps per hour", relative, "with drafts", relative, "age", "mixed answers")
    rows = [row for row in result["rows"] if row["factor"] == "base"]

    def speed(case: str, drafted: bool) -> float:
        return statistics.median(
            row["steps_per_hour"] for row in rows if (row["case"], row["drafted"]) == (case, drafted)
        )

    for case, name in TIERS.items():
        of_case = [row for row in rows if row["case"] == case and not row["drafted"]]
        cells = [name]
        for drafted in (False, True):
            cells += [f"{speed(case, drafted):.1f}", f"{speed(case, drafted) / speed('sync, verl', drafted):.2f}"]
        ages, mixed = max(row["age_max"] for row in of_case), statistics.median(row["mixed"] for row in of_case)
        lines.append(row_of(*cells, f"up to {ages}", f"{mixed:.1%}"))
    return with_machine(lines, result)


def simulated() -> str:
    """The base scenario of bench-pipe: trainer modes and schedulers on a simulated cluster, in the steady state."""
    result = result_of("pipe")
    played = [row for row in result["rows"] if row["factor"] == "base"]
    lines = head(
        "trainer mode, scheduler", "steps per hour", "with drafts", "of the lower bound", "bubble",
        "age, mean and maximum", "mixed answers",
    )  # fmt: skip
    for case in dict.fromkeys(row["case"] for row in played):
        plain, drafted = (
            [row for row in played if row["case"] == case and row["drafted"] is value] for value in (False, True)
        )

        def median(name: str, rows: list[dict[str, Any]] = plain) -> float:
            return statistics.median(row[name] for row in rows)

        bound = median("of_bound")
        lines.append(
            row_of(
                f"{case} (the paper's order)" if "two-tier" in case else case,
                f"{median('steps_per_hour'):.1f}",
                f"{median('steps_per_hour', drafted):.1f}",
                "none known" if bound != bound else f"{bound:.0%}",
                f"{median('bubble'):.0%}",
                f"{median('age_mean'):.2f}, {max(row['age_max'] for row in plain)}",
                f"{median('mixed'):.1%}",
            )
        )
    return with_machine(lines, result)


def recomputes() -> str:
    """Steps per hour relative to verl's colocate_async, by the cost of recomputing a prefix token."""
    result = result_of("pipe")
    rows = [row for row in result["rows"] if row["factor"] in ("base", "recompute")]
    stock = "colocate async, verl"
    costs = sorted({row["recompute_us"] for row in rows})
    lines = head("HistoPipe", *(f"{cost:g} us{what}" for what in ("", ", drafts") for cost in costs))
    for case in dict.fromkeys(row["case"] for row in rows if row["factor"] == "recompute" and row["case"] != stock):
        cells = []
        for drafted in (False, True):
            for cost in costs:
                by_case = {
                    name: statistics.median(
                        row["steps_per_hour"]
                        for row in rows
                        if (row["case"], row["recompute_us"], row["drafted"]) == (name, cost, drafted)
                    )
                    for name in (case, stock)
                }
                cells.append(f"{by_case[case] / by_case[stock]:.2f}")
        lines.append(row_of(case.rpartition(", ")[2], *cells))
    return with_machine(lines, result)


def worst_seeds() -> str:
    """The smallest ratio over the seeds of HistoPipe's steps per hour to those of verl's colocate_async."""
    result = result_of("pipe")
    bars, costs = result["bars"], (50, 10)
    lines = head("HistoPipe", *(f"{cost} us{what}" for what in ("", ", drafts") for cost in costs))
    for age in (2, 3):
        names = (
            f"max_age {age}, {drafts}, recompute {cost} us: steps/h / colocate_async"
            for drafts in ("undrafted", "drafted")
            for cost in costs
        )
        lines.append(row_of(f"max_age {age}", *(f"{bars[name]['measured']:.2f}" for name in names)))
    return with_machine(lines, result)


def load() -> str:
    """What an actor of the router or the store carries with half a core."""
    if not (RESULTS / "load.json").is_file():
        return "Not measured yet."
    result = result_of("load")
    lines = head(
        "driven with",
        "router: µs per answer",
        "replicas",
        "shard: µs per answer",
        "replicas per shard",
        "tokens/s per shard",
    )
    for row in result["sizing"]:
        names = (
            "router_us_per_answer",
            "router_replicas",
            "shard_us_per_answer",
            "shard_replicas",
            "shard_tokens_per_s",
        )
        shards = "1 shard" if row["shards"] == 1 else f"one of {row['shards']} shards"
        lines.append(row_of(f"{row['replicas']:,} replicas, {shards}", *(f"{row[name]:,.0f}" for name in names)))
    return with_machine(lines, result)
