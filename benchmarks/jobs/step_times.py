"""Checks the interpolation of published step times by leaving out measured cells and predicting them from the others.

Left out is either one cell (a context and a total of tokens, with all its batch sizes), which tests the interpolation
along the context and has bars; or one total at all contexts, which tests the interpolation along tokens.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from benchmarks.common.result_files import RESULTS, bar, bars_table, console, write_result
from rhyme_verl.sim.step_times import MODELS, PublishedStepTime

MEDIAN_BAR, WORST_BAR = 0.10, 0.20
SHOWN_CONTEXT = 512
SHOWN_ROWS = (1, 4, 16, 64)
SHOWN_TOKENS = (4, 16, 64, 128, 129, 192, 256, 257, 512, 513, 1024)

Row = dict[str, Any]


def main(result: Annotated[Path, typer.Option(help="Path of the result file.")] = RESULTS / "step_times.json") -> None:
    """Leave out measured step times, interpolate them, and print which bars hold."""
    cells = {model: cell_errors(model) for model in MODELS}
    totals = {model: total_errors(model) for model in MODELS}
    every = [row["error"] for rows in cells.values() for row in rows]
    bars = {
        "one cell left out: median relative error": bar(statistics.median(every), at_most=MEDIAN_BAR),
        "one cell left out: worst relative error": bar(max(every), at_most=WORST_BAR),
    }
    console.print(values_table())
    console.print(errors_table({"one cell": cells, "a total at all contexts": totals}))
    console.print(bars_table(bars))
    write_result(
        result,
        {
            "summary": {"cells": _summaries(cells), "totals": _summaries(totals)},
            "cells": cells,
            "totals": totals,
            "bars": bars,
        },
    )


def cell_errors(model: str) -> list[Row]:
    """Leave out each (context, total tokens) except the smallest and largest totals; return one row per cell."""
    return [row for cell in _inner_cells(model) for row in _errors(model, [cell])]


def total_errors(model: str) -> list[Row]:
    """Leave out each total except the smallest and largest at all contexts; return one row per context and total."""
    cells = _inner_cells(model)
    totals = sorted({total for _, total in cells})
    return [row for total in totals for row in _errors(model, [cell for cell in cells if cell[1] == total])]


def _inner_cells(model: str) -> list[tuple[int, int]]:
    cells = PublishedStepTime(model).verified
    totals = [total for _, total in cells]
    return [cell for cell in cells if min(totals) < cell[1] < max(totals)]


def _errors(model: str, left_out: Collection[tuple[int, int]]) -> list[Row]:
    """Return per cell the measured time and the one interpolated without it, in ms, and the relative error."""
    measured, without = PublishedStepTime(model).verified, PublishedStepTime(model, leave_out=left_out)
    rows = []
    for context, total in left_out:
        ms, interpolated = 1e3 * measured[context, total], 1e3 * without.seconds(1, total, context)
        error = abs(interpolated / ms - 1.0)
        rows.append(
            {
                "context": context,
                "tokens": total,
                "measured_ms": round(ms, 3),
                "interpolated_ms": round(interpolated, 3),
                "error": round(error, 4),
            }
        )
    return rows


def _summaries(errors: dict[str, list[Row]]) -> dict[str, Row]:
    return {model: _summary(rows) for model, rows in errors.items()}


def _summary(rows: list[Row]) -> Row:
    worst = max(rows, key=lambda row: row["error"])
    return {"count": len(rows), "median": statistics.median(row["error"] for row in rows), "worst": worst}


def errors_table(kinds: dict[str, dict[str, list[Row]]]) -> Table:
    """Return the median and worst errors by kind of cell and by model."""
    table = Table(title="relative errors of interpolated step times")
    for heading in ("left out", "model", "cells", "median", "worst", "at context", "at tokens"):
        table.add_column(heading, justify="left" if heading in ("left out", "model") else "right")
    for kind, by_model in kinds.items():
        for model, rows in by_model.items():
            found, worst = _summary(rows), _summary(rows)["worst"]
            shares = f"{found['median']:.1%}", f"{worst['error']:.1%}"
            table.add_row(kind, model, str(found["count"]), *shares, str(worst["context"]), str(worst["tokens"]))
    return table


def values_table() -> Table:
    """Return a table of step times at one context: undrafted by rows, drafted by total tokens."""
    table = Table(title=f"ms of a step at {SHOWN_CONTEXT} tokens of context")
    for heading in ("step", *MODELS):
        table.add_column(heading, justify="left" if heading == "step" else "right")
    times = [PublishedStepTime(model) for model in MODELS]
    for rows in SHOWN_ROWS:
        cells = (f"{1e3 * one.seconds(rows, rows, SHOWN_CONTEXT):.1f}" for one in times)
        table.add_row(f"undrafted, {rows} rows" if rows > 1 else "undrafted, 1 row", *cells)
    for tokens in SHOWN_TOKENS:
        cells = (f"{1e3 * one.seconds(1, tokens, SHOWN_CONTEXT):.1f}" for one in times)
        table.add_row(f"drafted, {tokens} tokens", *cells)
    return table


if __name__ == "__main__":
    typer.run(main)
