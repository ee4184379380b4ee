"""Checks rhyme on one GPU in about 25 minutes: contract tests, cost of steps, and whole engines against stock vLLM.

Each part takes at most 8 minutes and resumes after an interruption; gpu_check.sh runs them. Weights are random, so
nothing is downloaded; acceptance is therefore planted and labelled as such (planted_drafter.py). The peer is vLLM as
verl runs it, with all CUDA graphs and asynchronous scheduling, which vLLM does not offer with a `custom_class` drafter.
On a GPU, the engine core runs in a separate process. All engines return log-probs, as in verl.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.table import Table

from benchmarks.common.result_files import RESULTS, console, spread, write_result
from benchmarks.drafting.planted_drafter import ALLOWED_TOKEN
from benchmarks.engines.process import PLANTED_PROPOSER, Engine, EngineSettings, Load, start_all
from benchmarks.engines.shapes import write as write_shape
from benchmarks.engines.step_cost import FIXED_DRAFTER, PROMPT_TOKENS, UNWRITTEN_TOKEN, step_seconds
from rhyme_verl.histospec.engine_arguments import speculative_config

CONTRACT = (
    "histospec/test_exactness",
    "histospec/test_engine_states",
    "histospec/test_step_bound",
    "platforms/test_cpu_sampling",
    "history/test_feed",
)
CONTRACT_SECONDS = 480
VERLS_GRAPHS = "FULL_AND_PIECEWISE"
ACCEPTED = (0.5, 1.5, 2.5)
RUNS = Path(os.environ.get("RHYME_GPU_CHECK_RUNS", RESULTS.parents[1] / "runs/gpu_check"))

app = typer.Typer(no_args_is_help=True, help=__doc__)


@dataclass(frozen=True, kw_only=True)
class Scale:
    """The extent of the measurements on a device.

    Attributes:
        shapes: model names from benchmarks.engines.shapes; None: the quickstart policy.
        graphs: CUDA graph modes in which steps are measured.
        rows: batch sizes.
        draft_tokens: draft lengths for the cost of steps, and maximum draft lengths (K) for whole engines.
        steps: number of measured engine steps per run.
        answer_tokens: tokens per answer in runs of whole engines.
        separate_process: whether vLLM's engine core runs in a separate process, as in verl.
        arguments: vLLM arguments for every engine.
    """

    shapes: tuple[str | None, ...]
    graphs: tuple[str, ...]
    rows: tuple[int, ...]
    draft_tokens: tuple[int, ...]
    steps: int
    answer_tokens: int
    repeats: int
    separate_process: bool
    arguments: Mapping[str, Any]


SCALES = {
    "cuda": Scale(
        shapes=("qwen2.5-0.5b", "qwen2.5-7b"),
        graphs=("PIECEWISE", "FULL", VERLS_GRAPHS),
        rows=(1, 8, 64, 256),
        draft_tokens=(7, 15, 24),
        steps=48,
        answer_tokens=256,
        repeats=2,
        separate_process=True,
        arguments={"load_format": "dummy", "gpu_memory_utilization": 0.2, "max_num_seqs": 256},
    ),
    "cpu": Scale(
        shapes=(None,),
        graphs=("PIECEWISE",),
        rows=(4,),
        draft_tokens=(3,),
        steps=16,
        answer_tokens=64,
        repeats=1,
        separate_process=False,
        arguments={"gpu_memory_utilization": 0.1, "max_num_seqs": 16},
    ),
}
Device = Annotated[str, typer.Option(help="`cuda`, or `cpu` to try the check itself with a tiny model.")]
Again = Annotated[bool, typer.Option(help="Repeat measurements that are done.")]


@app.command()
def contract(device: Device = "cuda") -> None:
    """Run the contract tests with the installed vLLM."""
    tests = [f"tests/{name}.py" for name in CONTRACT]
    report = RUNS / f"{device}-contract.xml"
    report.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *tests]
    try:
        code = subprocess.run(command, timeout=CONTRACT_SECONDS).returncode
    except subprocess.TimeoutExpired:
        code = -1
    _keep(device, "contract", {"exit_code": code, "tests": tests})
    raise typer.Exit(code != 0)


@app.command()
def steps(device: Device = "cuda", again: Again = False) -> None:
    """Measure the cost of steps by rows, draft length and CUDA graph mode."""
    _measure("steps", _steps, device, again)


@app.command()
def rollout(device: Device = "cuda", again: Again = False) -> None:
    """Measure whole engines at planted acceptance against stock vLLM."""
    _measure("rollout", _rollout, device, again)


@app.command()
def table(
    device: Device = "cuda",
    result: Annotated[Path | None, typer.Option(help="Path of the result file. Default on a GPU: results.")] = None,
) -> None:
    """Print all measurements and write the result file."""
    known = _known(device)
    if not known:
        raise typer.BadParameter(f"{RUNS}: no measurements here: run the parts steps and rollout first")
    for name, one in known.items():
        if name.startswith("steps"):
            console.print(_steps_table(name, one))
        elif name.startswith("rollout"):
            console.print(_rollout_table(name, one))
    label = "acceptance is planted, weights are random" if device == "cuda" else "no GPU: the check itself was tried"
    chosen = result or (RESULTS if device == "cuda" else RUNS) / "gpu_check.json"
    write_result(chosen, {"device": device, "label": label, "parts": known})


def _measure(part: str, measure: Callable[[Scale, EngineSettings], dict[str, Any]], device: str, again: bool) -> None:
    """Measure a part for each shape whose result is missing."""
    scale = _scale(device)
    for shape in scale.shapes:
        name = f"{part} {shape or 'quickstart'}"
        if again or name not in _known(device):
            _keep(device, name, measure(scale, _settings(scale, shape)))


def _steps(scale: Scale, settings: EngineSettings) -> dict[str, Any]:
    fixed = {"method": "custom_class", "model": FIXED_DRAFTER, "num_speculative_tokens": max(scale.draft_tokens)}
    drafting = replace(settings, speculative=fixed)
    engines = {"stock": _with_graphs(settings, VERLS_GRAPHS)}
    engines |= {mode: _with_graphs(drafting, mode) for mode in scale.graphs}
    prompts = _prompts(max(scale.rows))
    stack, started = start_all(engines)
    found: dict[str, dict[str, dict[str, Any]]] = {name: {} for name in engines}
    with stack:
        for name, engine in started.items():
            lengths = (0,) if name == "stock" else (0, *scale.draft_tokens)
            for rows, drafted in itertools.product(scale.rows, lengths):
                if name != "stock":
                    engine.worker("bench_draft", drafted, UNWRITTEN_TOKEN)
                costs = [step_seconds(engine, prompts[:rows], scale.steps) for _ in range(scale.repeats + 1)]
                found[name][f"{rows} rows, {drafted} drafted"] = spread([1e3 * cost for cost in costs[1:]])
                console.print(f"{name}, {rows} rows, {drafted} drafted: {1e3 * costs[-1]:.2f} ms")
        graphs = {name: engine.worker("bench_graphs") for name, engine in started.items()}
    return {"milliseconds": found, "cudagraph_mode": graphs}


def _rollout(scale: Scale, settings: EngineSettings) -> dict[str, Any]:
    engines = {"stock": _with_graphs(settings, VERLS_GRAPHS)}
    for longest in scale.draft_tokens:
        planted = {**speculative_config(longest), "model": PLANTED_PROPOSER}
        engines[f"K = {longest}"] = _with_graphs(replace(settings, speculative=planted), "PIECEWISE")
    prompts = _prompts(max(scale.rows))
    stack, started = start_all(engines)
    found: dict[str, list[dict[str, float]]] = {}
    with stack:
        for rows, repeat in itertools.product(scale.rows, range(scale.repeats + 1)):
            for name, engine in started.items():
                for accepted in (0.0,) if name == "stock" else (0.0, *ACCEPTED):
                    load = _load(scale, prompts[:rows])
                    run = _run(engine, load, None if name == "stock" else accepted)
                    if repeat:  # the first round warms up
                        found.setdefault(f"{name}, {rows} rows, {accepted} accepted", []).append(run)
    return {"runs": found, "answer_tokens": scale.answer_tokens}


def _load(scale: Scale, prompts: list[list[int]]) -> Load:
    return Load(
        prompts=prompts,
        concurrency=len(prompts),
        max_tokens=scale.answer_tokens,
        ignore_eos=True,
        log_probs=True,
        only_token=ALLOWED_TOKEN,
    )


def _run(engine: Engine, load: Load, accepted: float | None) -> dict[str, float]:
    if accepted is not None:
        engine.worker("bench_plant", accepted)
    return engine.generate(load)


def _steps_table(name: str, one: Mapping[str, Any]) -> Table:
    engines = list(one["milliseconds"])
    points = list(one["milliseconds"][engines[-1]])
    result = Table(title=f"{name}: ms of an engine step (medians); stock is vLLM without a drafter")
    for heading in ("", *engines):
        result.add_column(heading, justify="right")
    for point in points:
        cells = [one["milliseconds"][engine].get(point) for engine in engines]
        result.add_row(point, *("" if cell is None else f"{cell['median']:.2f}" for cell in cells))
    return result


def _rollout_table(name: str, one: Mapping[str, Any]) -> Table:
    result = Table(title=f"{name}: tokens/s with planted acceptance, and ratio to stock vLLM with the same rows")
    for heading in ("", "tokens/s", "ratio", "accepted per verification"):
        result.add_column(heading, justify="right")
    medians = {point: float(np.median([run["tokens_per_s"] for run in runs])) for point, runs in one["runs"].items()}
    for point, median in medians.items():
        rows = point.split(", ")[1]
        runs = one["runs"][point]
        drafts, accepted = (sum(run[key] for run in runs) for key in ("drafts", "accepted"))
        ratio = median / medians[f"stock, {rows}, 0.0 accepted"]
        result.add_row(point, f"{median:,.0f}", f"{ratio:.2f}", f"{accepted / drafts:.2f}" if drafts else "-")
    return result


def _scale(device: str) -> Scale:
    if device not in SCALES:
        raise typer.BadParameter(f"--device {device}: choose from {', '.join(SCALES)}")
    return SCALES[device]


def _settings(scale: Scale, shape: str | None) -> EngineSettings:
    model = "examples/quickstart/policy" if shape is None else str(write_shape(RUNS / "shapes", shape))
    length = PROMPT_TOKENS + 8 + max(scale.answer_tokens, scale.steps)
    return EngineSettings(
        model=model,
        max_model_len=length,
        arguments=dict(scale.arguments),
        separate_process=scale.separate_process,
    )


def _with_graphs(settings: EngineSettings, mode: str) -> EngineSettings:
    return replace(settings, arguments={**settings.arguments, "compilation_config": {"cudagraph_mode": mode}})


def _prompts(count: int) -> list[list[int]]:
    return np.random.default_rng(0).integers(7, 170, size=(count, PROMPT_TOKENS)).tolist()


def _known(device: str) -> dict[str, Any]:
    return {
        path.stem.removeprefix(f"{device}-"): json.loads(path.read_text(encoding="utf-8"))
        for path in sorted(RUNS.glob(f"{device}-*.json"))
    }


def _keep(device: str, name: str, content: dict[str, Any]) -> None:
    write_result(RUNS / f"{device}-{name}.json", content)


if __name__ == "__main__":
    app()
