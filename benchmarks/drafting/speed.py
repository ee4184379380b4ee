"""Measures drafters' calls: microseconds per request and step; tokens ingested per second; bytes per history token.

The load is long text with a 3 % edit rate: 8 past answers of 8k tokens per prompt (64k tokens of history per prompt)
and 8 running requests per prompt. All prompts' histories are in memory at every batch size. Each request starts at its
own position within the first 512 tokens of its answer.
"""

from __future__ import annotations

import gc
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from multiprocessing import get_context
from typing import Any

import numpy as np
import psutil

from benchmarks.common.result_files import spread
from benchmarks.drafting.drafters import ArcticDrafter, NgramDrafter, RhymeDrafter, group_by_prompt, preload
from benchmarks.drafting.replay import Replay, Request, TraceStep, width_of
from benchmarks.drafting.synthetic import SyntheticTrace
from rhyme_verl.config import SpecConfig

BATCHES = (1, 16, 64, 256, 1024)
HISTORY_SAMPLES = 8
ANSWER_TOKENS = 8192
MAX_DRAFT_TOKENS = SpecConfig().max_draft_tokens
MAX_START = 512  # Arctic is slow to start a request with more tokens
WARM_UP_STEPS = 4
INGEST_EPOCHS = 4  # one more than rhyme keeps, so that eviction is measured, too

Makers = dict[str, Callable[[int], Any]]  # name -> drafter for a given model length


def speed_trace(num_prompts: int, num_epochs: int = 1) -> list[TraceStep]:
    """Return steps with HISTORY_SAMPLES answers per prompt, to be used as history."""
    return _trace(num_prompts, num_epochs, HISTORY_SAMPLES).steps()


def draft_seconds(
    makers: Makers, num_prompts: int, num_steps: int, repeats: int
) -> dict[str, dict[int, dict[str, Any]]]:
    """Return `spread`s of us per request and step, by drafter and batch; a run counts with the median of its steps."""
    samples = max(HISTORY_SAMPLES, -(-max(BATCHES) // num_prompts))
    earlier, running = _trace(num_prompts, 2, samples).steps()
    history = replace(earlier, answers=[answer for answer in earlier.answers if answer.sample < HISTORY_SAMPLES])
    width = width_of([history, running])
    drafters = {name: make(width) for name, make in makers.items()}
    for drafter in drafters.values():
        preload(drafter, history)
    runs: dict[str, dict[int, list[float]]] = {name: {batch: [] for batch in BATCHES} for name in drafters}
    for repeat in range(repeats):
        for batch in BATCHES:
            for name in drafters if repeat % 2 else reversed(drafters):
                requests = _running_requests(running, num_prompts, batch, repeat)
                seconds = _step_seconds(drafters[name], requests, width, num_steps)
                runs[name][batch].append(1e6 * float(np.median(seconds)) / batch)
    return {name: {batch: spread(values) for batch, values in row.items()} for name, row in runs.items()}


def _step_seconds(drafter: Any, requests: deque[Request], width: int, num_steps: int) -> list[float]:
    """Return the seconds of each call that drafts for `requests`, which the drafter forgets afterwards."""
    engine = Replay(drafter, len(requests), width)
    engine.admit(requests)
    seconds = []
    gc.disable()
    for _ in range(WARM_UP_STEPS + num_steps):
        before = engine.totals.draft_seconds
        engine.engine_step()
        seconds.append(engine.totals.draft_seconds - before)
    gc.enable()
    if not isinstance(drafter, NgramDrafter):
        drafter.forget()
    return seconds[WARM_UP_STEPS:]


def _trace(num_prompts: int, num_epochs: int, num_samples: int) -> SyntheticTrace:
    return SyntheticTrace(
        edit_rate=0.03,
        num_prompts=num_prompts,
        num_samples=num_samples,
        num_epochs=num_epochs,
        min_tokens=ANSWER_TOKENS,
        max_tokens=ANSWER_TOKENS,
        seed=7,
    )


def _running_requests(step: TraceStep, num_prompts: int, batch: int, repeat: int) -> deque[Request]:
    """Return `batch` requests at different positions: 8 per prompt, then 8 others per prompt, and so on."""
    rng = np.random.default_rng([repeat, batch])
    groups = list(group_by_prompt(step).values())
    requests: deque[Request] = deque()
    for row in range(batch):
        rounds, index = divmod(row, HISTORY_SAMPLES * num_prompts)
        prompt, sample = divmod(index, HISTORY_SAMPLES)
        answer = groups[prompt][rounds * HISTORY_SAMPLES + sample]
        start = int(rng.integers(1, MAX_START))
        requests.append(Request(f"run{repeat}-{batch}-{row}", answer, num_first_tokens=start))
    return requests


def ingest(makers: Makers, steps: list[TraceStep], repeats: int, one_by_one: bool) -> dict[str, dict[str, Any]]:
    """Return `spread`s of tokens ingested per CPU second, by drafter.

    The answers to a prompt in a step arrive together, as from the store, or with `one_by_one` each by itself.
    """
    if one_by_one:
        steps = [replace(step, answers=[answer]) for step in steps for answer in step.answers]
    tokens = sum(len(answer.tokens) for step in steps for answer in step.answers)
    runs: dict[str, list[float]] = {name: [] for name in makers}
    for repeat in range(repeats):
        for name in list(makers) if repeat % 2 else list(reversed(makers)):
            drafter = makers[name](width_of(steps))
            started = time.process_time()
            for step in steps:
                preload(drafter, step)
            runs[name].append(tokens / (time.process_time() - started))
    return {name: spread(values) for name, values in runs.items()}


def memory(maker: Callable[[int], Any], num_prompts: int) -> dict[str, float]:
    """Return bytes per history token: the growth of a fresh process's memory, and the drafter's own count."""
    with get_context("spawn").Pool(1) as pool:
        return pool.apply(_memory_here, (maker, num_prompts))


def _memory_here(maker: Callable[[int], Any], num_prompts: int) -> dict[str, float]:
    steps = speed_trace(num_prompts, num_epochs=3)
    drafter = maker(width_of(steps))
    one_answer = replace(steps[0], answers=steps[0].answers[:1])
    preload(maker(width_of(steps)), one_answer)  # what the first call loads is not history
    gc.collect()
    before = psutil.Process().memory_info().rss
    for step in steps:
        preload(drafter, step)
    gc.collect()
    growth = psutil.Process().memory_info().rss - before
    tokens = sum(len(answer.tokens) for step in steps for answer in step.answers)
    counted = drafter.history_bytes()
    return {"history_tokens": tokens, "rss_bytes_per_token": growth / tokens, "own_bytes_per_token": counted / tokens}


def rhyme(width: int) -> RhymeDrafter:
    return RhymeDrafter(MAX_DRAFT_TOKENS, width, policy="fixed")


def arctic_24(width: int) -> ArcticDrafter:
    return ArcticDrafter(MAX_DRAFT_TOKENS, width, max_tree_depth=24)


def arctic_64(width: int) -> ArcticDrafter:
    return ArcticDrafter(MAX_DRAFT_TOKENS, width, max_tree_depth=64)


def ngram(width: int) -> NgramDrafter:
    return NgramDrafter(MAX_DRAFT_TOKENS, width, max(BATCHES))


REMEMBERING: Makers = {"rhyme": rhyme, "arctic-24": arctic_24, "arctic-64": arctic_64}
ALL: Makers = {**REMEMBERING, "ngram": ngram}
