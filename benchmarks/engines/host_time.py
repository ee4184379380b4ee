"""Host milliseconds of an engine step, part by part, in real vLLM engines in virtual time (virtual_time.py).

Engines generate recorded answers with log-probs and with history, at published steps of a 7B model. rhyme drafts up to
a limit on the tokens of a step (policy `fixed`): one token, that is, nothing, or 512 tokens, synchronously and
asynchronously; and asynchronously also one or four draft tokens per row. `suffix` drafts what it finds with its best
settings; stock vLLM is there for comparison. Only steps count in which all rows run and no prompt is prefilled. All
engines are alive at once and run in turns. Run by `make bench-host`.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from benchmarks.common.result_files import RESULTS, bar, bars_table, console, write_result
from benchmarks.drafting.host_gap import FOUND, NOTHING
from benchmarks.drafting.replay import load_trace
from benchmarks.engines.best_suffix import best_suffix
from benchmarks.engines.comparison import SAMPLES, recorded_groups, recorded_load
from benchmarks.engines.process import METHODS, SETTINGS, EngineSettings, start_all
from benchmarks.engines.rollout import LOADS, LONGTAIL, VIRTUAL_ARGUMENTS, RolloutLoad, max_model_len
from benchmarks.engines.virtual_time import PARTS
from benchmarks.jobs.emulated_clock import LABEL

ROWS = (4, 16, 64, 128, 256, 512)
DRAFTED = "512-token steps"
LIGHT = (1, 4)  # draft tokens per row
STOCK, SUFFIX, SYNCHRONOUS, ASYNCHRONOUS = "none", "suffix", "rhyme-sync", "rhyme"  # methods
SUFFIX_ROWS = 64  # at which the settings of `suffix` are its best
MAX_STEP_TOKENS = 512
MAX_STEP_TOKENS_OF_512_ROWS = 1024
BAR_ROWS = (64, 128, 256)
MOST_OF_SYNCHRONOUS = 0.5  # bar for the time between arrival and launch with drafts
MOST_UNDRAFTED_MS = 0.1  # bar for the same with nothing drafted
ARRIVAL = "arrival to launch"


Medians = dict[str, float]
Found = dict[str, dict[str, dict[str, Medians]]]  # drafting -> method -> rows -> medians


def main(
    step_times: Annotated[str, typer.Option(help="Model whose published step times are taken.")] = "qwen2.5-7b",
    rows: Annotated[str, typer.Option(help="Comma-separated numbers of concurrent requests.")] = ",".join(
        map(str, ROWS)
    ),
    waves: Annotated[int, typer.Option(min=1, help="Answers per row in a run, as far as the trace has them.")] = 4,
    repeats: Annotated[int, typer.Option(min=1, help="Runs per engine and number of rows.")] = 2,
    result: Annotated[Path, typer.Option(help="Path of the result file.")] = RESULTS / "host.json",
) -> None:
    """Measure the host's time per step."""
    found = measure(
        (STOCK, SUFFIX, SYNCHRONOUS, ASYNCHRONOUS), tuple(map(int, rows.split(","))), step_times, waves, repeats
    )
    bars = all_bars(found)
    console.print(table(found))
    console.print(bars_table(bars))
    content = {
        "step_times": f"{LABEL} ({step_times})",
        "load": LONGTAIL,
        "suffix": best_suffix(LONGTAIL, SUFFIX_ROWS),
        "max_step_tokens": {"default": MAX_STEP_TOKENS, "512": MAX_STEP_TOKENS_OF_512_ROWS},
    }
    write_result(result, {**content, "bars": bars, "milliseconds": found})


def limits(method: str, rows: int) -> dict[str, int]:
    """Return the limits on the tokens of a step with which an engine is measured, by the name of the drafting."""
    full = MAX_STEP_TOKENS if rows < MAX_STEP_TOKENS else MAX_STEP_TOKENS_OF_512_ROWS
    if method == STOCK:
        return {NOTHING: 1}
    if method == SUFFIX:
        return {FOUND: full}
    light = {f"draft tokens per row: {number}": (1 + number) * rows for number in LIGHT if method == ASYNCHRONOUS}
    return {NOTHING: 1, **{name: limit for name, limit in light.items() if limit < full}, DRAFTED: full}


