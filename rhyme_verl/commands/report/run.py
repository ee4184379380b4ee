"""Reads a training run's folder: verl's metrics, and rhyme's statistics, schedule and trace."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from rhyme_verl.config import KEY
from rhyme_verl.telemetry.trace import read_trace

REWARD = ("critic/rewards/mean", "critic/score/mean")  # verl's metrics; the first one that is logged counts
Series = tuple[list[int], list[float]]  # steps and values


@dataclass(frozen=True, kw_only=True)
class Run:
    """The recorded data of a run; each part may be empty.

    Attributes:
        name: shown in legends.
        metrics: metrics that verl logged, by training step.
        rollouts: lines of rhyme's statistics, with `replica` and `step`: the version of the weights + 1, which is the
            rollout's training step in synchronous modes.
        schedule: one line per finished request: replica, uid, sample, step, start, end (Unix seconds), tokens,
            predicted, lanes.
        trace: trajectories (`rhyme_verl.telemetry.trace.SCHEMA`).
    """

    name: str
    metrics: dict[int, dict[str, float]] = field(default_factory=dict)
    rollouts: list[dict[str, Any]] = field(default_factory=list)
    schedule: list[dict[str, Any]] = field(default_factory=list)
    trace: pa.Table | None = None

    def series(self, *names: str) -> Series:
        """Return the steps and values of the first of these metrics that was logged."""
        for name in names:
            found = {step: data[name] for step, data in sorted(self.metrics.items()) if name in data}
            if found:
                return list(found), list(found.values())
        return [], []

    def by_step(self, value: Callable[[int], float], *metrics: str) -> Series:
        """Return a value of rhyme's statistics by step, without NaNs; without statistics, the `series` of metrics."""
        if not self.rollouts:
            return self.series(*metrics)
        found = {step: number for step in self.rollout_steps() if not math.isnan(number := value(step))}
        return list(found), list(found.values())

    def rollout_steps(self) -> list[int]:
        return sorted({rollout["step"] for rollout in self.rollouts})

    def total(self, name: str, steps: Iterable[int] | None = None) -> float:
        """Return the sum of a count over replicas and over the given steps (None: all)."""
        wanted = None if steps is None else set(steps)
        return float(sum(r.get(name, 0) for r in self.rollouts if wanted is None or r["step"] in wanted))

    def accepted_per(self, denominator: str, steps: Iterable[int] | None = None) -> float:
        """Return the accepted tokens per unit of another count; NaN if it is 0."""
        return ratio(self.total("num_accepted_tokens", steps), self.total(denominator, steps))

    def largest(self, name: str, step: int) -> float:
        """Return the maximum over replicas at this step; NaN if none has the value."""
        return max((float(one[name]) for one in self.rollouts if one["step"] == step and name in one), default=math.nan)

    def epochs(self) -> dict[int, list[int]]:
        """Return the steps of each epoch, counted from 1; empty if verl did not log epochs."""
        epochs: dict[int, list[int]] = {}
        for step, data in sorted(self.metrics.items()):
            if "training/epoch" in data:
                epochs.setdefault(int(data["training/epoch"]) + 1, []).append(step)
        return epochs


def ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else math.nan


def read_run(folder: Path, name: str | None = None) -> Run:
    """Read all files of a run from its folder and subfolders.

    Raises:
        ValueError: the folder holds nothing to report, or more than one run; one line with the remedy.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder: give the folder that a run wrote to")
    metrics_files = [path for path in sorted(folder.rglob("*.jsonl")) if _is_metrics(path)]
    if len(metrics_files) > 1:
        found = ", ".join(str(path.relative_to(folder)) for path in metrics_files[:3])
        raise ValueError(f"{folder}: more than one run here ({found}): give each run's own folder")
    run = Run(
        name=name or folder.resolve().name,
        metrics={line["step"]: line["data"] for path in metrics_files for line in _lines(path)},
        rollouts=[line for path in sorted(folder.rglob("replica-*.jsonl")) for line in _rollouts(path)],
        schedule=[line for path in sorted(folder.rglob("pipe.jsonl")) for line in _lines(path)],
        trace=_trace(folder),
    )
    if not (run.metrics or run.rollouts or run.schedule or run.trace):
        raise ValueError(
            f"{folder}: nothing to report: let the run log to `file` (trainer.logger, VERL_FILE_LOGGER_PATH) and set "
            f"{KEY}.stats_path to a subfolder"
        )
    return run


def _lines(path: Path) -> list[dict[str, Any]]:
    """Parse a JSON-lines file; the last line may be incomplete."""
    lines = path.read_text(encoding="utf-8").split("\n")
    try:
        return [json.loads(line) for line in lines[:-1]]
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: not a JSON-lines file: {error}") from None


def _is_metrics(path: Path) -> bool:
    with open(path, encoding="utf-8", errors="replace") as file:
        first = file.readline()
    return first.startswith('{"step"') and '"data"' in first


def _rollouts(path: Path) -> list[dict[str, Any]]:
    """Return the last line of each step: a resumed run repeats some."""
    replica = int(path.stem.rpartition("-")[2])
    by_step = {(line["step"] or 0) + 1: line for line in _lines(path)}
    return [{**line, "step": step, "replica": replica} for step, line in by_step.items()]


def _trace(folder: Path) -> pa.Table | None:
    folders = sorted({part.parent for part in folder.rglob("part-*.parquet")})
    if len(folders) > 1:
        raise ValueError(f"{folder}: more than one trace here: give each run's own folder")
    return read_trace(folders[0]) if folders else None
