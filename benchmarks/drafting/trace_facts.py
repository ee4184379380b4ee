"""Statistics of recorded traces: lengths, rewards, distinct siblings, and the acceptance of a perfect draft model.

Prints Markdown tables for traces/README.md: one of whole traces, one of their epochs. With --check, compares the traces
with the bars of the property that each was recorded for, and writes results/traces.json.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks.common.result_files import RESULTS, bar, bars_table, console, write_result
from benchmarks.drafting.drafters import group_by_prompt
from benchmarks.drafting.oracle import greedy_ceiling
from benchmarks.drafting.replay import TraceStep, load_trace, named_traces

CHECKED = ("longtail", "gsm8k", "gsm8k-noisy")
HEADINGS = (
    "answers", "tokens", "length p50", "p99", "max", "p99/p50", "mean reward", "distinct siblings", "greedy ceiling"
)  # fmt: skip

Facts = dict[str, Any]


def main(
    traces: Annotated[
        list[Path] | None, typer.Argument(help="Parquet files or folders of them. Default: all in benchmarks/traces.")
    ] = None,
    check: Annotated[bool, typer.Option(help="Compare the traces with their bars and write the result.")] = False,
    result: Annotated[Path, typer.Option(help="Path of the result file of --check.")] = RESULTS / "traces.json",
) -> None:
    """Print the statistics of traces."""
    try:
        facts = {name: facts_of_trace(path) for name, path in named_traces(traces or []).items()}
        bars = bars_of(facts) if check else {}
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    # Plain text, because Markdown must not be wrapped or coloured.
    typer.echo("\n".join([*trace_lines(facts), "", *epoch_lines(facts), ""]))
    for name, one in facts.items():
        typer.echo(f"{one['sha256'] or 'a folder'}  {name}")
    if check:
        missing = [name for name in CHECKED if name not in facts]
        if missing:
            typer.echo(f"not checked, because the trace is missing: {', '.join(missing)}")
        console.print(bars_table(bars))
        write_result(result, {"bars": bars, "traces": facts})


def facts_of_trace(path: Path) -> Facts:
    """Return the statistics of a trace, and of each epoch under `by_epoch`.

    Raises:
        ValueError: the trace cannot be read (see `load_trace`).
    """
    steps = load_trace(path)
    epochs = sorted({step.epoch for step in steps})
    return {
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None,
        **facts_of(steps),
        "by_epoch": {str(epoch): facts_of([step for step in steps if step.epoch == epoch]) for epoch in epochs},
    }


def facts_of(steps: Sequence[TraceStep]) -> Facts:
    """Return the statistics of these steps, with None for what was not recorded."""
    answers = [answer for step in steps for answer in step.answers]
    lengths = np.array([len(answer.tokens) for answer in answers])
    rewards = np.array([answer.reward for answer in answers if not np.isnan(answer.reward)])
    p50, p99 = np.percentile(lengths, (50, 99))
    return {
        "answers": len(answers),
        "tokens": int(lengths.sum()),
        "length_p50": float(p50),
        "length_p99": float(p99),
        "length_max": int(lengths.max()),
        "p99_by_p50": float(p99 / p50),
        "reward": float(rewards.mean()) if len(rewards) else None,
        "distinct_siblings": distinct_siblings(steps),
        "greedy_ceiling": greedy_ceiling(steps),
    }


def distinct_siblings(steps: Sequence[TraceStep]) -> float:
    """Return the share of distinct answers among those to a prompt in a step, averaged over prompts and steps."""
    shares = [
        len({answer.tokens.tobytes() for answer in group}) / len(group)
        for step in steps
        for group in group_by_prompt(step).values()
    ]
    return float(np.mean(shares))


def bars_of(facts: dict[str, Facts]) -> dict[str, dict[str, Any]]:
    """Return the bars of the traces that have some.

    Raises:
        ValueError: a trace lacks a value that its bars need.
    """
    bars = {}
    if longtail := facts.get("longtail"):
        rewards = [_known("longtail", one, "reward") for one in longtail["by_epoch"].values()]
        bars["longtail: p99 / median length"] = bar(longtail["p99_by_p50"], at_least=8.0)
        bars["longtail: mean reward, last epoch - first"] = bar(rewards[-1] - rewards[0], at_least=0.05)
    if gsm8k := facts.get("gsm8k"):
        least = min(one["distinct_siblings"] for one in gsm8k["by_epoch"].values())
        bars["gsm8k: greedy ceiling"] = _within(_known("gsm8k", gsm8k, "greedy_ceiling"), 4.0, 8.0)
        bars["gsm8k: distinct siblings, least epoch"] = bar(least, at_least=0.9)
    if noisy := facts.get("gsm8k-noisy"):
        bars["gsm8k-noisy: greedy ceiling"] = _within(_known("gsm8k-noisy", noisy, "greedy_ceiling"), 1.8, 2.5)
    return bars


def _known(name: str, facts: Facts, fact: str) -> float:
    if facts[fact] is None:
        raise ValueError(f"{name}: its {fact} cannot be checked, because it was not recorded")
    return facts[fact]


def _within(measured: float, low: float, high: float) -> dict[str, Any]:
    return {"measured": measured, "target": f"{low:g} to {high:g}", "holds": low <= measured <= high}


def trace_lines(facts: dict[str, Facts]) -> list[str]:
    """Return a Markdown table of the whole traces."""
    lines = _head("trace", "epochs", *HEADINGS)
    lines += [_row(f"`{name}`", str(len(one["by_epoch"])), *_cells(one)) for name, one in facts.items()]
    return lines


def epoch_lines(facts: dict[str, Facts]) -> list[str]:
    """Return a Markdown table of the traces' epochs."""
    lines = _head("trace", "epoch", *HEADINGS)
    for name, one in facts.items():
        lines += [_row(f"`{name}`", epoch, *_cells(part)) for epoch, part in one["by_epoch"].items()]
    return lines


def _cells(facts: Facts) -> list[str]:
    reward, ceiling = facts["reward"], facts["greedy_ceiling"]
    return [
        f"{facts['answers']:,}",
        f"{facts['tokens']:,}",
        f"{facts['length_p50']:,.0f}",
        f"{facts['length_p99']:,.0f}",
        f"{facts['length_max']:,}",
        f"{facts['p99_by_p50']:.1f}",
        "" if reward is None else f"{reward:.3f}",
        f"{facts['distinct_siblings']:.1%}",
        "" if ceiling is None else f"{ceiling:.2f}",
    ]


def _head(*cells: str) -> list[str]:
    return [_row(*cells), _row(*["---"] * len(cells))]


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    typer.run(main)
