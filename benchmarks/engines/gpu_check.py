"""Checks rhyme on one GPU in at most 30 minutes: contract tests, and what a job's engines gain over stock vLLM.

Stock is vLLM with the model runner, scheduling and CUDA graphs that it chooses itself. HistoSpec's engines schedule
synchronously or asynchronously, with the graphs of the default or piecewise ones only. Engines are measured one after
another, each in a process of its own and with the engine core in yet another one, as in verl. Every finished engine is
kept, so a check that was stopped goes on. Weights are random, so nothing is downloaded; acceptance is planted and
labelled as such (planted_drafter.py). All engines return log-probs, as in verl.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import typer
from rich.table import Table

from benchmarks.common.result_files import RESULTS, console, write_result
from benchmarks.drafting.planted_drafter import ALLOWED_TOKEN, accepted_per_draft, plant
from benchmarks.engines import process
from benchmarks.engines.engine_facts import engine_facts
from benchmarks.engines.gpu_advice import ASYNC, DEFAULT, PIECEWISE, STOCK, SYNC, Point, gain_of, name, recommend
from benchmarks.engines.process import Engine, EngineSettings, Load
from benchmarks.engines.shapes import write as write_shape
from rhyme_verl.config import SpecConfig
from rhyme_verl.histospec.engine_arguments import speculative_config

CONTRACT = (
    "histospec/test_exactness",
    "histospec/test_engine_states",
    "histospec/test_step_bound",
    "histospec/test_cuda_graphs",
    "platforms/test_cpu_sampling",
    "history/test_feed",
)
CONTRACT_SECONDS = 280
SHORT_PROMPT = 64  # tokens
SHORT_ANSWER = 8  # tokens; subtracted from long runs with long prompts
RUNS = Path(os.environ.get("RHYME_GPU_CHECK_RUNS", RESULTS.parents[1] / "runs/gpu_check"))

app = typer.Typer(no_args_is_help=True, help=__doc__)


@dataclass(frozen=True, kw_only=True)
class LongContext:
    """Measurements with long prompts, where a draft may slow the attention of all requests."""

    rows: tuple[int, ...]
    prompt_tokens: int
    answer_tokens: int
    engines: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Scale:
    """The extent of the measurements on a device.

    Attributes:
        models: names from benchmarks.engines.shapes by part of the check; None: the quickstart policy.
        engines: in the order in which they are measured.
        rows: batch sizes.
        accepted: planted acceptance, in tokens per verification.
        answer_tokens: tokens per answer.
        repeats: number of runs per point, after one that warms up.
        arguments: vLLM's arguments for every engine.
    """

    models: Mapping[str, str | None]
    engines: tuple[str, ...]
    rows: tuple[int, ...]
    accepted: tuple[float, ...]
    answer_tokens: int
    repeats: int
    long: LongContext
    max_model_len: int
    arguments: Mapping[str, Any] = field(default_factory=dict)


SCALES = {
    "cuda": Scale(
        models={"small": "qwen2.5-0.5b", "large": "qwen2.5-7b"},
        engines=(STOCK, name(ASYNC, DEFAULT), name(ASYNC, PIECEWISE), name(SYNC, DEFAULT), name(SYNC, PIECEWISE)),
        rows=(1, 8, 64, 256),
        accepted=(0.0, 1.0, 2.5),
        answer_tokens=192,
        repeats=2,
        long=LongContext(
            rows=(1, 4),
            prompt_tokens=32_000,
            answer_tokens=512,
            engines=(STOCK, name(ASYNC, DEFAULT), name(ASYNC, PIECEWISE)),
        ),
        max_model_len=32_768,
        arguments={
            "load_format": "dummy",
            "gpu_memory_utilization": 0.6,  # a trainer has the rest in many jobs; holds 7B and its cache on 40 GB
            "max_num_seqs": 256,
            "max_num_batched_tokens": 8192,
            "logprobs_mode": "processed_logprobs",
        },
    ),
    "cpu": Scale(
        models={"small": None},
        engines=(STOCK, name(ASYNC, DEFAULT), name(SYNC, DEFAULT)),
        rows=(1, 4),
        accepted=(0.0, 2.5),
        answer_tokens=48,
        repeats=1,
        long=LongContext(rows=(1,), prompt_tokens=128, answer_tokens=32, engines=(STOCK, name(ASYNC, DEFAULT))),
        max_model_len=256,
        arguments={"gpu_memory_utilization": 0.1, "max_num_seqs": 16, "enforce_eager": True},
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
def small(device: Device = "cuda", again: Again = False) -> None:
    """Measure all engines with the small model, whose steps are short: host time counts most."""
    _measure_model(device, "small", again)


@app.command()
def large(device: Device = "cuda", again: Again = False) -> None:
    """Measure all engines with the large model."""
    _measure_model(device, "large", again)


@app.command()
def table(
    device: Device = "cuda",
    result: Annotated[Path | None, typer.Option(help="Path of the result file. Default on a GPU: results.")] = None,
) -> None:
    """Print all measurements and the settings that they speak for, and write the result file."""
    known = {file: content for file, content in _known(device).items() if "points" in content}
    if not known:
        raise typer.BadParameter(f"{RUNS}: no measurements here: run the parts small and large first")
    speeds: dict[str, dict[Point, float]] = {}
    for content in known.values():
        for point in content["points"]:
            measured = Point(**point["at"])
            speeds.setdefault(content["engine"], {})[measured] = median(point["tokens_per_s"])
    console.print(_engines_table(known))
    console.print(_speeds_table(speeds))
    advice = recommend(speeds)
    for one in advice:
        console.print(f"actor_rollout_ref.rollout.{one.setting}={one.value}\n    {one.reason}", highlight=False)
    label = "acceptance is planted, weights are random" if device == "cuda" else "no GPU: the check itself was tried"
    chosen = result or (RESULTS if device == "cuda" else RUNS) / "gpu_check.json"
    recommended = [asdict(one) for one in advice]
    write_result(chosen, {"device": device, "label": label, "parts": _known(device), "recommended": recommended})


def _measure_model(device: str, part: str, again: bool) -> None:
    """Measure the engines of a part that are missing."""
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # engine processes get functions to call
    scale = _scale(device)
    if part not in scale.models:
        return console.print(f"{part}: not on a {device}")
    model = scale.models[part]
    for engine in scale.engines:
        file = f"{model or 'quickstart'}, {engine}"
        if not again and file in _known(device):
            continue
        settings = _settings(scale, model, engine)
        with (_AsyncOnCpu if device == "cpu" else Engine)(settings) as running:
            running.wait_until_ready()
            facts = running.worker(engine_facts)  # type: ignore[arg-type]  # vLLM calls functions, too
            console.print(f"{file}: {facts}")
            points = list(_points(scale, model or "quickstart", engine, running))
        _keep(device, file, {"engine": engine, "facts": facts, "points": points})


def _points(scale: Scale, model: str, engine: str, running: Engine) -> Iterator[dict[str, Any]]:
    """Measure an engine; yields the runs at each point."""
    acceptance = (0.0,) if engine == STOCK else scale.accepted
    for rows in scale.rows:
        load = _load(rows, SHORT_PROMPT, scale.answer_tokens)
        _run(running, load, engine, acceptance[-1])
        for accepted in acceptance:
            at = Point(model=model, rows=rows, context=SHORT_PROMPT, accepted=accepted)
            runs = [_run(running, load, engine, accepted) for _ in range(scale.repeats)]
            yield _point(at, [load.max_tokens * rows / seconds for seconds, _ in runs], runs[-1][1])
    if engine not in scale.long.engines:
        return
    for rows in scale.long.rows:
        short = _load(rows, scale.long.prompt_tokens, SHORT_ANSWER)
        before = min(_run(running, short, engine, 0.0)[0] for _ in range(2))  # nearly all of it is prefill
        load = replace(short, max_tokens=SHORT_ANSWER + scale.long.answer_tokens)
        for accepted in acceptance:
            at = Point(model=model, rows=rows, context=scale.long.prompt_tokens, accepted=accepted)
            seconds, drafted = _run(running, load, engine, accepted)
            yield _point(at, [scale.long.answer_tokens * rows / max(1e-3, seconds - before)], drafted)


def _point(at: Point, tokens_per_s: list[float], accepted_per_draft: float) -> dict[str, Any]:
    speed = f"{median(tokens_per_s):,.0f} tokens/s, {accepted_per_draft:.2f} accepted per draft"
    console.print(f"  {at.rows} rows x {at.context} tokens, planted {at.accepted}: {speed}", highlight=False)
    return {"at": asdict(at), "tokens_per_s": tokens_per_s, "accepted_per_draft": accepted_per_draft}


def _run(running: Engine, load: Load, engine: str, accepted: float) -> tuple[float, float]:
    """Return a run's seconds and the accepted tokens per draft."""
    if engine == STOCK:
        return running.generate(load)["seconds"], 0.0
    running.worker(plant, accepted)  # type: ignore[arg-type]
    seconds = running.generate(load)["seconds"]
    return seconds, running.worker(accepted_per_draft)  # type: ignore[arg-type]


