"""Compares the tokens per second of several methods on the same engine loads."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from rich.table import Table

from benchmarks.common.result_files import bar, bars_table, console, spread
from benchmarks.drafting.drafters import group_by_prompt
from benchmarks.drafting.replay import TraceStep
from benchmarks.engines.process import SETTINGS, Engine, EngineSettings, Load

SAMPLES = 8  # answers per prompt, submitted one after another as verl does
BASELINE = "none"
RHYME = "rhyme"
SYNCHRONOUS = "rhyme-sync"
PEER = "suffix"  # and names with this prefix: the peer with other settings

Prompts = Sequence[Sequence[int]]
Group = tuple[list[int], list[list[int]]]  # a prompt and its recorded answers
Run = dict[str, float]
Results = dict[str, dict[int, list[Run]]]  # method -> concurrency -> runs


def measure(
    engines: dict[str, Engine],
    concurrencies: Sequence[int],
    load_of: Callable[[int, int], Load],
    prepare: Callable[[Engine, int, int], None],
    repeats: int,
    warm_up: bool = True,
) -> Results:
    """Run every method at every concurrency, interleaved.

    Args:
        engines: running engines by method.
        load_of: (repeat, concurrency) -> the load of a run.
        prepare: called before each run with its engine, repeat and concurrency.
        repeats: number of measured runs, from repeat 1 on.
        warm_up: whether repeat 0 comes first, which is not counted.
    """
    results: Results = {name: {c: [] for c in concurrencies} for name in engines}
    for repeat in range(0 if warm_up else 1, repeats + 1):
        console.print(f"repeat {repeat}/{repeats}" if repeat else "warming up ...")
        for concurrency in concurrencies:
            load = load_of(repeat, concurrency)
            runs = {}
            for name in engines if repeat % 2 else reversed(engines):
                prepare(engines[name], repeat, concurrency)
                runs[name] = engines[name].generate(load)
                if repeat:
                    results[name][concurrency].append(runs[name])
            shown = (f"{name} {runs[name]['tokens_per_s']:,.0f}" for name in engines)
            console.print(f"  {concurrency} rows, tokens/s: {', '.join(shown)}", highlight=False)
    return results


def group_load(prompts: Prompts, concurrency: int, max_tokens: int) -> Load:
    """Return a load with SAMPLES answers per prompt, with log-probs as in verl."""
    requests = [prompt for prompt in prompts for _ in range(SAMPLES)]
    return Load(prompts=requests, concurrency=concurrency, max_tokens=max_tokens, log_probs=True)


def recorded_groups(steps: Sequence[TraceStep], epoch: int) -> list[Group]:
    """Return the prompts of one epoch of a trace with their answers, in the trace's order."""
    return [
        (answers[0].prompt.tolist(), [answer.tokens.tolist() for answer in answers])
        for step in steps
        if step.epoch == epoch
        for answers in group_by_prompt(step).values()
    ]


def recorded_load(groups: Sequence[Group], concurrency: int, max_tokens: int, scale: float) -> Load:
    """Return a load in virtual time that generates recorded answers, with log-probs as in verl."""
    return Load(
        prompts=[prompt for prompt, answers in groups for _ in answers],
        answers=[answer for _, answers in groups for answer in answers],
        concurrency=concurrency,
        max_tokens=max_tokens,
        scale=scale,
        log_probs=True,
    )


def with_shuffled_ids(groups: Sequence[Group]) -> list[Group]:
    """Return the groups with every token id replaced by another one: text of the same kind with none of its content."""
    largest = max(max(prompt + sum(answers, [])) for prompt, answers in groups)
    ids = np.random.default_rng(0).permutation(largest + 1)
    return [(ids[prompt].tolist(), [ids[answer].tolist() for answer in answers]) for prompt, answers in groups]


def engine_settings(
    methods: Mapping[str, dict[str, Any] | None],
    model: str,
    max_model_len: int,
    separate_process: bool,
    arguments: dict[str, Any],
    virtual_model: str = "",
) -> dict[str, EngineSettings]:
    """Return engine settings by method that differ only in drafting."""
    return {
        name: EngineSettings(
            model=model,
            max_model_len=max_model_len,
            speculative=speculative,
            rhyme=SETTINGS.get(name, {}),
            separate_process=separate_process,
            arguments=arguments,
            virtual_model=virtual_model,
        )
        for name, speculative in methods.items()
    }


