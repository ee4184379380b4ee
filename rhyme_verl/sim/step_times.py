"""Interpolates published times of vLLM steps on an A100, for simulations and emulated engines without a GPU.

Others measured the tables in `step_times/`; the README there describes how. This module needs numpy only and does not
depend on vLLM, torch or Ray.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Collection
from pathlib import Path

import numpy as np

from rhyme_verl.sim.cluster import interpolate_step_seconds

MODELS = {"qwen2.5-7b": "qwen257b.csv", "llama-3.1-8b": "llama318binstruct.csv", "qwen2.5-14b": "qwen2514b.csv"}
FOLDER = Path(__file__).with_name("step_times")
DECODE, VERIFY = "target_decode", "target_verify"  # modes of undrafted and of drafted steps
EDGES = (128, 256, 512)  # total tokens just above which the measured cost jumps
CONTEXT_BUCKET = 32  # contexts are rounded to multiples of this many tokens, so that each curve is computed once

Cells = dict[tuple[int, int], float]  # (context, rows or total tokens) -> seconds
Columns = dict[int, np.ndarray]  # rows or total tokens, ascending -> [2, contexts]: contexts and seconds


class PublishedStepTime:
    """Seconds of an engine step by running sequences, total tokens and context, for one model on one A100.

    Undrafted steps are interpolated by rows. Other steps are interpolated by total tokens between neighbouring `EDGES`,
    so the jumps stay where they were measured. A step with more rows than measured costs as much as its tokens at the
    smallest context, plus what the context of each row adds in the largest measured batch. An instance caches the curve
    of each requested context; it is not thread-safe.

    Args:
        model: one of `MODELS`.
        leave_out: cells of `verified` that are left out, to test how well they are interpolated.

    Attributes:
        verified: measured seconds of drafted steps by (context, total tokens), averaged over batch sizes.

    Raises:
        ValueError: the model is unknown.
    """

    def __init__(self, model: str = "qwen2.5-7b", leave_out: Collection[tuple[int, int]] = ()) -> None:
        if model not in MODELS:
            raise ValueError(f"no published step times of {model!r}: choose from {', '.join(MODELS)}")
        table = FOLDER / MODELS[model]
        self.verified = {cell: seconds for cell, seconds in _read(table, VERIFY).items() if cell not in leave_out}
        assert self.verified, "every measured cell is left out"
        self._decode, self._verify = _by_context(_read(table, DECODE)), _by_context(self.verified)
        self._max_rows = max(self._decode)
        self._min_context = min(context for context, _ in self.verified)
        contexts, seconds = self._decode[self._max_rows]
        growth = (seconds[-1] - seconds[0]) / max(1, contexts[-1] - contexts[0])
        self._row_context_seconds = float(growth) / self._max_rows
        self._curves: dict[int, tuple[list[float], list[float]]] = {}  # by multiple of CONTEXT_BUCKET
        self._shortest = self._curves_at(self._min_context)[1]
        self._shortest_undrafted = np.maximum.accumulate(self._shortest).tolist()

    def seconds(self, rows: int, num_tokens: int, context: float) -> float:
        """Return the seconds of one step.

        Args:
            rows: number of running sequences.
            num_tokens: all tokens that the step computes: one per row, draft tokens and prefill tokens. The step is
                undrafted if `num_tokens` equals `rows`.
            context: mean context tokens per row, rounded to `CONTEXT_BUCKET`.
        """
        assert 0 <= rows <= num_tokens and num_tokens > 0, f"{rows} rows in a step of {num_tokens} tokens"
        bucket = int(context / CONTEXT_BUCKET + 0.5)
        if bucket not in self._curves:
            self._curves[bucket] = self._curves_at(bucket * CONTEXT_BUCKET)
        decode, verify = self._curves[bucket]
        if rows <= self._max_rows:
            undrafted = decode[rows]
            return undrafted if num_tokens == rows else max(undrafted, _along(verify, num_tokens))
        extra = self._row_context_seconds * rows * max(0, bucket * CONTEXT_BUCKET - self._min_context)
        undrafted = max(decode[-1], _along(self._shortest_undrafted, rows) + extra)
        return undrafted if num_tokens == rows else max(undrafted, _along(self._shortest, num_tokens) + extra)

    def step_seconds(self, max_running: int, context: float) -> np.ndarray:
        """Return the seconds of undrafted steps of up to `max_running` sequences, for the simulator.

        There, the cost per sequence never rises with the number of sequences. Above 128 sequences, the cost of a step
        therefore grows proportionally until it reaches the measured cost behind the jump.
        """
        running = np.arange(1, max_running + 1)
        seconds = [self.seconds(rows, rows, context) for rows in running.tolist()]
        return interpolate_step_seconds(running, seconds, max_running)

    def _curves_at(self, context: int) -> tuple[list[float], list[float]]:
        """Return the seconds of undrafted steps of 0, 1, ... rows, and of drafted steps of 0, 1, ... tokens."""
        rows, seconds = _at(self._decode, context)
        decode = np.interp(np.arange(rows[-1] + 1), rows, np.maximum.accumulate(seconds))  # medians vary by 1 %
        return decode.tolist(), _verify_curve(*_at(self._verify, context)).tolist()


def _read(path: Path, mode: str) -> Cells:
    """Return the mean seconds of the steps of one mode by (context, rows or total tokens)."""
    found: dict[tuple[int, int], list[float]] = defaultdict(list)
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if row["mode"] == mode and (batch := int(row["batch"])):  # batch 0 is warm-up
                point = batch * (int(row["gamma"]) + 1)
                found[int(row["seq"]), point].append(float(row["median_ms"]) / 1e3)
    return {cell: float(np.mean(seconds)) for cell, seconds in found.items()}


def _by_context(cells: Cells) -> Columns:
    """Group cells by rows or tokens. A column may lack contexts, because interpolation along it fills them in."""
    columns: dict[int, list[tuple[int, float]]] = defaultdict(list)
    for (context, point), seconds in sorted(cells.items()):
        columns[point].append((context, seconds))
    return {point: np.array(columns[point]).T for point in sorted(columns)}


def _at(columns: Columns, context: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the measured numbers of rows or tokens, and the seconds of each at this context."""
    seconds = [float(_line(max(context, contexts[0]), contexts, measured)) for contexts, measured in columns.values()]
    return np.array(list(columns)), np.array(seconds)