def _load(rows: int, prompt_tokens: int, answer_tokens: int) -> Load:
    prompts = np.random.default_rng(0).integers(7, 170, size=(rows, prompt_tokens)).tolist()
    return Load(
        prompts=prompts,
        concurrency=rows,
        max_tokens=answer_tokens,
        ignore_eos=True,
        log_probs=True,
        only_token=ALLOWED_TOKEN,
    )


def _settings(scale: Scale, model: str | None, engine: str) -> EngineSettings:
    settings = EngineSettings(
        model="examples/quickstart/policy" if model is None else str(_write_model(model)),
        max_model_len=scale.max_model_len,
        arguments=dict(scale.arguments),
        separate_process=model is not None,
    )
    if engine == STOCK:
        return settings
    scheduling, graphs = engine.split()
    compilation = {"compilation_config": {"cudagraph_mode": "PIECEWISE"}} if graphs == PIECEWISE else {}
    return replace(
        settings,
        speculative=speculative_config(SpecConfig().max_draft_tokens),
        rhyme={"spec": {"async_scheduling": "auto" if scheduling == ASYNC else "off"}},
        arguments={**settings.arguments, **compilation},
    )


def _write_model(shape: str) -> Path:
    """Write a model folder of this shape, as a Llama: for these, vLLM 0.24 chooses its faster runner, too."""
    folder = write_shape(RUNS / "shapes", shape)
    file = folder / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    config |= {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    file.write_text(json.dumps(config, indent=1), encoding="utf-8")
    return folder


class _AsyncOnCpu(Engine):
    """An engine on vLLM's CPU build that schedules as on a GPU."""

    def __init__(self, settings: EngineSettings) -> None:
        context = get_context("spawn")
        self._connection, far_end = context.Pipe()
        self._process = context.Process(target=_serve_on_cpu, args=(settings, far_end))
        self._process.start()
        far_end.close()


def _serve_on_cpu(settings: EngineSettings, connection: Connection) -> None:
    os.environ.update(process.ENVIRONMENT)  # before vLLM is imported
    from tools import cpu_async

    cpu_async.install()
    process._serve(settings, connection)


def _engines_table(known: Mapping[str, Any]) -> Table:
    result = Table(title="engines: what vLLM has chosen")
    for heading in ("", "runner", "scheduling", "CUDA graphs", "attention"):
        result.add_column(heading)
    for file, content in known.items():
        facts = content["facts"]
        graphs = f"{facts['cudagraph_mode']} up to {facts['largest_graph']}"
        scheduling = "asynchronous" if facts["asynchronous"] else "synchronous"
        result.add_row(file, facts["runner"], scheduling, graphs, ", ".join(facts["attention"]))
    return result


def _speeds_table(speeds: Mapping[str, Mapping[Point, float]]) -> Table:
    engines = [engine for engine in speeds if engine != STOCK]
    result = Table(title="tokens/s of stock vLLM, and speed relative to it at planted acceptance")
    for heading in ("model", "rows x context", STOCK, "accepted", *engines):
        result.add_column(heading, justify="right")
    stock = speeds.get(STOCK, {})
    for point in dict.fromkeys(point for engine in engines for point in speeds[engine]):
        plain = stock.get(replace(point, accepted=0.0))
        cells = [speeds[engine].get(point) for engine in engines]
        result.add_row(
            point.model,
            f"{point.rows} x {point.context:,}",
            f"{plain:,.0f}" if plain else "-",
            f"{point.accepted:.1f}",
            *("-" if speed is None or not plain else f"{speed / plain:.2f}" for speed in cells),
        )
    for engine in engines:
        result.caption = (
            result.caption or ""
        ) + f"{engine}: {gain_of(speeds, engine, STOCK):.2f} with nothing drafted  "
    return result


def _scale(device: str) -> Scale:
    if device not in SCALES:
        raise typer.BadParameter(f"--device {device}: choose from {', '.join(SCALES)}")
    return SCALES[device]


def _known(device: str) -> dict[str, Any]:
    return {
        path.stem.removeprefix(f"{device}-"): json.loads(path.read_text(encoding="utf-8"))
        for path in sorted(RUNS.glob(f"{device}-*.json"), key=lambda path: path.stat().st_mtime)
    }


def _keep(device: str, file: str, content: dict[str, Any]) -> None:
    write_result(RUNS / f"{device}-{file}.json", content)


if __name__ == "__main__":
    app()
