"""Tokens per second of vLLM engines that generate epoch k+1 of a recorded run, with epochs 1 to k as history.

The engines run in virtual time (virtual_time.py): their host work at this machine's speed, their steps at published
ones of an A100 or a fraction of these. Every request gets the recorded answer of the policy after epoch k. So all
engines generate the same tokens, and `gsm8k-noisy`, whose policy is not shipped, is measured like the other texts.
Stock vLLM schedules asynchronously, `suffix` and `ngram` as vLLM runs them, rhyme asynchronously (`rhyme`) and
synchronously (`rhyme-sync`). Peers get the same answers as history and their own best settings. Before a run, each
engine begins as many other answers as there are rows, so that a drafter knows what steps cost, as in mid-training.
Without history, their token ids are shuffled, so that nothing else can be learnt from them.

With `--machine`, the shipped policies run at this machine's own speed instead, for example on a GPU. Cells that are in
the result file are not measured again. Run by `make bench-rollout`.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.common.result_files import RESULTS, bar, console, write_result
from benchmarks.drafting.replay import load_trace
from benchmarks.engines.best_suffix import DRAFTER_RESULT, best_suffix
from benchmarks.engines.comparison import (
    BASELINE,
    PEER,
    RHYME,
    SAMPLES,
    SYNCHRONOUS,
    Results,
    compare,
    engine_settings,
    group_load,
    measure,
    never_slower_bar,
    ratio,
    ratio_to_peers,
    recorded_groups,
    recorded_load,
    with_shuffled_ids,
)
from benchmarks.engines.process import METHODS, Engine, Load, start_all
from benchmarks.jobs.emulated_clock import LABEL

HERE = Path(__file__).parents[1]
# Prompts per run, at most, by rows: in virtual time, in virtual time for development, and at the machine's speed.
PROMPTS = {1: 2, 4: 4, 16: 8, 64: 32, 128: 64, 256: 96, 512: 96}
QUICK_PROMPTS = {4: 1, 64: 8}
MACHINE_PROMPTS = {1: 1, 4: 2, 16: 4, 64: 16, 128: 32}
WARM_UP_TOKENS = 32  # of each answer that is begun before a run in virtual time
WARM_UP_PROMPTS = {1: 1, 4: 1, 16: 2, 64: 4, 128: 4}  # before each run at the machine's speed, by rows
BEST = {"suffix-best": 16, "suffix-best-256": 256}  # the peer with its best settings in the replay, by rows there
ROOM = 128  # model length beyond the longest answer in tokens, so that no draft is cut short
# In virtual time nothing is computed, so nothing is compiled. Blocks are those of a GPU, tokens per step those of verl.
VIRTUAL_ARGUMENTS = {"enforce_eager": True, "block_size": 16, "max_num_batched_tokens": 8192}
HISTORIES = ("full", "empty")
LONGTAIL, NOISY = "longtail", "gsm8k-noisy"
NEVER_SLOWER = 0.98  # bar for rhyme's tokens/s relative to stock vLLM in virtual time
# Bars for rhyme's tokens/s relative to stock vLLM with history and the published step times, by load.
MANY_ROWS, AT_MANY_ROWS = 256, {LONGTAIL: 1.2, NOISY: 1.0}
# Bars for rhyme's tokens/s relative to synchronous rhyme on LONGTAIL with history, by scale of the step times and rows.
ASYNCHRONOUS_GAIN = {1.0: {64: 1.05, 128: 1.08, 256: 1.08}, 0.25: {64: 1.2}}


@dataclass(frozen=True, kw_only=True)
class RolloutLoad:
    """A policy and the history that it continues.

    Attributes:
        policy: folder of the policy after the last epoch of history. In virtual time only its vocabulary counts.
        trace: recorded trace with the prompts, the history and the next epoch.
        max_tokens: maximum tokens per answer.
        history_epochs: number of epochs of the trace that are history.
        has_policy: whether `policy` is the one of the trace; if not, the load runs in virtual time only.
    """

    policy: Path
    trace: Path
    max_tokens: int
    history_epochs: int = 3
    has_policy: bool = True


LOADS = {
    name: RolloutLoad(
        policy=HERE / f"policies/{policy}-epoch3",
        trace=HERE / f"traces/{name}.parquet",
        max_tokens=max_tokens,
        has_policy=policy == name,
    )
    for name, policy, max_tokens in (
        ("quickstart", "quickstart", 400),
        (LONGTAIL, LONGTAIL, 1024),
        ("gsm8k", "gsm8k", 400),
        (NOISY, "gsm8k", 400),
    )
}


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A load measured in one way.

    Attributes:
        facts: what distinguishes the measurement from others, as plain values for JSON.
        load_of, prepare, warm_up: see `comparison.measure`.
        bars: returns the bars of the results, as `bar` gives them.
    """

    name: str
    facts: dict[str, Any]
    load_of: Callable[[int, int], Load]
    prepare: Callable[[Engine, int, int], None]
    warm_up: bool
    bars: Callable[[Results], dict[str, Any]]


