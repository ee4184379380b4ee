"""Measures the cost of an engine step on this machine, by rows and by draft tokens per row.

Three kinds of steps run on a real vLLM engine: without speculation and with all of vLLM's defaults (`plain`), with a
drafter that proposes nothing (`undrafted`; vLLM then schedules synchronously), and with a draft in every row
(`drafted`). Drafts consist of a token that the policy never samples, so every step yields one token per row. The cost
of a step is the difference between a long and a short run, so the time of start and prefill cancels out.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.table import Table

from benchmarks.common.result_files import RESULTS, console, spread, write_result
from benchmarks.engines.process import Engine, EngineSettings, Load, start_all

ROWS = (1, 2, 4, 8, 16, 32, 64)
DRAFT_TOKENS = (1, 3, 7, 15, 23)
PROMPT_TOKENS = 64
UNWRITTEN_TOKEN = 0  # the quickstart policy's padding
FIXED_DRAFTER = "benchmarks.engines.fixed_drafter.FixedDrafter"
RESULT = RESULTS / "step_cost.json"


def main(
    model: Annotated[str, typer.Option(help="Path of the policy.")] = "examples/quickstart/policy",
    repeats: Annotated[int, typer.Option(min=1, help="Runs per point, interleaved.")] = 5,
    steps: Annotated[int, typer.Option(min=16, help="Measured engine steps per run.")] = 96,
    vocabulary: Annotated[int, typer.Option(help="Prompts are random tokens below this id.")] = 170,
    load_format: Annotated[str, typer.Option(help="vLLM's load_format; `dummy`: random weights.")] = "auto",
    gpu_memory_utilization: Annotated[float, typer.Option(help="Share of the GPU per engine; there are two.")] = 0.4,
    result: Annotated[Path, typer.Option(help="Path of the result file.")] = RESULT,
) -> None:
    """Measure the cost of engine steps."""
    arguments = {"load_format": load_format, "gpu_memory_utilization": gpu_memory_utilization}
    settings = EngineSettings(model=model, max_model_len=PROMPT_TOKENS + steps * 2, arguments=arguments)
    fixed = {"method": "custom_class", "model": FIXED_DRAFTER, "num_speculative_tokens": max(DRAFT_TOKENS)}
    speculating = replace(settings, speculative=fixed)
    points = [("plain", rows, 0) for rows in ROWS] + [
        ("speculating", rows, drafted) for rows, drafted in itertools.product(ROWS, (0, *DRAFT_TOKENS))
    ]
    seconds: dict[tuple[str, int, int], list[float]] = {point: [] for point in points}
    prompts = np.random.default_rng(0).integers(3, vocabulary, size=(max(ROWS), PROMPT_TOKENS)).tolist()
    stack, engines = start_all({"plain": settings, "speculating": speculating})
    with stack:
        for repeat in range(repeats + 1):
            for name, rows, drafted in points if repeat % 2 else reversed(points):
                if name == "speculating":
                    engines[name].worker("bench_draft", drafted, UNWRITTEN_TOKEN)
                cost = step_seconds(engines[name], prompts[:rows], steps)
                if repeat:  # the first round warms up
                    seconds[name, rows, drafted].append(cost)
    milliseconds = {point: spread([1e3 * s for s in costs]) for point, costs in seconds.items()}
    content = {
        "model": model,
        "load_format": load_format,
        "rows": ROWS,
        "draft_tokens": DRAFT_TOKENS,
        "plain_ms": [milliseconds["plain", rows, 0] for rows in ROWS],
        "undrafted_ms": [milliseconds["speculating", rows, 0] for rows in ROWS],
        "drafted_ms": [[milliseconds["speculating", rows, d] for d in DRAFT_TOKENS] for rows in ROWS],
    }
    console.print(table(content))
    write_result(result, content)


def table(content: dict[str, Any]) -> Table:
    result = Table(title="ms of an engine step (medians)")
    for heading in ("rows", "plain", "undrafted", *(f"{d} drafted" for d in content["draft_tokens"])):
        result.add_column(heading, justify="right")
    for index, rows in enumerate(content["rows"]):
        cells = [content["plain_ms"][index], content["undrafted_ms"][index], *content["drafted_ms"][index]]
        result.add_row(str(rows), *(f"{cell['median']:.2f}" for cell in cells))
    return result


def step_seconds(engine: Engine, prompts: list[list[int]], steps: int, dilation: float | None = None) -> float:
    """Return the seconds of one decode step with these prompts running."""
    runs = {}
    for length in (8, 8 + steps):
        load = Load(prompts=prompts, concurrency=len(prompts), max_tokens=length, ignore_eos=True, dilation=dilation)
        runs[length] = engine.generate(load)
    accepted = runs[8 + steps]["accepted"]
    assert accepted < 0.01 * runs[8 + steps]["tokens"], f"the policy samples the drafted token: {accepted} accepted"
    return (runs[8 + steps]["seconds"] - runs[8]["seconds"]) / steps


if __name__ == "__main__":
    typer.run(main)
