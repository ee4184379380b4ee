"""`rhyme calibrate`: measures the time of an engine step by the number of running sequences.

A vLLM engine generates short and long answers to the same prompts; the difference in time is that of decode steps
alone. Only `VllmEngine` uses vLLM, which is imported when an engine starts.
"""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Protocol

import numpy as np
import typer

WARM_UP_TOKENS = 4  # tokens per answer that are not measured, because they include the prefill
PREFILL_PROMPTS = 4  # prompts per prefill measurement
SHORT_PREFILL = 0.25  # length of the short prompts as a fraction of the context; the difference is measured


class Engine(Protocol):
    """The engine to measure."""

    vocabulary: int

    def seconds(self, prompts: list[list[int]], tokens: int) -> float:
        """Return the seconds that the engine takes to answer all prompts concurrently, with `tokens` tokens each."""


class VllmEngine:
    """A vLLM engine without prefix caching.

    Args:
        model: path or hub name.
        max_model_len: maximum length of prompt and answer together, in tokens.
        max_running: maximum number of concurrent sequences.
        engine_kwargs: further arguments of vLLM's `LLM`, as in verl's `rollout.engine_kwargs.vllm`.
    """

    def __init__(self, model: str, max_model_len: int, max_running: int, engine_kwargs: dict[str, Any]) -> None:
        from vllm import LLM

        arguments = {"max_model_len": max_model_len, "max_num_seqs": max_running, "enable_prefix_caching": False}
        self._llm = LLM(model=model, **arguments | engine_kwargs)
        self.vocabulary = self._llm.llm_engine.model_config.get_vocab_size()

    def seconds(self, prompts: list[list[int]], tokens: int) -> float:
        from vllm import SamplingParams, TokensPrompt

        parameters = SamplingParams(temperature=1.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        inputs = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
        started = time.perf_counter()
        self._llm.generate(inputs, parameters, use_tqdm=False)
        return time.perf_counter() - started


@dataclass(frozen=True, kw_only=True)
class Points:
    """The points at which the cost of a step is measured.

    Attributes:
        running: numbers of running sequences, ascending.
        contexts: context lengths in tokens; costs are averaged over them.
        steps: decode steps measured per run.
        repeats: runs per point after one warm-up run; the median is used.
    """

    running: list[int]
    contexts: list[int]
    steps: int
    repeats: int

    @property
    def max_model_len(self) -> int:
        return max(self.contexts) + WARM_UP_TOKENS + self.steps


def measure(engine: Engine, points: Points) -> dict[str, Any]:
    """Return the content of a step-cost table: running, ms, ms_by_context (all runs) and prefill_us_per_token."""
    rng = np.random.default_rng(0)

    def prompts(number: int, tokens: int) -> list[list[int]]:
        found: list[list[int]] = rng.integers(0, engine.vocabulary, size=(number, tokens)).tolist()
        return found

    def step_ms(running: int, context: int) -> float:
        batch = prompts(running, context)
        short = engine.seconds(batch, WARM_UP_TOKENS)
        return 1e3 * (engine.seconds(batch, WARM_UP_TOKENS + points.steps) - short) / points.steps

    def prefill_us(context: int) -> float:
        short = max(1, round(SHORT_PREFILL * context))
        seconds = [engine.seconds(prompts(PREFILL_PROMPTS, tokens), 1) for tokens in (short, context)]
        return 1e6 * (seconds[1] - seconds[0]) / (PREFILL_PROMPTS * (context - short))

    runs: dict[int, list[list[float]]] = {context: [[] for _ in points.running] for context in points.contexts}
    prefills: list[float] = []
    for repeat in range(points.repeats + 1):
        for context in points.contexts:
            for index, running in enumerate(points.running):
                cost = step_ms(running, context)
                if repeat:
                    runs[context][index].append(cost)
        cost = prefill_us(max(points.contexts))
        if repeat:
            prefills.append(cost)
    medians = np.array([[statistics.median(costs) for costs in runs[context]] for context in points.contexts])
    return {
        "running": points.running,
        "ms": medians.mean(axis=0).tolist(),
        "prefill_us_per_token": max(0.0, statistics.median(prefills)),
        "prefill_us_per_token_runs": prefills,
        "ms_by_context": {str(context): runs[context] for context in points.contexts},
    }


def powers_of_two(most: int) -> list[int]:
    """Return 1, 2, 4 ... below `most`, and `most`."""
    return [2**power for power in range(most.bit_length()) if 2**power < most] + [most]


def calibrate(
    model: Annotated[str, typer.Argument(help="Path or hub name of the policy.")],
    out: Annotated[Path, typer.Option(help="Output file.")] = Path("step_cost.json"),
    max_running: Annotated[
        int, typer.Option(min=1, help="Maximum number of running sequences; powers of two up to it are measured.")
    ] = 64,
    context: Annotated[
        list[int] | None, typer.Option(min=8, help="Context length in tokens; averaged if repeated [default: 512].")
    ] = None,
    steps: Annotated[int, typer.Option(min=8, help="Decode steps per run.")] = 64,
    repeats: Annotated[int, typer.Option(min=1, help="Runs per point; the median is used.")] = 3,
    engine_kwargs: Annotated[
        str, typer.Option(help="Arguments of vLLM's LLM as JSON, for example '{\"tensor_parallel_size\": 2}'.")
    ] = "{}",
) -> None:
    """Measure the time of a vLLM engine step by the number of running sequences, and the time of prefill.

    Run it on the devices of one replica, with the engine settings of the job. `rhyme simulate --step-cost` reads the
    table.
    """
    try:
        arguments = dict(json.loads(engine_kwargs))
    except (ValueError, TypeError) as error:
        raise typer.BadParameter(f"--engine-kwargs: give a JSON object: {error}") from error
    points = Points(running=powers_of_two(max_running), contexts=context or [512], steps=steps, repeats=repeats)
    engine = VllmEngine(model, points.max_model_len, max_running, arguments)
    content = {"model": model, "engine_kwargs": arguments, "vllm": version("vllm"), **measure(engine, points)}
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    for running, milliseconds in zip(content["running"], content["ms"], strict=True):
        typer.echo(f"{running:5d} running: {milliseconds:8.3f} ms per step")
    typer.echo(f"prefill: {content['prefill_us_per_token']:.1f} µs per token")
    typer.echo(f"wrote {out}")