def _verify_curve(totals: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Return the seconds of steps of 0, 1, ... tokens, interpolated from ascending `totals` between the `EDGES`."""
    curve = np.empty(totals[-1] + 1)
    segments = np.searchsorted(EDGES, totals)
    start, floor = 0, 0.0  # a segment begins above the previous edge and costs at least as much as there
    for segment in np.unique(segments):
        own = segments == segment
        end = min((*EDGES, totals[-1])[segment], totals[-1])
        tokens = np.maximum(np.arange(start, end + 1), totals[0])
        curve[start : end + 1] = np.maximum(floor, _line(tokens, totals[own], seconds[own]))
        start, floor = end + 1, curve[end]
    return curve


def _line(at: np.ndarray | float, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Interpolate between points, and extrapolate with the first and the last slope."""
    if len(x) == 1:
        return np.full(np.shape(at), y[0])
    below, above = np.minimum(0, np.subtract(at, x[0])), np.maximum(0, np.subtract(at, x[-1]))
    slopes = (y[1] - y[0]) / (x[1] - x[0]), (y[-1] - y[-2]) / (x[-1] - x[-2])
    found: np.ndarray = np.interp(at, x, y) + slopes[0] * below + slopes[1] * above
    return found


def _along(curve: list[float], n: int) -> float:
    """Return entry n of a curve; beyond its end, extrapolate with the last slope if it is positive."""
    beyond = n - len(curve) + 1
    return curve[n] if beyond <= 0 else curve[-1] + beyond * max(0.0, curve[-1] - curve[-2])
