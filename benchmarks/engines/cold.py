"""Rollout speed without history: prompts are never repeated, so drafts come from the prompt and running siblings.

The engines are those of rollout.py, at this machine's own speed. Every run has new prompts, so no drafter has an answer
to one of them in its history. A drafter may use the answers to other prompts, as in training. Run by `make bench-cold`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.common.result_files import RESULTS, write_result
from benchmarks.drafting.replay import load_trace
from benchmarks.engines.comparison import (
    CONCURRENCIES,
    PROMPTS,
    Prompts,
    compare,
    engine_settings,
    group_load,
    measure,
    never_slower_bar,
)
from benchmarks.engines.process import METHODS, Load, start_all

MAX_PROMPT_TOKENS = 256
ROOM = 128  # model length beyond the longest answer in tokens, so that no draft is cut short


def main(
    model: Annotated[str, typer.Option(help="Path of the policy.")] = "examples/quickstart/policy",
    trace: Annotated[
        Path | None, typer.Option(help="Use each prompt of this trace once. Default: new quickstart problems.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Maximum tokens per answer.")] = 400,
    repeats: Annotated[int, typer.Option(min=1, help="Runs per method and concurrency, interleaved.")] = 5,
    methods: Annotated[str, typer.Option(help="Comma-separated methods.")] = "none,ngram,suffix,rhyme",
    concurrencies: Annotated[str, typer.Option(help="Comma-separated numbers.")] = ",".join(map(str, CONCURRENCIES)),
    separate_process: Annotated[bool, typer.Option(help="Run vLLM's engine core in a separate process.")] = False,
    gpu_memory_utilization: Annotated[float, typer.Option(help="Share of the GPU per engine.")] = 0.15,
    quick: Annotated[bool, typer.Option(help="Run one repeat at three concurrencies, for development.")] = False,
    result: Annotated[Path, typer.Option(help="Path of the result file.")] = RESULTS / "cold.json",
) -> None:
    """Measure rollouts of prompts that have no history."""
    chosen = (1, 16, 64) if quick else tuple(int(one) for one in concurrencies.split(","))
    unseen = quickstart_prompts() if trace is None else _prompts_of_trace(trace)

    def load_of(repeat: int, concurrency: int) -> Load:
        prompts: Prompts = [prompt for prompt, _ in zip(unseen, range(PROMPTS[concurrency]), strict=False)]
        if len(prompts) < PROMPTS[concurrency]:
            raise typer.BadParameter("--trace has too few prompts for new ones in each run: lower --repeats")
        return group_load(prompts, concurrency, max_tokens, remember=True)

    longest = MAX_PROMPT_TOKENS + max_tokens + ROOM
    configs = {name: METHODS[name] for name in methods.split(",")}
    settings = engine_settings(
        configs, model, longest, separate_process, {"gpu_memory_utilization": gpu_memory_utilization}
    )
    stack, engines = start_all(settings)
    with stack:
        results = measure(engines, chosen, load_of, lambda *_: None, repeats=1 if quick else repeats)
    bars = {"tokens/s / no speculation, worst concurrency": never_slower_bar(results)}
    facts = {
        "model": model,
        "trace": str(trace) if trace else "quickstart problems",
        "max_tokens": max_tokens,
        "separate_process": separate_process,
    }
    write_result(result, {**facts, "methods": configs, **compare("prompts never seen before", results, bars)})


def quickstart_prompts() -> Iterator[list[int]]:
    """Yield the token ids of one quickstart problem after another, without end."""
    from transformers import AutoTokenizer

    from examples.quickstart.policy import SHIPPED_POLICY
    from examples.quickstart.problems import make_problem

    tokenizer = AutoTokenizer.from_pretrained(SHIPPED_POLICY)
    index = 0
    while True:
        message = [{"role": "user", "content": make_problem("test", 1, index).question}]
        tokens: Any = tokenizer.apply_chat_template(
            message, add_generation_prompt=True, tokenize=True, return_dict=False
        )
        yield tokens
        index += 1


def _prompts_of_trace(trace: Path) -> Iterator[list[int]]:
    by_key = {answer.prompt_key: answer.prompt for step in load_trace(trace) for answer in step.answers}
    return (prompt.tolist() for prompt in by_key.values())


if __name__ == "__main__":
    typer.run(main)
