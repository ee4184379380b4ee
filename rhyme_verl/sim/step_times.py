"""Published times of vLLM steps on an accelerator, interpolated: what a step costs where no GPU is at hand.

The tables in `step_times/` were measured by others on an A100; the README there says how. This module needs numpy only
and knows nothing of vLLM, torch or Ray.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

import numpy as np

from rhyme_verl.histopipe.step_cost import StepCost

MODELS = {"qwen2.5-7b": "qwen257b.csv", "llama-3.1-8b": "llama318binstruct.csv", "qwen2.5-14b": "qwen2514b.csv"}
FOLDER = Path(__file__).with_name("step_times")
COLUMNS = ("batch", "seq", "gamma", "mode", "median_ms")
DECODE, VERIFY = "target_decode", "target_verify"  # modes of undrafted and of drafted steps
EDGES = (128, 256, 512)  # total tokens; the measured cost jumps just above each
CONTEXT_BUCKET = 32  # tokens to which the context is rounded, so that each curve is computed once

Cells = dict[tuple[int, int], float]  # seconds by (context, rows or total tokens)
Columns = dict[int, tuple[np.ndarray, np.ndarray]]  # contexts and seconds by rows or total tokens, both ascending


class _Curves(NamedTuple):
    """Seconds of a step at one context; entry n is of n rows or n tokens."""

    decode: list[float]
    verify: list[float]


class PublishedStepTime:
    """Seconds of an engine step by running sequences, total tokens and context, of one model on one A100.

    Undrafted steps are interpolated by rows, other steps by total tokens within the segments that `EDGES` bound, so the
    jumps stay where they were measured. Steps of more rows than measured cost what as many tokens cost at the smallest
    context, and for each row what its context adds in the largest measured batch. An instance keeps the curve of each
    context that it was asked for; it has no locks.

    Attributes:
        verified: measured seconds by (context, total tokens) of drafted steps, averaged over batch sizes.
    """

    def __init__(
        self, model: str = "qwen2.5-7b", folder: Path = FOLDER, leave_out: Collection[tuple[int, int]] = ()
    ) -> None:
        """Read the table of a model.

        Args:
            model: one of `MODELS`.
            folder: where the tables are.
            leave_out: cells of `verified` that are taken out, to test how well they are interpolated.

        Raises:
            ValueError: the model is unknown, or its table is missing or malformed.
        """
        if model not in MODELS:
            raise ValueError(f"no published step times of {model!r}: choose from {', '.join(MODELS)}")
        decoded, verified = _read(Path(folder) / MODELS[model])
        self.verified = {cell: seconds for cell, seconds in verified.items() if cell not in leave_out}
        assert self.verified, "every measured cell is left out"
        self._decode, self._verify = _by_context(decoded), _by_context(self.verified)
        self._max_rows = max(self._decode)
        self._min_context = min(context for context, _ in self.verified)
        contexts, seconds = self._decode[self._max_rows]
        growth = (seconds[-1] - seconds[0]) / max(1, contexts[-1] - contexts[0])
        self._row_context_seconds = float(growth) / self._max_rows
        self._curves: dict[int, _Curves] = {}
        self._shortest = self._curves_at(self._min_context).verify
        self._shortest_undrafted = np.maximum.accumulate(self._shortest).tolist()

    def seconds(self, rows: int, num_tokens: int, context: float) -> float:
        """Return the seconds of one step.

        Args:
            rows: running sequences.
            num_tokens: all tokens that the step computes: one for each row, draft tokens and prefill tokens. The step
                is undrafted if it equals `rows`.
            context: mean context tokens per row, rounded to `CONTEXT_BUCKET`.
        """
        assert 0 <= rows <= num_tokens and num_tokens > 0, f"{rows} rows in a step of {num_tokens} tokens"
        bucket = int(context / CONTEXT_BUCKET + 0.5)
        curves = self._curves.get(bucket)
        if curves is None:
            curves = self._curves[bucket] = self._curves_at(bucket * CONTEXT_BUCKET)
        if rows <= self._max_rows:
            undrafted = curves.decode[rows]
            return undrafted if num_tokens == rows else max(undrafted, _along(curves.verify, num_tokens))
        extra = self._row_context_seconds * rows * max(0, bucket * CONTEXT_BUCKET - self._min_context)
        undrafted = max(curves.decode[-1], _along(self._shortest_undrafted, rows) + extra)
        return undrafted if num_tokens == rows else max(undrafted, _along(self._shortest, num_tokens) + extra)

    def step_cost(self, max_running: int, context: float) -> StepCost:
        """Return the cost of undrafted steps of up to `max_running` sequences, for the simulator.

        In a `StepCost`, the cost per sequence never rises with their number, so above 128 sequences it grows in
        proportion until it has caught up with the jump.
        """
        running = np.arange(1, max_running + 1)
        seconds = [self.seconds(rows, rows, context) for rows in running.tolist()]
        return StepCost.from_table(running, seconds, max_running)

    def _curves_at(self, context: int) -> _Curves:
        rows, seconds = _at(self._decode, context)
        decode = np.interp(np.arange(rows[-1] + 1), rows, np.maximum.accumulate(seconds))  # medians are noisy by 1 %
        return _Curves(decode.tolist(), _verify_curve(*_at(self._verify, context)).tolist())


def _read(path: Path) -> tuple[Cells, Cells]:
    """Return the seconds of undrafted steps by (context, rows) and of drafted ones by (context, total tokens)."""
    found: dict[str, dict[tuple[int, int], list[float]]] = {DECODE: defaultdict(list), VERIFY: defaultdict(list)}
    try:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            missing = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
            if missing:
                raise ValueError(f"no column {missing[0]!r}")
            for row in reader:
                if row["mode"] in found and (batch := int(row["batch"])):  # batch 0 is warm-up
                    point = batch * (int(row["gamma"]) + 1)
                    seconds = float(row["median_ms"]) / 1e3
                    if batch < 0 or point < batch or not 0 < seconds < float("inf"):
                        raise ValueError(f"line {reader.line_num}: not a measurement")
                    found[row["mode"]][int(row["seq"]), point].append(seconds)
        for mode, cells in found.items():
            if not cells:
                raise ValueError(f"no rows of mode {mode!r}")
    except (OSError, ValueError, TypeError, csv.Error) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{path}: not a table of published step times: {reason}") from None
    decoded, verified = ({cell: float(np.mean(all_of)) for cell, all_of in found[m].items()} for m in (DECODE, VERIFY))
    return decoded, verified


def _by_context(cells: Cells) -> Columns:
    """Sort cells into a column of contexts for each number of rows or tokens.

    A column need not have every context: interpolating along it fills in what is missing.
    """
    columns: dict[int, list[tuple[int, float]]] = defaultdict(list)
    for (context, point), seconds in sorted(cells.items()):
        columns[point].append((context, seconds))
    return {
        point: (np.array([context for context, _ in column]), np.array([seconds for _, seconds in column]))
        for point, column in sorted(columns.items())
    }


def _at(columns: Columns, context: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the measured numbers of rows or tokens, and the seconds of each at a context."""
    seconds = [float(_line(max(context, contexts[0]), contexts, column)) for contexts, column in columns.values()]
    return np.array(list(columns)), np.array(seconds)