def main(
    load: Annotated[
        list[str] | None, typer.Option(help="One of the shipped loads (repeatable): " + ", ".join(LOADS))
    ] = None,
    policy: Annotated[Path | None, typer.Option(help="Your own policy, with --trace: the load `own`.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Its recorded trace: a Parquet file or a folder of them.")] = None,
    history_epochs: Annotated[int, typer.Option(min=1, help="Epochs of the trace that are history.")] = 3,
    max_tokens: Annotated[int, typer.Option(help="Maximum tokens per answer of the load `own`.")] = 1024,
    step_times: Annotated[str, typer.Option(help="Model whose published step times are taken.")] = "qwen2.5-7b",
    scales: Annotated[str, typer.Option(help="Comma-separated factors of the published step times.")] = "1,0.25",
    histories: Annotated[str, typer.Option(help="Comma-separated: " + ", ".join(HISTORIES) + ".")] = "full,empty",
    machine: Annotated[bool, typer.Option(help="Run at this machine's own speed instead of virtual time.")] = False,
    repeats: Annotated[int, typer.Option(min=1, help="Runs per method and number of rows, interleaved.")] = 1,
    methods: Annotated[
        str, typer.Option(help="Comma-separated methods besides `none`.")
    ] = f"ngram,suffix,{','.join(BEST)},{SYNCHRONOUS},{RHYME}",
    rows: Annotated[str, typer.Option(help="Comma-separated numbers of concurrent requests. Default: all.")] = "",
    separate_process: Annotated[bool, typer.Option(help="With --machine: the engine core in its own process.")] = False,
    gpu_memory_utilization: Annotated[float, typer.Option(help="With --machine: share of the GPU per engine.")] = 0.15,
    drafter: Annotated[Path, typer.Option(help="Result of bench-drafter, for the best `suffix`.")] = DRAFTER_RESULT,
    quick: Annotated[bool, typer.Option(help="Few rows and prompts, for development.")] = False,
    again: Annotated[bool, typer.Option(help="Repeat what is in the result file.")] = False,
    result: Annotated[
        Path | None, typer.Option(help="Path of the result file; other cells in it are kept. Default: in results.")
    ] = None,
) -> None:
    """Measure rollouts with and without history."""
    loads = chosen_loads(load, policy, trace, history_epochs, max_tokens)
    prompts = chosen_prompts(rows, QUICK_PROMPTS if quick else MACHINE_PROMPTS if machine else PROMPTS)
    path = result or (Path("runs/rollout-quick.json") if quick else RESULTS / "rollout.json")
    known: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")).get("loads", {}) if path.is_file() else {}
    for name, one in loads.items():
        arguments: dict[str, Any] = {"gpu_memory_utilization": gpu_memory_utilization}
        try:
            wanted = speculative_configs([BASELINE, *methods.split(",")], name, drafter)
            if machine:
                cells = [machine_cell(one, prompts)]
            else:
                ways = itertools.product(histories.split(","), map(float, scales.split(",")))
                cells = [virtual_cell(name, one, prompts, step_times, *way) for way in ways]
                arguments = {**VIRTUAL_ARGUMENTS, "max_num_seqs": max(prompts)}
            common = {"trace": one.trace.name, "methods": wanted, "repeats": repeats}
            measured = known.get(name, {})
            missing = [c for c in cells if again or not is_known({**common, **c.facts}, measured.get(c.name))]
        except ValueError as error:
            raise typer.BadParameter(f"{name}: {error}") from None
        if not missing:
            console.print(f"{name}: already in {path}")
            continue
        model = "" if machine else step_times
        settings = engine_settings(wanted, str(one.policy), max_model_len(one), separate_process, arguments, model)
        stack, engines = start_all(settings)
        with stack:
            asynchronous = {method: engine.worker("bench_is_asynchronous") for method, engine in engines.items()}
            for cell in missing:
                console.print(f"{name}, {cell.name}")
                results = measure(engines, list(prompts), cell.load_of, cell.prepare, repeats, cell.warm_up)
                title = f"{name}, epoch {one.history_epochs + 1}, {cell.facts['step_times']}"
                compared = compare(title, results, cell.bars(results))
                facts = {**common, **cell.facts, "asynchronous": asynchronous}
                known.setdefault(name, {})[cell.name] = {**facts, **compared}
                write_result(path, {"loads": known})


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


