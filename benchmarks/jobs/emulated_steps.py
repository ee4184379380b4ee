"""Checks that emulated engines take the published time: measures their steps from outside and compares with the table.

Engines, loads and measurement are those of engines/step_cost.py, with the emulated clock. Drafts have fixed lengths and
are never accepted, so the size of every step is known.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.table import Table

from benchmarks.common.result_files import RESULTS, bar, bars_table, console, spread, write_result
from benchmarks.engines.device_time import DeviceTime
from benchmarks.engines.process import EngineSettings, start_all
from benchmarks.engines.step_cost import FIXED_DRAFTER, PROMPT_TOKENS, UNWRITTEN_TOKEN, step_seconds
from benchmarks.jobs.emulated_clock import LABEL

ROWS = (1, 16, 64)
DRAFT_TOKENS = (0, 3, 7)
MOST_OFF = 0.03


def main(
    policy: Annotated[str, typer.Option(help="Path of the policy that the engine runs.")] = (
        "examples/quickstart/policy"
    ),
    model: Annotated[str, typer.Option(help="Model whose published step times are emulated.")] = "qwen2.5-7b",
    dilation: Annotated[float, typer.Option(min=0.1, help="Real seconds per emulated second.")] = 5.0,
    repeats: Annotated[int, typer.Option(min=1, help="Runs per point, interleaved.")] = 3,
    steps: Annotated[int, typer.Option(min=16, help="Measured engine steps per run.")] = 48,
    vocabulary: Annotated[int, typer.Option(help="Prompts are random tokens below this id.")] = 170,
    result: Annotated[Path, typer.Option(help="Path of the result file.")] = RESULTS / "emulated_steps.json",
) -> None:
    """Measure emulated steps and compare them with the table."""
    table = DeviceTime(model)
    plain = EngineSettings(model=policy, max_model_len=PROMPT_TOKENS + steps * 2, emulated_model=model)
    fixed = {"method": "custom_class", "model": FIXED_DRAFTER, "num_speculative_tokens": max(DRAFT_TOKENS)}
    points = [("plain", rows, 0) for rows in ROWS]
    points += [("speculating", rows, drafted) for rows in ROWS for drafted in DRAFT_TOKENS]
    measured: dict[tuple[str, int, int], list[float]] = {point: [] for point in points}
    prompts = np.random.default_rng(0).integers(3, vocabulary, size=(max(ROWS), PROMPT_TOKENS)).tolist()
    stack, engines = start_all({"plain": plain, "speculating": replace(plain, speculative=fixed)})
    with stack:
        for repeat in range(repeats + 1):
            console.print(f"repeat {repeat}/{repeats}" if repeat else "warming up ...")
            for name, rows, drafted in points if repeat % 2 else reversed(points):
                if name == "speculating":
                    engines[name].worker("bench_draft", drafted, UNWRITTEN_TOKEN)
                seconds = step_seconds(engines[name], prompts[:rows], steps, dilation)
                if repeat:  # the first round warms up
                    measured[name, rows, drafted].append(1e3 * seconds)
    bars, found = {}, []
    for (name, rows, drafted), milliseconds in measured.items():
        published = 1e3 * table.seconds(rows, rows * (1 + drafted), PROMPT_TOKENS + 8 + steps / 2)
        one = spread(milliseconds)
        found.append({"engine": name, "rows": rows, "draft_tokens": drafted, "ms": one, "published_ms": published})
        off = abs(one["median"] / published - 1)
        bars[f"{name}, {rows} rows, {drafted} drafted: off the published time by"] = bar(off, at_most=MOST_OFF)
    console.print(table_of(found))
    console.print(bars_table(bars))
    content: dict[str, Any] = {"label": f"{LABEL} ({model})", "dilation": dilation, "bars": bars, "points": found}
    write_result(result, content)


def table_of(found: list[dict[str, Any]]) -> Table:
    result = Table(title="ms of an emulated step")
    for heading in ("engine", "rows", "drafted per row", "measured", "published"):
        result.add_column(heading, justify="right")
    for one in found:
        cells = (one["engine"], str(one["rows"]), str(one["draft_tokens"]))
        result.add_row(*cells, f"{one['ms']['median']:.2f}", f"{one['published_ms']:.2f}")
    return result


if __name__ == "__main__":
    typer.run(main)