def _verify_curve(totals: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Return the seconds of steps of 0, 1, ... tokens from those of ascending `totals`, jumps at `EDGES` kept."""
    curve = np.empty(totals[-1] + 1)
    segments = np.searchsorted(EDGES, totals)
    start, floor = 0, 0.0  # a segment begins just above the edge before it and costs no less than there
    for segment in np.unique(segments):
        own = segments == segment
        end = min((*EDGES, totals[-1])[segment], totals[-1])
        tokens = np.arange(start, end + 1)
        if start == 0:
            tokens = np.maximum(tokens, totals[0])
        curve[start : end + 1] = np.maximum(floor, _line(tokens, totals[own], seconds[own]))
        start, floor = end + 1, curve[end]
    return curve


def _line(at: np.ndarray | int, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Interpolate between points; the first and the last slope continue beyond them."""
    if len(x) == 1:
        return np.full(np.shape(at), y[0])
    below, above = np.minimum(0, np.subtract(at, x[0])), np.maximum(0, np.subtract(at, x[-1]))
    slopes = (y[1] - y[0]) / (x[1] - x[0]), (y[-1] - y[-2]) / (x[-1] - x[-2])
    found: np.ndarray = np.interp(at, x, y) + slopes[0] * below + slopes[1] * above
    return found


def _along(curve: list[float], n: int) -> float:
    """Return entry n of a curve; beyond its end the last slope continues, unless it falls."""
    beyond = n - len(curve) + 1
    return curve[n] if beyond <= 0 else curve[-1] + beyond * max(0.0, curve[-1] - curve[-2])
