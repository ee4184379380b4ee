"""Asks a vLLM server with HistoSpec the same questions repeatedly, and sends it the finished answers as history.

In verl, the rollout server does this: it binds the drafter once, and sends it every finished answer. Without finished
answers, the server drafts from running answers to the same prompt and from counts over all prompts.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Annotated, Any

import httpx
import numpy as np
import typer
from rhyme_verl._core import prompt_key

from examples.quickstart.problems import make_problem
from rhyme_verl.history.answers import Answer, AnswerBatch
from rhyme_verl.history.feed import AnswerPublisher

TIMEOUT_SECONDS = 600.0


def main(
    url: Annotated[str, typer.Option(help="Address of the server.")] = "http://127.0.0.1:8000",
    questions: Annotated[int, typer.Option(min=1, help="Number of quickstart problems.")] = 8,
    samples: Annotated[int, typer.Option(min=1, help="Answers per problem.")] = 4,
    rounds: Annotated[int, typer.Option(min=1, help="Number of rounds over all problems.")] = 3,
    max_tokens: Annotated[int, typer.Option(min=1, help="Maximum length of an answer in tokens.")] = 400,
    remember: Annotated[bool, typer.Option(help="Whether finished answers become history.")] = True,
) -> None:
    """Ask all questions in every round, and print drafting statistics per round."""
    publisher = AnswerPublisher()
    with httpx.Client(base_url=url, timeout=TIMEOUT_SECONDS) as server:
        model = server.get("/v1/models").raise_for_status().json()["data"][0]["id"]
        bind = asyncio.to_thread(call_workers, server, "rhyme_bind", asdict(publisher.address))
        bound = asyncio.run(publisher.accept(bind))
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
    """Call a method of all workers of the engine, and return their results."""
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
    """Return finished answers as a batch for the engine; answers with a higher `turn` are newer."""
    answers = [
        Answer(answer_id=secrets.randbits(64), step=turn, tokens=tokens.tobytes(), rollout=turn)
        for tokens in completions
    ]
    return AnswerBatch.of(prompt_key(prompt), turn, answers)


def describe(totals: dict[str, float], before: dict[str, float], seconds: float) -> str:
    """Return one line on what was generated, drafted and accepted since `before`."""
    tokens, drafts, drafted, accepted = (
        totals[name] - before.get(name, 0)
        for name in ("num_generated_tokens", "num_drafts", "num_draft_tokens", "num_accepted_tokens")
    )
    return (
        f"{tokens:,.0f} tokens in {seconds:.1f} s; {accepted / max(drafts, 1):.1f} accepted per draft, "
        f"{accepted / max(drafted, 1):.0%} of draft tokens; {totals['history_tokens']:,.0f} tokens of history"
    )


if __name__ == "__main__":
    typer.run(main)
