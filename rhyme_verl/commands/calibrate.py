"""`rhyme calibrate`: what a step of an engine costs by the sequences that run, the table that HistoPipe plans with.

A real vLLM engine generates a short and a long answer to the same number of prompts; the difference is that of decode
steps alone. The engine is the only part that knows vLLM, and it is imported when one is started.
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

WARM_UP_TOKENS = 4  # of an answer, left out: prefills and the first steps
PREFILL_PROMPTS = 4  # at a time
SHORT_PREFILL = 0.25  # of the context; the difference to the whole of it is measured


class Engine(Protocol):
    """What is measured."""

    vocabulary: int

    def seconds(self, prompts: list[list[int]], tokens: int) -> float:
        """Return how long the engine takes for answers of so many tokens to all of these prompts at once."""


class VllmEngine:
    """A vLLM engine without prefix cache.

    Args:
        model: path or name.
        max_model_len: longest prompt and answer in tokens.
        max_running: sequences that run at once.
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
    """Where the cost of a step is measured.

    Attributes:
        running: ascending numbers of sequences.
        contexts: tokens that a sequence has when it is measured; costs are averaged over them.
        steps: of a run's measured part.
        repeats: runs of each point, after one that warms up; the median counts.
    """

    running: list[int]
    contexts: list[int]
    steps: int
    repeats: int

    @property
    def max_model_len(self) -> int:
        return max(self.contexts) + WARM_UP_TOKENS + self.steps


def measure(engine: Engine, points: Points) -> dict[str, Any]:
    """Return the content of a step-cost table: running, ms, ms_by_context (of every run) and prefill_us_per_token."""
    rng = np.random.default_rng(0)

    def prompts(number: int, tokens: int) -> list[list[int]]:
        found: list[list[int]] = rng.integers(0, engine.vocabulary, size=(number, tokens)).tolist()
        return found

    def step_ms(running: int, context: int) -> float:
        some = prompts(running, context)
        short = engine.seconds(some, WARM_UP_TOKENS)
        return 1e3 * (engine.seconds(some, WARM_UP_TOKENS + points.steps) - short) / points.steps

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
    model: Annotated[str, typer.Argument(help="Path or name of the policy.")],
    out: Annotated[Path, typer.Option(help="Where the table goes.")] = Path("step_cost.json"),
    max_running: Annotated[
        int, typer.Option(min=1, help="Most sequences at once; powers of two up to it are measured.")
    ] = 64,
    context: Annotated[
        list[int] | None, typer.Option(min=8, help="Tokens a sequence has (repeatable: the mean is taken); 512.")
    ] = None,
    steps: Annotated[int, typer.Option(min=8, help="Decode steps of a run.")] = 64,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each point; their median counts.")] = 3,
    engine_kwargs: Annotated[
        str, typer.Option(help="Arguments of vLLM's LLM as JSON, for example '{\"tensor_parallel_size\": 2}'.")
    ] = "{}",
) -> None:
    """Measure what a step of a vLLM engine costs by the sequences that run, and what prefill costs.

    Run it on one replica's share of the machine, with the engine settings of the job. `rhyme simulate
    --step-cost` reads the table.
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
        typer.echo(f"{running:5d} running: {milliseconds:8.3f} ms a step")
    typer.echo(f"prefill: {content['prefill_us_per_token']:.1f} µs a token")
    typer.echo(f"wrote {out}")