def chosen_prompts(rows: str, prompts: dict[int, int]) -> dict[int, int]:
    """Return the prompts per run for the numbers of rows that the command line selects."""
    chosen = [int(one) for one in rows.split(",")] if rows else list(prompts)
    unknown = sorted(set(chosen) - set(prompts))
    if unknown:
        raise typer.BadParameter(f"--rows {unknown[0]}: choose from {', '.join(map(str, prompts))}")
    return {count: prompts[count] for count in chosen}


def speculative_configs(names: list[str], load: str, drafter: Path) -> dict[str, dict[str, Any] | None]:
    """Return vLLM's `speculative_config` by method; those of BEST depend on the load's trace."""
    unknown = sorted(set(names) - {*BEST, *METHODS})
    if unknown:
        raise ValueError(f"--methods {unknown[0]}: choose from {', '.join((*METHODS, *BEST))}")
    configs: dict[str, dict[str, Any] | None] = {}
    for name in names:
        config = best_suffix(load, BEST[name], drafter) if name in BEST else METHODS[name]
        same = next((other for other, known in configs.items() if name in BEST and known == config), None)
        if same is None:
            configs[name] = config
        else:
            console.print(f"{load}: {name} has the settings of {same}, so it is not run")
    return configs


def is_known(facts: dict[str, Any], known: dict[str, Any] | None) -> bool:
    """Return whether a cell is in the result file.

    Raises:
        ValueError: it is there, but was measured with other options.
    """
    if known is None:
        return False
    differing = [key for key, value in json.loads(json.dumps(facts)).items() if known.get(key) != value]
    if differing:
        raise ValueError(f"measured with another value of {differing[0]}: use --again, or another --result")
    return True


