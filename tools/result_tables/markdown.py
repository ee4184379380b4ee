"""What all tables of results have in common: rows, and the caption that says when and where a result was measured."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[2] / "benchmarks/results"
NAMES = {
    "rhyme": "rhyme",
    "suffix": "vLLM's `suffix`",
    "suffix-best": "vLLM's `suffix`, tuned at 16",
    "suffix-best-256": "vLLM's `suffix`, tuned at 256",
    "ngram": "vLLM's `ngram`",
}


def result_of(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def head(*cells: str) -> list[str]:
    return [row_of(*cells), row_of(*["---"] * len(cells))]


def fastest_suffix(summary: dict[str, Any], running: str) -> float:
    """Return the tokens/s of the fastest settings of vLLM's `suffix` at this concurrency, relative to stock."""
    peers = (by_running for method, by_running in summary.items() if method.startswith("suffix"))
    return max(by_running[running]["ratio"]["median"] for by_running in peers)


def row_of(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def with_machine(lines: list[str], result: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {result['versions'][name]}" for name in ("verl", "vllm", "torch"))
    accelerator = result["accelerator"] or "no accelerator"
    runs = result["runs"] if isinstance(result.get("runs"), list) else []
    processors = " and ".join(sorted({run.get("processor", result["processor"]) for run in (*runs, result)}))
    machine = f"{processors}, {result['cpu_cores']} cores, {accelerator}; {versions}; {result['date']}"
    return "\n".join([*lines, "", f"{machine}; commit: {commits(result)}."])


def commits(result: dict[str, Any]) -> str:
    """Return the commit of a result, or those of its runs with their numbers if these have their own."""
    runs = result.get("runs")
    found = Counter(run["commit"] for run in runs if "commit" in run) if isinstance(runs, list) else Counter()
    if not found:
        return f"`{result['commit']}`"
    return ", ".join(f"`{name}` ({num} run{'s' if num > 1 else ''})" for name, num in found.items())
