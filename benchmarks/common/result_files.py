"""Result files, acceptance bars, and statistics of repeated measurements."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.common.machine import describe

RESULTS = Path(__file__).parents[1] / "results"

console = Console(soft_wrap=True, width=None if sys.stdout.isatty() else 150)  # tables are wide, in a log as well


def bar(measured: float, *, at_least: float | None = None, at_most: float | None = None) -> dict[str, Any]:
    """Return one entry of `bars`: the measured value, its target, and whether the target is met."""
    if at_least is not None:
        return {"measured": measured, "target": f">= {at_least:g}", "holds": measured >= at_least}
    assert at_most is not None
    return {"measured": measured, "target": f"<= {at_most:g}", "holds": measured <= at_most}


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Return the median, minimum and maximum of repeated measurements, and the measurements themselves."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "runs": list(values)}


def write_result(path: Path, content: dict[str, Any]) -> None:
    """Write a result file and add the versions and the machine."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**describe(), **content}, indent=1) + "\n", encoding="utf-8")
    console.print(f"wrote {path}")


def bars_table(bars: dict[str, dict[str, Any]]) -> Table:
    table = Table(title="bars")
    for heading in ("bar", "measured", "target", "holds"):
        table.add_column(heading, justify="left" if heading == "bar" else "right")
    for name, entry in bars.items():
        holds = "[green]yes[/]" if entry["holds"] else "[red]no[/]"
        table.add_row(name, f"{entry['measured']:,.4g}", entry["target"], holds)
    return table
