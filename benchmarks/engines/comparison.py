"""Tokens per second of several methods on the same engine loads, by concurrency: what rollout.py and cold.py share."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rich.table import Table

from benchmarks.common.result_files import bar, bars_table, console, spread
from benchmarks.engines.process import Engine, EngineSettings, Load, start_all

CONCURRENCIES = (1, 2, 4, 8, 16, 32, 64)
PROMPTS = {1: 2, 2: 4, 4: 4, 8: 8, 16: 16, 32: 32, 64: 32}  # of a run, by concurrency
SAMPLES = 8  # answers to each prompt, submitted one after another as verl does
BASELINE = "none"
RHYME = "rhyme"
PEER = "suffix"  # and what begins like it: the peer at other settings

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
    """Run every method at every concurrency, in turns.

    Args:
        settings: the engine of each method.
        prompts_of: gives the prompts of a run: (repeat, concurrency) -> token ids of each. Repeat 0 is not counted.
        max_tokens: bound on an answer's tokens.
        repeats: runs that count.
        prepare: called before each run with its engine, repeat and concurrency.
        remember: whether finished answers become history after a run, where the method leaves that to its host.
        dilations: of the emulated clock, by concurrency; None: the engines' own time.
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
    """Return the load of SAMPLES answers to each prompt."""
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
    """Return the settings of each method, given its `speculative_config`; all else is equal."""
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
    """Return by method and concurrency: tokens/s, its ratio to the baseline run by run, and what drafting did."""
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
    """The median ratio of rhyme's tokens/s to those of the peers' setting that is fastest at this concurrency."""
    peers = [by_concurrency[concurrency] for name, by_concurrency in results.items() if name.startswith(PEER)]
    best = max(peers, key=lambda runs: statistics.median(run["tokens_per_s"] for run in runs))
    return statistics.median(_ratios(results[RHYME][concurrency], best))


def ratio_to_baseline(results: Results, concurrency: int) -> float:
    """The median ratio of rhyme's tokens/s to the baseline's."""
    return statistics.median(_ratios(results[RHYME][concurrency], results[BASELINE][concurrency]))


def never_slower_bar(results: Results) -> dict[str, Any]:
    """The bar that holds for every load: speculation must not cost anything."""
    return bar(min(ratio_to_baseline(results, c) for c in results[RHYME]), at_least=0.97)


def compare(title: str, results: Results, bars: dict[str, Any]) -> dict[str, Any]:
    """Print the comparison and its bars; return both with the raw runs, for a result file."""
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