def virtual_cell(name: str, load: RolloutLoad, prompts: dict[int, int], model: str, history: str, scale: float) -> Cell:
    """Return a load in virtual time.

    Args:
        name: of the load.
        prompts: prompts per run by number of rows, at most.
        model: model with published step times.
        history: one of HISTORIES.
        scale: factor of the step times.
    """
    if history not in HISTORIES:
        raise ValueError(f"--histories {history}: choose from {', '.join(HISTORIES)}")
    steps = load_trace(load.trace, load.history_epochs + 1)
    groups = recorded_groups(steps, load.history_epochs + 1)
    others = recorded_groups(steps, load.history_epochs)
    if not groups or not others:
        raise ValueError(f"{load.trace}: no epoch {load.history_epochs + 1} after its history")
    if history == "empty":
        others = with_shuffled_ids(others)

    def load_of(repeat: int, rows: int) -> Load:
        count = min(prompts[rows], len(groups))
        chosen = [groups[((repeat - 1) * count + index) % len(groups)] for index in range(count)]
        return recorded_load(chosen, rows, load.max_tokens, scale)

    def prepare(engine: Engine, repeat: int, rows: int) -> None:
        known = load.history_epochs if history == "full" else 0
        engine.worker("bench_remember", str(load.trace), max(0, known - 1))
        engine.generate(recorded_load(others[: -(-rows // SAMPLES)], rows, WARM_UP_TOKENS, scale))
        if known:
            engine.worker("bench_remember", str(load.trace), known, known - 1)

    def bars(results: Results) -> dict[str, Any]:
        if RHYME not in results:
            return {}
        found = {"tokens/s / stock, worst number of rows": never_slower_bar(results, NEVER_SLOWER)}
        if history == "full" and scale == 1.0 and name in AT_MANY_ROWS and MANY_ROWS in prompts:
            gain = ratio(results, RHYME, BASELINE, MANY_ROWS)
            found[f"tokens/s / stock at {MANY_ROWS}"] = bar(gain, at_least=AT_MANY_ROWS[name])
        if history == "full" and name == LONGTAIL and SYNCHRONOUS in results:
            for rows, least in ASYNCHRONOUS_GAIN.get(scale, {}).items():
                if rows in prompts:
                    gain = ratio(results, RHYME, SYNCHRONOUS, rows)
                    found[f"tokens/s, asynchronous / synchronous at {rows}"] = bar(gain, at_least=least)
        return found | (peer_bars(results) if history == "full" else {})

    times = f"{LABEL} ({model})" + ("" if scale == 1.0 else f" x {scale:g}")
    return Cell(
        name=f"{history} history, scale {scale:g}",
        facts={
            "step_times": f"{times}, {history} history",
            "answers": "recorded",
            "history_epochs": load.history_epochs if history == "full" else 0,
            "max_tokens": load.max_tokens,
            "prompts": {str(rows): count for rows, count in prompts.items()},
        },
        load_of=load_of,
        prepare=prepare,
        warm_up=False,
        bars=bars,
    )


def machine_cell(load: RolloutLoad, prompts: dict[int, int]) -> Cell:
    """Return a load that its policy generates at this machine's own speed; arguments as for `virtual_cell`."""
    if not load.has_policy or not (load.policy / "model.safetensors").is_file():
        raise ValueError(f"the policy of {load.trace.name} is not here, so it runs in virtual time only")
    steps = load_trace(load.trace, load.history_epochs)
    by_key = {answer.prompt_key: answer.prompt.tolist() for step in steps for answer in step.answers}
    known = list(by_key.values())

    def prompts_from(start: int, count: int) -> list[list[int]]:
        return [known[(start + index) % len(known)] for index in range(count)]

    def load_of(repeat: int, rows: int) -> Load:
        return group_load(prompts_from(repeat * prompts[rows], prompts[rows]), rows, load.max_tokens)

    def prepare(engine: Engine, repeat: int, rows: int) -> None:
        engine.worker("bench_remember", str(load.trace), load.history_epochs)
        others = prompts_from((repeat + 1) * prompts[rows], WARM_UP_PROMPTS[rows])
        engine.generate(group_load(others, rows, load.max_tokens))

    def bars(results: Results) -> dict[str, Any]:
        if RHYME not in results:
            return {}
        found = {"tokens/s / no speculation, worst concurrency": never_slower_bar(results)}
        for rows in results[RHYME]:
            found[f"tokens/s / no speculation at {rows}"] = bar(ratio(results, RHYME, BASELINE, rows), at_least=0.97)
        return found | peer_bars(results)

    return Cell(
        name="machine",
        facts={
            "step_times": "this machine",
            "answers": "sampled",
            "policy": load.policy.name,
            "history_epochs": load.history_epochs,
            "max_tokens": load.max_tokens,
            "prompts": {str(rows): count for rows, count in prompts.items()},
        },
        load_of=load_of,
        prepare=prepare,
        warm_up=True,
        bars=bars,
    )


def peer_bars(results: Results) -> dict[str, Any]:
    """Return the bars for rhyme's tokens/s relative to the fastest settings of `suffix`."""
    if not any(name.startswith(PEER) for name in results):
        return {}
    return {
        f"tokens/s / suffix's best at {rows}": bar(ratio_to_peers(results, rows), at_least=1.0)
        for rows in results[RHYME]
    }


def max_model_len(load: RolloutLoad) -> int:
    """Return the model length in tokens that a load needs."""
    steps = load_trace(load.trace, load.history_epochs + 1)
    return max(len(answer.prompt) for step in steps for answer in step.answers) + load.max_tokens + ROOM


if __name__ == "__main__":
    typer.run(main)
