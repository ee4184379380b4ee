"""Rollout speed with history: a vLLM engine that generates epoch k+1 with the answers of epochs 1 to k to draft from.

No speculation (all of vLLM's defaults), `ngram`, `suffix` and rhyme at concurrency 1 to 64, in turns, with the same
prompts (engine_comparison.py). `suffix` and rhyme have the very same recorded answers as history, set anew before
each run; a short run over other prompts warms each engine up for it. Answers are sampled at temperature 1.0, so
methods generate different answers to the same prompts and tokens per second are of generated tokens. Run by `make
bench-rollout`; on a GPU give --model and --trace of your own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from benchmarks.drafter_replay import load_trace
from benchmarks.engine import METHODS, Engine
from benchmarks.engine_comparison import (
    CONCURRENCIES,
    PEERS,
    PROMPTS,
    RHYME,
    Prompts,
    Results,
    conclude,
    engine_settings,
    group_load,
    measure,
    never_slower_bar,
    ratio_to_baseline,
    ratio_to_peers,
)
from benchmarks.report import RESULTS, bar

LOW_CONCURRENCY = 4  # up to here drafting has to pay most
WARM_UP_PROMPTS = {1: 2, 2: 2, 4: 2, 8: 2, 16: 4, 32: 8, 64: 8}  # before each run, by concurrency
ROOM = 128  # tokens of model length beyond the longest answer, so that no draft reaches its end


def main(
    model: Annotated[str, typer.Option(help="Path of the policy that follows on the history.")] = (
        "benchmarks/policies/quickstart-epoch3"
    ),
    trace: Annotated[Path, typer.Option(help="Recorded trace whose prompts and answers are used.")] = Path(
        "benchmarks/traces/quickstart.parquet"
    ),
    history_epochs: Annotated[int, typer.Option(min=1, help="Epochs of the trace that are history.")] = 3,
    max_tokens: Annotated[int, typer.Option(help="Bound on an answer's tokens.")] = 400,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each method at each concurrency, in turns.")] = 5,
    methods: Annotated[str, typer.Option(help="Which methods, separated by commas.")] = ",".join(METHODS),
    concurrencies: Annotated[str, typer.Option(help="Separated by commas.")] = ",".join(map(str, CONCURRENCIES)),
    separate_process: Annotated[bool, typer.Option(help="Run vLLM's engine core in a process of its own.")] = False,
    gpu_memory_utilization: Annotated[float, typer.Option(help="Share of a GPU for each engine.")] = 0.15,
    quick: Annotated[bool, typer.Option(help="One repeat at three concurrencies, for development.")] = False,
    result: Annotated[Path, typer.Option(help="Where the result goes.")] = RESULTS / "rollout.json",
) -> None:
    """Measure rollouts with history."""
    chosen = (1, 16, 64) if quick else tuple(int(one) for one in concurrencies.split(","))
    steps = load_trace(trace, max_epoch=history_epochs)
    by_key = {answer.prompt_key: answer.prompt.tolist() for step in steps for answer in step.answers}
    prompts = list(by_key.values())
    if len(prompts) < max(PROMPTS[c] + WARM_UP_PROMPTS[c] for c in chosen):
        raise typer.BadParameter(f"{trace} has only {len(prompts)} prompts: leave out the largest --concurrencies")

    def prompts_of(repeat: int, concurrency: int) -> Prompts:
        count = PROMPTS[concurrency]
        return [prompts[(repeat * count + index) % len(prompts)] for index in range(count)]

    def prepare(engine: Engine, repeat: int, concurrency: int) -> None:
        """Set history anew, then let the engine run over a few other prompts, as it is found in mid-training."""
        engine.worker("bench_remember", str(trace), history_epochs)
        end = (repeat + 1) * PROMPTS[concurrency]
        others = [prompts[(end + index) % len(prompts)] for index in range(WARM_UP_PROMPTS[concurrency])]
        engine.generate(group_load(others, concurrency, max_tokens))

    longest = max(map(len, prompts)) + max_tokens + ROOM
    settings = engine_settings(
        methods.split(","), model, longest, separate_process, {"gpu_memory_utilization": gpu_memory_utilization}
    )
    results = measure(
        settings,
        chosen,
        prompts_of,
        max_tokens,
        repeats=1 if quick else repeats,
        prepare=prepare,
        remember=False,
    )
    bars = all_bars(results) if RHYME in results else {}
    facts = {
        "model": model,
        "trace": str(trace),
        "history_epochs": history_epochs,
        "max_tokens": max_tokens,
        "separate_process": separate_process,
    }
    conclude(f"epoch {history_epochs + 1} with history of {history_epochs}", results, bars, settings, facts, result)


def all_bars(results: Results) -> dict:
    """Return the bars of the rollout benchmark, as `bar` gives them."""
    measured = results[RHYME]
    bars = {}
    for concurrency in measured:
        ratio = ratio_to_baseline(results, concurrency)
        if concurrency <= LOW_CONCURRENCY:
            bars[f"tokens/s / no speculation at {concurrency}"] = bar(ratio, at_least=2.6)
        elif concurrency == 16:
            bars["tokens/s / no speculation at 16"] = bar(ratio, at_least=1.5)
    bars["tokens/s / no speculation, worst concurrency"] = never_slower_bar(results)
    for concurrency in measured if any(name in results for name in PEERS) else ():
        bars[f"tokens/s / suffix's best at {concurrency}"] = bar(ratio_to_peers(results, concurrency), at_least=1.2)
    return bars


if __name__ == "__main__":
    typer.run(main)
