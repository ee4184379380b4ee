"""Memory and longest call of rhyme's drafter for long answers: many siblings, many turns, many preemptions.

The answers are random tokens, some of which siblings share, so nearly all drafts fail and each context is new: the
worst case for the texts of running answers. Each load runs in a process of its own, and memory is what the process
grows by.
"""

from __future__ import annotations

import gc
import time
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from typing import Any

import numpy as np
import psutil

from benchmarks.common.result_files import bar
from rhyme_verl.config import HistoryConfig, RhymeConfig, SpecConfig
from rhyme_verl.histospec.from_config import make_drafter, make_index

PROMPT_TOKENS = 100
VOCABULARY = 152_000
SHARED = 0.8  # of the tokens of siblings
MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Load:
    """Answers that grow by `per_step` tokens per call, as after a draft of which some tokens were accepted.

    Attributes:
        prompts: number of prompts.
        samples: answers per prompt.
        tokens: of each answer at its end.
        per_step: tokens per answer and call.
        turn_tokens: tokens after which all answers are opened anew, as for the next turn or after a preemption.
        begin_at: tokens that each answer has from the beginning.
        max_live_tokens: limit of the drafter; None: its default.
    """

    prompts: int
    samples: int
    tokens: int
    per_step: int = 8
    turn_tokens: int | None = None
    begin_at: int = 0
    max_live_tokens: int | None = None

    @property
    def rows(self) -> int:
        return self.prompts * self.samples


# Name -> load, the largest MiB that it may take, bytes per live token and milliseconds of a call.
LOADS: dict[str, tuple[Load, float | None, float | None, float]] = {
    "256 rows, 16 siblings, 32k tokens": (
        Load(prompts=16, samples=16, tokens=32_000, max_live_tokens=1 << 24),
        None,
        40.0,
        20.0,
    ),
    "16 samples x 20 turns x 1,500 tokens": (
        Load(prompts=1, samples=16, tokens=30_000, turn_tokens=1500, per_step=6),
        40.0,
        None,
        20.0,
    ),
    "an answer of 32k tokens, preempted 100 times": (
        Load(prompts=1, samples=2, tokens=32_800, begin_at=32_000, turn_tokens=8),
        4.0,
        None,
        2.0,
    ),
}
QUICK = Load(prompts=2, samples=2, tokens=600, turn_tokens=200)


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What a load took: growth of the process, and the drafter's calls."""

    mib: float
    live_tokens: int
    median_ms: float
    p99_ms: float
    longest_ms: float

    @property
    def bytes_per_token(self) -> float:
        return self.mib * MIB / max(1, self.live_tokens)


def measure(load: Load) -> Figures:
    """Run a load in a new process."""
    with get_context("spawn").Pool(1) as pool:
        return pool.apply(_measure_here, (load,))


def measure_all(quick: bool) -> dict[str, Figures]:
    """Return the figures of all loads by name."""
    return {name: measure(QUICK if quick else load) for name, (load, *_) in LOADS.items()}


def bars(figures: dict[str, Figures]) -> dict[str, dict[str, Any]]:
    """Return the bars of the loads."""
    found = {}
    for name, (_, mib, bytes_per_token, milliseconds) in LOADS.items():
        one = figures[name]
        if mib is not None:
            found[f"{name}: MiB"] = bar(one.mib, at_most=mib)
        if bytes_per_token is not None:
            found[f"{name}: bytes per live token"] = bar(one.bytes_per_token, at_most=bytes_per_token)
        found[f"{name}: longest call, ms"] = bar(one.longest_ms, at_most=milliseconds)
    return found


def as_content(figures: dict[str, Figures]) -> dict[str, dict[str, float]]:
    """Return the figures as they stand in a result file."""
    return {name: {**asdict(one), "bytes_per_token": one.bytes_per_token} for name, one in figures.items()}


def _measure_here(load: Load) -> Figures:
    config = RhymeConfig(spec=SpecConfig(policy="fixed", num_threads=1), history=HistoryConfig())
    limit = {} if load.max_live_tokens is None else {"max_live_tokens": load.max_live_tokens}
    drafter = make_drafter(make_index(config), config, common=False, **limit)
    texts = _texts(load)
    lengths = np.full(load.rows, PROMPT_TOKENS + 1, np.int32)
    slots = _open(drafter, texts, lengths)
    if load.begin_at:
        lengths += load.begin_at
        for _ in range(200):  # until all of it is searchable
            drafter.draft(texts, lengths, slots, texts.shape[1], 0.0)
    gc.collect()
    before, live_before = psutil.Process().memory_info().rss, drafter.num_live_tokens if load.begin_at else 0
    seconds: list[float] = []
    since_opened = 0
    gc.disable()
    while lengths[0] + load.per_step <= texts.shape[1]:
        if load.turn_tokens is not None and since_opened >= load.turn_tokens:
            for slot in slots.tolist():
                drafter.close(slot)
            slots = _open(drafter, texts, lengths)
            since_opened = 0
        lengths += load.per_step
        since_opened += load.per_step
        started = time.perf_counter()
        drafter.draft(texts, lengths, slots, texts.shape[1], float(len(seconds)))
        seconds.append(time.perf_counter() - started)
    gc.enable()
    problem = drafter.check_integrity()
    if problem:
        raise RuntimeError(f"the drafter's state is wrong: {problem}")
    milliseconds = 1e3 * np.array(seconds)
    return Figures(
        mib=(psutil.Process().memory_info().rss - before) / MIB,
        live_tokens=drafter.num_live_tokens - live_before,
        median_ms=float(np.median(milliseconds)),
        p99_ms=float(np.percentile(milliseconds, 99)),
        longest_ms=float(milliseconds.max()),
    )


def _texts(load: Load) -> np.ndarray:
    """Return prompts with their answers, int32 [rows, tokens]."""
    rng = np.random.default_rng(0)
    width = PROMPT_TOKENS + 1 + load.tokens
    shape = (load.prompts, load.samples, width)
    own = rng.zipf(1.3, shape) % VOCABULARY
    common = rng.zipf(1.3, (load.prompts, 1, width)) % VOCABULARY
    is_common = rng.random(shape) < SHARED
    is_common[:, :, :PROMPT_TOKENS] = True
    return np.where(is_common, common, own).astype(np.int32).reshape(load.rows, width)


def _open(drafter: Any, texts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Open the answers with the tokens that they have, but at first with their prompts only."""
    known = np.where(lengths == PROMPT_TOKENS + 1, PROMPT_TOKENS, lengths)
    return np.array([drafter.open(row[:length].copy()) for row, length in zip(texts, known, strict=True)], np.int32)