def measure(methods: Sequence[str], rows: Sequence[int], model: str, waves: int, repeats: int) -> Found:
    """Run all engines and return the medians of their steps.

    Raises:
        RuntimeError: drafts were asked for, but nothing was drafted.
    """
    load = LOADS[LONGTAIL]
    groups = recorded_groups(load_trace(load.trace, load.history_epochs + 1), load.history_epochs + 1)
    found: Found = {}
    stack, engines = start_all({method: _settings(method, load, model, max(rows)) for method in methods})
    with stack:
        for method, engine in engines.items():
            way = "asynchronously" if engine.worker("bench_is_asynchronous") else "synchronously"
            console.print(f"{method}: schedules {way}", highlight=False)
        for count in sorted(rows):
            console.print(f"{count} rows")
            run = recorded_load(groups[: -(-waves * count // SAMPLES)], count, load.max_tokens, scale=1.0)
            run = replace(run, times_parts=True)
            present = [
                (drafting, method, limit) for method in methods for drafting, limit in limits(method, count).items()
            ]
            steps: dict[tuple[str, str], list[dict[str, Any]]] = {}
            for repeat in range(repeats + 1):
                for drafting, method, limit in present if repeat % 2 else reversed(present):
                    engine = engines[method]
                    engine.worker("bench_limit", limit)
                    engine.worker("bench_remember", str(load.trace), load.history_epochs)
                    engine.generate(run)
                    if repeat:  # the first run warms up
                        steps.setdefault((drafting, method), []).extend(engine.steps())
            for drafting, method, _ in present:
                one = medians(steps[drafting, method], count)
                if drafting != NOTHING and one["tokens"] <= count:
                    raise RuntimeError(f"{method}, {drafting}: nothing was drafted at {count} rows")
                found.setdefault(drafting, {}).setdefault(method, {})[str(count)] = one
    return found


def _settings(method: str, load: RolloutLoad, model: str, max_rows: int) -> EngineSettings:
    given = SETTINGS.get(method, {}).get("spec", {})
    return EngineSettings(
        model=str(load.policy),
        max_model_len=max_model_len(load),
        speculative=best_suffix(LONGTAIL, SUFFIX_ROWS) if method == SUFFIX else METHODS[method],
        rhyme={"spec": {**given, "policy": "fixed"}},
        arguments={**VIRTUAL_ARGUMENTS, "max_num_seqs": max_rows},
        virtual_model=model,
    )


def medians(steps: list[dict[str, Any]], rows: int) -> Medians:
    """Return the medians of the steps in which all rows run and no prompt is prefilled.

    Returns:
        `steps`, their number; `tokens`; and milliseconds: PARTS, `host` (all that the host does from one launch to the
        next), ARRIVAL, `device` and `period`.
    """
    full = [step for step in steps if step["rows"] == step["verifies"] == rows]
    if not full:
        raise RuntimeError(f"no step with {rows} rows among {len(steps)}")

    def milliseconds(values: list[float]) -> float:
        return 1e3 * statistics.median(values)

    return {
        "steps": len(full),
        "tokens": statistics.median(step["tokens"] for step in full),
        **{part: milliseconds([step["parts"][part] for step in full]) for part in PARTS},
        "host": milliseconds([step["host"] for step in full]),
        ARRIVAL: milliseconds([step["gap"] for step in full]),
        "device": milliseconds([step["device_seconds"] for step in full]),
        "period": milliseconds([step["period"] for step in full]),
    }


def all_bars(found: Found) -> dict[str, dict[str, Any]]:
    """Return the bars for the time between arrival and launch."""
    bars = {}
    for rows in map(str, BAR_ROWS):
        by_method = {method: by_rows[rows][ARRIVAL] for method, by_rows in found[DRAFTED].items() if rows in by_rows}
        if by_method:
            share = by_method[ASYNCHRONOUS] / by_method[SYNCHRONOUS]
            bars[f"{DRAFTED}, {rows} rows: {ARRIVAL}, asynchronous / synchronous"] = bar(
                share, at_most=MOST_OF_SYNCHRONOUS
            )
            undrafted = found[NOTHING][ASYNCHRONOUS][rows][ARRIVAL]
            bars[f"{NOTHING}, {rows} rows: {ARRIVAL}, asynchronous, ms"] = bar(undrafted, at_most=MOST_UNDRAFTED_MS)
    return bars


def table(found: Found) -> Table:
    result = Table(title="ms of an engine step (medians)")
    columns = (*PARTS, "host", ARRIVAL, "device", "period")
    for heading in ("drafting", "rows", "method", "tokens", *columns):
        result.add_column(heading, justify="right", no_wrap=heading == "drafting")
    for drafting, by_method in found.items():
        for rows in dict.fromkeys(rows for by_rows in by_method.values() for rows in by_rows):
            for method, by_rows in by_method.items():
                if rows in by_rows:
                    cells = (f"{by_rows[rows][column]:.2f}" for column in columns)
                    result.add_row(drafting, rows, method, f"{by_rows[rows]['tokens']:,.0f}", *cells)
        result.add_section()
    return result


if __name__ == "__main__":
    typer.run(main)