def summarize(results: Results) -> dict[str, dict[str, dict[str, Any]]]:
    """Return by method and concurrency: tokens/s, its ratio to the baseline per run, and acceptance.

    In virtual time also `device_only`, tokens/s and ratio if the host took no time, the device's mean idle time between
    two steps (`gap_ms`), and accepted tokens per step of a request after its prompt (`accepted_per_verify`).
    """
    summary: dict[str, dict[str, dict[str, Any]]] = {}
    for name, by_concurrency in results.items():
        for concurrency, runs in by_concurrency.items():
            tokens, drafted, accepted = (sum(run[key] for run in runs) for key in ("tokens", "drafted", "accepted"))
            baseline = results[BASELINE][concurrency]
            row = {
                "tokens_per_s": spread([run["tokens_per_s"] for run in runs]),
                "ratio": spread(_ratios(runs, baseline)),
                "acceptance_rate": accepted / drafted if drafted else 0.0,
                "accepted_share": accepted / tokens,
            }
            if "device_seconds" in runs[0]:
                on_device, of_baseline = ([_device_only(run) for run in several] for several in (runs, baseline))
                row["device_only"] = {
                    "tokens_per_s": spread([run["tokens_per_s"] for run in on_device]),
                    "ratio": spread(_ratios(on_device, of_baseline)),
                }
                row["gap_ms"] = spread([run["gap_ms"] for run in runs])
                row["accepted_per_verify"] = accepted / sum(run["verifies"] for run in runs)
            summary.setdefault(name, {})[str(concurrency)] = row
    return summary


def ratio(results: Results, name: str, other: str, concurrency: int) -> float:
    """Return the median ratio of one method's tokens/s to another's."""
    return statistics.median(_ratios(results[name][concurrency], results[other][concurrency]))


def ratio_to_peers(results: Results, concurrency: int) -> float:
    """Return the median ratio of rhyme's tokens/s to those of the fastest peer at this concurrency."""
    peers = {name: by_concurrency[concurrency] for name, by_concurrency in results.items() if name.startswith(PEER)}
    best = max(peers, key=lambda name: statistics.median(run["tokens_per_s"] for run in peers[name]))
    return ratio(results, RHYME, best, concurrency)


def never_slower_bar(results: Results, at_least: float = 0.97) -> dict[str, Any]:
    """Return the bar for every load: rhyme must not be slower than the baseline, up to noise."""
    return bar(min(ratio(results, RHYME, BASELINE, c) for c in results[RHYME]), at_least=at_least)


def compare(title: str, results: Results, bars: dict[str, Any]) -> dict[str, Any]:
    """Print the comparison and its bars, and return both with the raw runs for a result file."""
    summary = summarize(results)
    console.print(_table(f"{title}: tokens/s by concurrency (medians), ratio to no speculation", summary, _speed))
    if "gap_ms" in next(iter(summary[BASELINE].values())):
        console.print(_table("the same if the host took no time", summary, lambda row: _speed(row["device_only"])))
        console.print(_table("ms for which the device waits for the host; accepted per verification", summary, _gap))
    console.print(bars_table(bars))
    return {"bars": bars, "summary": summary, "runs": results}


def _table(title: str, summary: dict[str, dict[str, dict[str, Any]]], cell: Callable[[dict[str, Any]], str]) -> Table:
    table = Table(title=title)
    table.add_column("method")
    for concurrency in summary[BASELINE]:
        table.add_column(concurrency, justify="right")
    for name, by_concurrency in summary.items():
        table.add_row(name, *(cell(row) for row in by_concurrency.values()))
    return table


def _speed(row: dict[str, Any]) -> str:
    return f"{row['tokens_per_s']['median']:,.0f} ({row['ratio']['median']:.2f}x)"


def _gap(row: dict[str, Any]) -> str:
    return f"{row['gap_ms']['median']:.2f}; {row['accepted_per_verify']:.2f}"


def _device_only(run: Run) -> Run:
    return {"tokens_per_s": run["tokens"] / run["device_seconds"]}


def _ratios(runs: Sequence[Run], baseline: Sequence[Run]) -> list[float]:
    return [run["tokens_per_s"] / base["tokens_per_s"] for run, base in zip(runs, baseline, strict=True)]
