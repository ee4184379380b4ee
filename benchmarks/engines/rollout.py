"""Tokens per second of vLLM engines that generate epoch k+1 of a recorded run, with epochs 1 to k as history.

The policies are those of the recorded runs after epoch k, on templated, long-tailed and real text. Each load runs at
the speed of this machine, where the cost of a step is about proportional to its tokens, and with published A100 step
times (emulated_clock.py). Peers get the same answers as history and their own best settings. Loads that are in the
result file are not repeated. Run by `make bench-rollout`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.common.result_files import RESULTS, bar, console, write_result
from benchmarks.drafting.replay import load_trace
from benchmarks.engines.best_suffix import DRAFTER_RESULT, best_suffix
from benchmarks.engines.comparison import (
    BASELINE,
    RHYME,
    Prompts,
    Results,
    compare,
    engine_settings,
    group_load,
    measure,
    never_slower_bar,
    ratio_to_baseline,
    ratio_to_peers,
)
from benchmarks.engines.process import METHODS, Engine
from benchmarks.jobs.emulated_clock import LABEL, MAX_LATE_STEPS, MAX_LATE_TIME

HERE = Path(__file__).parents[1]
PROMPTS = {1: 1, 4: 2, 16: 4, 64: 16, 128: 32}  # per run, by concurrency: from one answer at a time to two waves
DILATIONS = {1: 1.0, 4: 1.5, 16: 2.0, 64: 4.0, 128: 5.0}  # by concurrency, so that two cores keep up
BEST = "suffix-best"
BEST_AT = 16  # rows of the replay that selects the peer's best settings
WARM_UP_PROMPTS = {1: 1, 4: 1, 16: 2, 64: 4, 128: 4}  # prompts before each run, by concurrency
ROOM = 128  # model length beyond the longest answer in tokens, so that no draft is cut short


@dataclass(frozen=True, kw_only=True)
class RolloutLoad:
    """A policy and the history that it continues.

    Attributes:
        policy: folder of the policy after the last epoch of history.
        trace: recorded trace with the prompts and the history.
        max_tokens: maximum tokens per answer.
        history_epochs: number of epochs of the trace that are history.
    """

    policy: Path
    trace: Path
    max_tokens: int
    history_epochs: int = 3


LOADS = {
    name: RolloutLoad(
        policy=HERE / f"policies/{name}-epoch3", trace=HERE / f"traces/{name}.parquet", max_tokens=max_tokens
    )
    for name, max_tokens in (("quickstart", 400), ("longtail", 512), ("gsm8k", 400))
}


def main(
    load: Annotated[
        list[str] | None, typer.Option(help="One of the shipped loads (repeatable): " + ", ".join(LOADS))
    ] = None,
    policy: Annotated[Path | None, typer.Option(help="Your own policy, with --trace: the load `own`.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Its recorded trace: a Parquet file or a folder of them.")] = None,
    history_epochs: Annotated[int, typer.Option(min=1, help="Epochs of the trace that are history.")] = 3,
    max_tokens: Annotated[int, typer.Option(help="Maximum tokens per answer of the load `own`.")] = 1024,
    emulate: Annotated[str, typer.Option(help="Model whose step times are emulated; empty: none.")] = "qwen2.5-7b",
    plain: Annotated[bool, typer.Option(help="Also run at this machine's own speed.")] = True,
    repeats: Annotated[int, typer.Option(min=1, help="Runs per method and concurrency, interleaved.")] = 3,
    methods: Annotated[str, typer.Option(help="Comma-separated methods.")] = f"none,suffix,{BEST},rhyme",
    concurrencies: Annotated[str, typer.Option(help="Comma-separated numbers.")] = ",".join(map(str, PROMPTS)),
    separate_process: Annotated[bool, typer.Option(help="Run vLLM's engine core in a separate process.")] = False,
    gpu_memory_utilization: Annotated[float, typer.Option(help="Share of the GPU per engine.")] = 0.15,
    drafter: Annotated[Path, typer.Option(help="Result of bench-drafter, for `suffix-best`.")] = DRAFTER_RESULT,
    again: Annotated[bool, typer.Option(help="Repeat loads that are in the result file.")] = False,
    result: Annotated[Path, typer.Option(help="Path of the result file; other loads in it are kept.")] = (
        RESULTS / "rollout.json"
    ),
) -> None:
    """Measure rollouts with history."""
    loads = chosen_loads(load, policy, trace, history_epochs, max_tokens)
    chosen = tuple(int(one) for one in concurrencies.split(","))
    known: dict[str, Any] = json.loads(result.read_text(encoding="utf-8")).get("loads", {}) if result.is_file() else {}
    for name, one in loads.items():
        ways = {"machine": None} if plain else {}
        ways |= {"emulated": emulate} if emulate else {}
        missing = {way: model for way, model in ways.items() if again or way not in known.get(name, {})}
        if not missing:
            console.print(f"{name}: already in {result}")
            continue
        if not (one.policy / "model.safetensors").is_file():
            raise typer.BadParameter(f"{one.policy}: no policy here")
        try:
            wanted = speculative_configs(methods.split(","), name, drafter)
            prompts = prompts_of_trace(one)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
        for way, model in missing.items():
            console.print(f"{name}, {way}")
            settings = engine_settings(
                wanted,
                str(one.policy),
                max(map(len, prompts)) + one.max_tokens + ROOM,
                separate_process,
                {"gpu_memory_utilization": gpu_memory_utilization},
                model or "",
            )
            results = measure(
                settings,
                chosen,
                _PromptsOf(prompts),
                one.max_tokens,
                repeats=repeats,
                prepare=_Prepare(one, prompts),
                remember=False,
                dilations=DILATIONS if model else None,
            )
            title = f"{name}, epoch {one.history_epochs + 1} with history of {one.history_epochs}"
            title += f", {LABEL} ({model})" if model else ""
            facts = {
                "policy": one.policy.name,
                "trace": one.trace.name,
                "history_epochs": one.history_epochs,
                "max_tokens": one.max_tokens,
                "separate_process": separate_process,
                "step_times": f"{LABEL} ({model})" if model else "this machine",
                "dilations": DILATIONS if model else None,
                "methods": wanted,
            }
            known.setdefault(name, {})[way] = {**facts, **compare(title, results, all_bars(results))}
            write_result(result, {"loads": known})


def chosen_loads(
    names: list[str] | None, policy: Path | None, trace: Path | None, history_epochs: int, max_tokens: int
) -> dict[str, RolloutLoad]:
    """Return the loads that the command line selects, by name."""
    if (policy is None) != (trace is None):
        raise typer.BadParameter("--policy and --trace go together")
    if policy is not None and trace is not None:
        own = RolloutLoad(policy=policy, trace=trace, max_tokens=max_tokens, history_epochs=history_epochs)
        return {"own": own}
    unknown = sorted(set(names or ()) - set(LOADS))
    if unknown:
        raise typer.BadParameter(f"--load {unknown[0]}: choose from {', '.join(LOADS)}")
    return {name: LOADS[name] for name in names or LOADS}


def speculative_configs(names: list[str], load: str, drafter: Path) -> dict[str, dict[str, Any] | None]:
    """Return vLLM's `speculative_config` by method; the one of BEST depends on the load's trace."""
    return {name: best_suffix(load, BEST_AT, drafter) if name == BEST else METHODS[name] for name in names}


def prompts_of_trace(load: RolloutLoad) -> Prompts:
    """Return the token ids of each prompt in the history."""
    steps = load_trace(load.trace, max_epoch=load.history_epochs)
    by_key = {answer.prompt_key: answer.prompt.tolist() for step in steps for answer in step.answers}
    return list(by_key.values())


@dataclass(frozen=True)
class _PromptsOf:
    prompts: Prompts

    def __call__(self, repeat: int, concurrency: int) -> Prompts:
        count = PROMPTS[concurrency]
        return [self.prompts[(repeat * count + index) % len(self.prompts)] for index in range(count)]


@dataclass(frozen=True)
class _Prepare:
    """Resets the history, then warms the engine up with a few other prompts, as in mid-training."""

    load: RolloutLoad
    prompts: Prompts

    def __call__(self, engine: Engine, repeat: int, concurrency: int) -> None:
        engine.worker("bench_remember", str(self.load.trace), self.load.history_epochs)
        end = (repeat + 1) * PROMPTS[concurrency]
        others = [self.prompts[(end + index) % len(self.prompts)] for index in range(WARM_UP_PROMPTS[concurrency])]
        engine.generate(group_load(others, concurrency, self.load.max_tokens))


def all_bars(results: Results) -> dict:
    """Return the bars of one load, as `bar` gives them."""
    if RHYME not in results or BASELINE not in results:
        return {}
    bars = {"tokens/s / no speculation, worst concurrency": never_slower_bar(results)}
    for concurrency in results[RHYME]:
        bars[f"tokens/s / no speculation at {concurrency}"] = bar(
            ratio_to_baseline(results, concurrency), at_least=0.97
        )
        if any(name.startswith("suffix") for name in results):
            bars[f"tokens/s / suffix's best at {concurrency}"] = bar(ratio_to_peers(results, concurrency), at_least=1.0)
    runs = [run for by_concurrency in results.values() for several in by_concurrency.values() for run in several]
    for name, most in (("late_step_share", MAX_LATE_STEPS), ("late_time_share", MAX_LATE_TIME)):
        if name in runs[0]:
            bars[f"emulation: {name.replace('_', ' ')}, worst run"] = bar(max(r[name] for r in runs), at_most=most)
    return bars


if __name__ == "__main__":
    typer.run(main)
