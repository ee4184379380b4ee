"""Compares the tokens per second of several methods on the same engine loads; used by rollout.py and cold.py."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rich.table import Table

from benchmarks.common.result_files import bar, bars_table, console, spread
from benchmarks.engines.process import Engine, EngineSettings, Load, start_all

CONCURRENCIES = (1, 2, 4, 8, 16, 32, 64)
PROMPTS = {1: 2, 2: 4, 4: 4, 8: 8, 16: 16, 32: 32, 64: 32}  # per run, by concurrency
SAMPLES = 8  # answers per prompt, submitted one after another as verl does
BASELINE = "none"
RHYME = "rhyme"
PEER = "suffix"  # and names with this prefix: the peer with other settings

Prompts = Sequence[Sequence[int]]
Results = dict[str, dict[int, list[dict[str, float]]]]  # method -> concurrency -> runs


def measure(
    settings: dict[str, EngineSettings],
    concurrencies: Sequence[int],
    prompts_of: Callable[[int, int], Prompts],
    max_tokens: int,
    repeats: int,
    prepare: Callable[[Engine, int, int], None],
    remember: bool,
    dilations: Mapping[int, float] | None = None,
) -> Results:
    """Run every method at every concurrency, interleaved.

    Args:
        settings: engine settings by method.
        prompts_of: (repeat, concurrency) -> token ids of each prompt of a run.
        max_tokens: maximum tokens per answer.
        repeats: number of measured runs; repeat 0 warms up and is not counted.
        prepare: called before each run with its engine, repeat and concurrency.
        remember: whether finished answers become history after a run, if the method does not record them itself.
        dilations: dilation of the emulated clock by concurrency; None: real time.
    """
    results: Results = {name: {c: [] for c in concurrencies} for name in settings}
    stack, engines = start_all(settings)
    with stack:
        for repeat in range(repeats + 1):
            console.print(f"repeat {repeat}/{repeats}" if repeat else "warming up ...")
            for concurrency in concurrencies:
                load = group_load(prompts_of(repeat, concurrency), concurrency, max_tokens, remember)
                if dilations is not None:
                    load = replace(load, dilation=dilations[concurrency])
                for name in engines if repeat % 2 else reversed(engines):
                    prepare(engines[name], repeat, concurrency)
                    run = engines[name].generate(load)
                    if repeat:
                        results[name][concurrency].append(run)
    return results


def group_load(prompts: Prompts, concurrency: int, max_tokens: int, remember: bool = False) -> Load:
    """Return a load with SAMPLES answers per prompt."""
    requests = [prompt for prompt in prompts for _ in range(SAMPLES)]
    return Load(prompts=requests, concurrency=concurrency, max_tokens=max_tokens, remember=remember)


def engine_settings(
    methods: Mapping[str, dict[str, Any] | None],
    model: str,
    max_model_len: int,
    separate_process: bool,
    arguments: dict[str, Any],
    emulated_model: str = "",
) -> dict[str, EngineSettings]:
    """Return engine settings by method that differ only in `speculative_config`."""
    return {
        name: EngineSettings(
            model=model,
            max_model_len=max_model_len,
            speculative=speculative,
            separate_process=separate_process,
            arguments=arguments,
            emulated_model=emulated_model,
        )
        for name, speculative in methods.items()
    }


def summarize(results: Results) -> dict[str, dict[str, dict[str, Any]]]:
    """Return by method and concurrency: tokens/s, its ratio to the baseline per run, and acceptance."""
    summary: dict[str, dict[str, dict[str, Any]]] = {}
    for name, by_concurrency in results.items():
        for concurrency, runs in by_concurrency.items():
            drafted, accepted = (sum(run[key] for run in runs) for key in ("drafted", "accepted"))
            baseline = results[BASELINE][concurrency]
            summary.setdefault(name, {})[str(concurrency)] = {
                "tokens_per_s": spread([run["tokens_per_s"] for run in runs]),
                "ratio": spread(_ratios(runs, baseline)),
                "acceptance_rate": accepted / drafted if drafted else 0.0,
                "accepted_share": accepted / sum(run["tokens"] for run in runs),
            }
    return summary


def ratio_to_peers(results: Results, concurrency: int) -> float:
    """Return the median ratio of rhyme's tokens/s to those of the fastest peer at this concurrency."""
    peers = [by_concurrency[concurrency] for name, by_concurrency in results.items() if name.startswith(PEER)]
    best = max(peers, key=lambda runs: statistics.median(run["tokens_per_s"] for run in runs))
    return statistics.median(_ratios(results[RHYME][concurrency], best))


def ratio_to_baseline(results: Results, concurrency: int) -> float:
    """Return the median ratio of rhyme's tokens/s to the baseline's."""
    return statistics.median(_ratios(results[RHYME][concurrency], results[BASELINE][concurrency]))


def never_slower_bar(results: Results) -> dict[str, Any]:
    """Return the bar for every load: speculation must not be slower than the baseline, up to noise."""
    return bar(min(ratio_to_baseline(results, c) for c in results[RHYME]), at_least=0.97)


def compare(title: str, results: Results, bars: dict[str, Any]) -> dict[str, Any]:
    """Print the comparison and its bars, and return both with the raw runs for a result file."""
    summary = summarize(results)
    console.print(_comparison_table(title, summary))
    console.print(bars_table(bars))
    return {"bars": bars, "summary": summary, "runs": results}


def _comparison_table(title: str, summary: dict[str, dict[str, dict[str, Any]]]) -> Table:
    concurrencies = list(summary[BASELINE])
    table = Table(title=f"{title}: tokens/s by concurrency (medians), ratio to no speculation")
    table.add_column("method")
    for concurrency in concurrencies:
        table.add_column(concurrency, justify="right")
    for name, row in summary.items():
        cells = []
        for concurrency in concurrencies:
            cell = row[concurrency]
            ratio = "" if name == BASELINE else f" ({cell['ratio']['median']:.2f}x)"
            cells.append(f"{cell['tokens_per_s']['median']:,.0f}{ratio}")
        table.add_row(name, *cells)
    return table


def _ratios(runs: list[dict[str, float]], baseline: list[dict[str, float]]) -> list[float]:
    return [run["tokens_per_s"] / base["tokens_per_s"] for run, base in zip(runs, baseline, strict=True)]
