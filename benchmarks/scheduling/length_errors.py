"""Measures the errors of predicted answer lengths on a recorded trace, and the spread of lengths."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rhyme_verl.histopipe.lengths import LengthPredictor
from rhyme_verl.telemetry.trace import read_trace


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Standard deviations of log lengths, as shares of the standard deviation over all answers.

    Attributes:
        within_group: among a prompt's answers in one epoch.
        epoch_noise: of the change of a prompt's mean from one epoch to the next, without the change common to all.
    """

    within_group: float
    epoch_noise: float


class RecordedLengths:
    """The training answers of a trace in which every prompt has the same number of answers in each epoch.

    Args:
        trace: a Parquet file or a folder of them.
        cap: length at which answers were cut off, in tokens.
    """

    def __init__(self, trace: Path, cap: int) -> None:
        table = read_trace(trace)
        train = ~table.column("validate").to_numpy(zero_copy_only=False)
        epoch, step, key, sample, length = (
            table.column(name).to_numpy()[train] for name in ("epoch", "step", "prompt_key", "sample", "length")
        )
        order = np.lexsort((sample, key, epoch))
        num_epochs, num_prompts = len(np.unique(epoch)), len(np.unique(key))
        self.keys = np.unique(key)
        self.lengths = length[order].reshape(num_epochs, num_prompts, -1).astype(np.int64)
        self.steps = step[order].reshape(self.lengths.shape)[:, :, 0]
        self.cap = cap

    def spread(self) -> Spread:
        """Return the spread of log lengths without the first epoch, in which a policy changes most."""
        logs = np.log(self.lengths[1:])
        samples = logs.shape[2]
        total = np.mean(np.var(logs.reshape(len(logs), -1), axis=1))
        within = np.mean(np.var(logs, axis=2, ddof=1))
        changes = np.diff(logs.mean(axis=2), axis=0)
        between = np.mean(np.var(changes, axis=1)) - 2.0 * within / samples
        return Spread(
            within_group=float(np.sqrt(within / total)), epoch_noise=float(np.sqrt(max(0.0, between) / total))
        )

    def errors(self) -> list[dict[str, Any]]:
        """Predict every step from the previous ones; return the rank correlation per epoch."""
        predictor = LengthPredictor()
        samples = self.lengths.shape[2]
        by_epoch: list[list[float]] = [[] for _ in self.lengths]
        for step in np.unique(self.steps).tolist():
            for epoch in range(len(self.lengths)):
                prompts = np.flatnonzero(self.steps[epoch] == step)
                if len(prompts):
                    lengths = self.lengths[epoch, prompts].ravel()
                    keys = np.repeat(self.keys[prompts], samples)
                    by_epoch[epoch].append(predictor.observe(keys, lengths, lengths >= self.cap, step))
        return [
            {"epoch": epoch + 1, "rank_correlation": float(np.mean(steps))} for epoch, steps in enumerate(by_epoch)
        ][1:]  # the first epoch has no history
