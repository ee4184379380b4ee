"""Draws a timeline of what each replica did."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from rhyme_verl.sim.experiment import Outcome
from rhyme_verl.sim.trainer import Run

TIME_BINS = 600
MAX_ROWS = 256  # replicas in a picture; of a larger fleet, evenly spaced replicas are drawn
COLOURS = ("#2166ac", "#e08214")  # of even and odd batches


def draw(path: Path, runs: Sequence[tuple[Outcome, Run]], sequences_per_step: int, max_running: int) -> None:
    """Draw one timeline per run: one row per replica, coloured by batch, paler where fewer sequences run."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    end = max(run.seconds for _, run in runs)
    figure, axes = plt.subplots(len(runs), 1, figsize=(11, 2.2 * len(runs) + 0.8), sharex=True, squeeze=False)
    for axis, (outcome, run) in zip(axes[:, 0], runs, strict=True):
        picture = _picture(run, sequences_per_step, max_running, end)
        axis.imshow(picture, aspect="auto", extent=(0.0, end, len(picture), 0), interpolation="nearest")
        for second in run.trained:
            axis.axvline(second, color="black", linewidth=0.6, linestyle=":")
        axis.set_title(f"{outcome.case}: {run.seconds:,.0f} s, {outcome.steps_per_hour:.1f} steps/h", fontsize=9)
        axis.set_ylabel("replica")
    axes[-1, 0].set_xlabel("seconds (blue: even batches, orange: odd batches; dotted: a step is trained)")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _picture(run: Run, sequences_per_step: int, max_running: int, end: float) -> np.ndarray:
    """Return an RGB picture [replicas, time bins, 3]."""
    num_replicas = len(run.replicas)
    running = np.zeros((2, num_replicas, TIME_BINS + 1))
    segments = np.array(run.segments)
    replica = segments[:, 0].astype(np.int64)
    odd = (segments[:, 1].astype(np.int64) // sequences_per_step) % 2
    first, last = (np.minimum((segments[:, i] / end * TIME_BINS).astype(np.int64), TIME_BINS) for i in (2, 3))
    np.add.at(running, (odd, replica, first), 1.0)
    np.add.at(running, (odd, replica, last), -1.0)
    shade = np.cumsum(running, axis=2)[:, :, :TIME_BINS] / max_running
    shade = np.where(shade > 0.0, 0.15 + 0.85 * np.minimum(shade, 1.0), 0.0)
    ink = np.array([[1.0 - int(c[i : i + 2], 16) / 255.0 for i in (1, 3, 5)] for c in COLOURS])
    picture = 1.0 - np.einsum("srt,sc->rtc", shade, ink)
    rows = np.unique(np.linspace(0, num_replicas - 1, min(num_replicas, MAX_ROWS)).astype(np.int64))
    found: np.ndarray = np.clip(picture[rows], 0.0, 1.0)
    return found
