"""Reads a training run's folder: verl's metrics, and rhyme's statistics, schedule and trace."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from rhyme_verl.config import KEY
from rhyme_verl.telemetry.trace import read_trace

TRACE_COLUMNS = ("validate", "epoch", "length")  # without the tokens, of which a long run has billions
REWARD = ("critic/rewards/mean", "critic/score/mean")  # verl's metrics; the first one that is logged counts


@dataclass(frozen=True, kw_only=True, eq=False)  # tables have no truth value
class Run:
    """The recorded data of a run; each part may be empty.

    Attributes:
        name: shown in legends.
        metrics: metrics that verl logged, with the training step as index.
        rollouts: rhyme's statistics of each replica and `step`: the version of the weights + 1, which is the rollout's
            training step in synchronous modes. `epoch` counts from 1, and is known if verl logged epochs.
        schedule: one row for each time that a finished answer ran: replica, uid, sample, step, start, end (Unix
            seconds), lanes; and in its last one, its tokens and predicted tokens.
        trace: TRACE_COLUMNS of all trajectories.
    """

    name: str
    metrics: pd.DataFrame = field(default_factory=pd.DataFrame)
    rollouts: pd.DataFrame = field(default_factory=pd.DataFrame)
    schedule: pd.DataFrame = field(default_factory=pd.DataFrame)
    trace: pa.Table | None = None

    def series(self, *names: str) -> pd.Series:
        """Return the first of these metrics that was logged, by step."""
        found = [self.metrics[name].dropna() for name in names if name in self.metrics]
        return found[0] if found else pd.Series(dtype=float)

    def known(self, statistic: pd.Series, *metrics: str) -> pd.Series:
        """Return a value of rhyme's statistics without NaNs; without statistics, the `series` of metrics."""
        return self.series(*metrics) if self.rollouts.empty else statistic.dropna()

    def total(self, name: str, by: str = "step") -> pd.Series:
        """Return the sum of a count over replicas, by `step` or `epoch`."""
        return self.rollouts.reindex(columns=[by, name]).groupby(by)[name].sum()

    def largest(self, name: str) -> pd.Series:
        """Return the maximum over replicas by step; NaN where none has the value."""
        return self.rollouts.reindex(columns=["step", name]).groupby("step")[name].max()

    def accepted_per(self, denominator: str, by: str = "step") -> pd.Series:
        """Return the accepted tokens per unit of another count, by `step` or `epoch`; NaN where it is 0."""
        return ratio(self.total("num_accepted_tokens", by), self.total(denominator, by))


def ratio(numerator: Any, denominator: Any) -> Any:
    """Return the quotient of two numbers or two series; NaN where the denominator is 0."""
    return numerator / np.where(denominator, denominator, math.nan)


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
    metrics = {line["step"]: line["data"] for path in metrics_files for line in _lines(path)}
    run = Run(
        name=name or folder.resolve().name,
        metrics=pd.DataFrame.from_dict(metrics, orient="index").sort_index(),
        rollouts=pd.DataFrame([line for path in sorted(folder.rglob("replica-*.jsonl")) for line in _rollouts(path)]),
        schedule=pd.DataFrame([line for path in sorted(folder.rglob("pipe.jsonl")) for line in _lines(path)]),
        trace=_trace(folder),
    )
    if not run.rollouts.empty and "training/epoch" in run.metrics:
        run.rollouts["epoch"] = run.rollouts["step"].map(run.metrics["training/epoch"]) + 1
    if run.metrics.empty and run.rollouts.empty and run.schedule.empty and not run.trace:
        raise ValueError(
            f"{folder}: nothing to report: let the run log to `file` (trainer.logger, VERL_FILE_LOGGER_PATH) and set "
            f"{KEY}.stats_path to a subfolder"
        )
    return run


def _lines(path: Path) -> list[dict[str, Any]]:
    """Parse a file of JSON objects by line; the last line may be incomplete."""
    lines = path.read_text(encoding="utf-8").split("\n")
    try:
        found = [json.loads(line) for line in lines[:-1]]
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: not a JSON-lines file: {error}") from None
    if not all(isinstance(line, dict) for line in found):
        raise ValueError(f"{path}: not a file of JSON objects by line")
    return found


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
    return read_trace(folders[0], TRACE_COLUMNS) if folders else None
