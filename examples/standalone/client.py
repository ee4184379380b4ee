"""Asks a vLLM server with HistoSpec the same questions again and again, and lets it remember its answers.

In verl the rollout server does what this does: it binds the drafter once, and sends it every finished answer. Left out,
the server still drafts from running answers to the same prompt and from counts over all prompts.
"""

from __future__ import annotations

import secrets
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Annotated, Any

import httpx
import numpy as np
import typer
from rhyme_verl._core import prompt_key

from rhyme_verl.history.answers import Answer, AnswerBatch
from rhyme_verl.history.feed import AnswerPublisher
from tools.cpu_job.problems import make_problem

TIMEOUT_SECONDS = 600.0


def main(
    url: Annotated[str, typer.Option(help="The server's address.")] = "http://127.0.0.1:8000",
    questions: Annotated[int, typer.Option(min=1, help="How many of the quickstart's problems.")] = 8,
    samples: Annotated[int, typer.Option(min=1, help="Answers to each.")] = 4,
    rounds: Annotated[int, typer.Option(min=1, help="How often all are asked.")] = 3,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 400,
    remember: Annotated[bool, typer.Option(help="Whether finished answers become history.")] = True,
) -> None:
    """Ask, and print what drafting did in each round."""
    publisher = AnswerPublisher()
    with httpx.Client(base_url=url, timeout=TIMEOUT_SECONDS) as server:
        model = server.get("/v1/models").raise_for_status().json()["data"][0]["id"]
        bound = call_workers(server, "rhyme_bind", asdict(publisher.address))
        if "True" not in bound:
            raise typer.BadParameter(f"no worker of the server drafts with HistoSpec ({bound}): see serve.sh")
        before: dict[str, float] = {}
        for turn in range(rounds):
            started = time.perf_counter()
            with ThreadPoolExecutor(questions) as pool:
                answers = list(pool.map(lambda index: ask(server, model, index, samples, max_tokens), range(questions)))
            seconds = time.perf_counter() - started
            if remember:
                for prompt, completions in answers:
                    publisher.publish(as_history(prompt, completions, turn))
            totals = next(worker for worker in call_workers(server, "rhyme_stats") if worker)
            typer.echo(f"round {turn + 1}: {describe(totals, before, seconds)}")
            before = totals
    publisher.close()


def call_workers(server: httpx.Client, method: str, *arguments: Any) -> list[Any]:
    """Call a method of every worker of the engine; returns their answers."""
    body = {"method": method, "args": list(arguments)}
    return server.post("/collective_rpc", json=body).raise_for_status().json()["results"]


def ask(
    server: httpx.Client, model: str, index: int, samples: int, max_tokens: int
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Return the token ids (int32) of a question's prompt and of its answers."""
    request = {
        "model": model,
        "messages": [{"role": "user", "content": make_problem("test", 0, index).question}],
        "n": samples,
        "max_tokens": max_tokens,
        "temperature": 1.0,
        "return_token_ids": True,
    }
    reply = server.post("/v1/chat/completions", json=request).raise_for_status().json()
    prompt = np.asarray(reply["prompt_token_ids"], dtype=np.int32)
    return prompt, [np.asarray(choice["token_ids"], dtype=np.int32) for choice in reply["choices"]]


def as_history(prompt: np.ndarray, completions: list[np.ndarray], turn: int) -> AnswerBatch:
    """Return finished answers in the form in which an engine takes them; `turn` tells older from newer."""
    answers = [Answer(answer_id=secrets.randbits(64), step=turn, tokens=tokens.tobytes()) for tokens in completions]
    return AnswerBatch.of(prompt_key(prompt), turn, answers)


def describe(totals: dict[str, float], before: dict[str, float], seconds: float) -> str:
    """Say in one line what has been generated, drafted and accepted since `before`."""
    tokens, drafts, drafted, accepted = (
        totals[name] - before.get(name, 0)
        for name in ("num_generated_tokens", "num_drafts", "num_draft_tokens", "num_accepted_tokens")
    )
    return (
        f"{tokens:,.0f} tokens in {seconds:.1f} s; {accepted / max(drafts, 1):.1f} accepted a draft, "
        f"{accepted / max(drafted, 1):.0%} of what was drafted; {totals['history_tokens']:,.0f} tokens remembered"
    )


if __name__ == "__main__":
    typer.run(main)
