"""The lengths of the answers of each step, from a distribution or from a recorded trace."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.compute as pc

from rhyme_verl.histopipe.lengths import LengthPredictor
from rhyme_verl.telemetry.trace import read_trace

P99_SCORE = 2.3263478740408408  # standard deviations of the 99th percentile of a normal distribution


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Steps in the order of training, all of the same size.

    Attributes:
        lengths: int64 [steps, groups, samples], in tokens.
        mean: float64 [steps, groups], predicted from earlier steps.
        max_tokens: maximum length of an answer.
        rank_correlation: Spearman's, of predicted and true length, averaged over the steps.
        rank_churn: mean change of a prompt's rank by mean length between epochs, as a share of all prompts; NaN with
            a single epoch.
    """

    lengths: np.ndarray
    mean: np.ndarray
    max_tokens: float
    rank_correlation: float = float("nan")
    rank_churn: float = float("nan")


@dataclass(frozen=True, kw_only=True)
class LogNormal:
    """Log-normal lengths with a maximum.

    Attributes:
        median: median in tokens.
        p99_over_median: 99th percentile relative to the median.
        cap: maximum length in tokens.
        within_group: standard deviation of log length within a group, relative to that over all answers.
        epoch_noise: standard deviation of the change in a prompt's log length per epoch, relative to that as well.
    """

    median: float = 2000.0
    p99_over_median: float = 8.0
    cap: int = 16384
    within_group: float = 0.19
    epoch_noise: float = 0.08

    def sample(self, rng: np.random.Generator, groups: int, samples: int, epochs: int) -> np.ndarray:
        """Draw lengths of the same prompts in all epochs, int64 [epochs, groups, samples]."""
        spread = np.log(self.p99_over_median) / P99_SCORE
        within = self.within_group * spread
        prompt = rng.normal(0.0, np.sqrt(spread**2 - within**2), size=groups)
        drift = np.cumsum(rng.normal(0.0, self.epoch_noise * spread, size=(epochs, groups)), axis=0)
        logs = (prompt + drift - drift[-1])[:, :, None] + rng.normal(0.0, within, size=(epochs, groups, samples))
        found: np.ndarray = np.clip(np.rint(self.median * np.exp(logs)), 1, self.cap).astype(np.int64)
        return found


def from_distribution(
    distribution: LogNormal, *, steps: int, groups: int, samples: int, epochs_before: int = 2, seed: int = 0
) -> Workload:
    """Make `steps` steps of different prompts, each predicted from `epochs_before` epochs over all prompts."""
    rng = np.random.default_rng(seed)
    lengths = distribution.sample(rng, steps * groups, samples, epochs_before + 1)
    lengths = lengths.reshape(epochs_before + 1, steps, groups, samples)
    return _last_epoch(lengths, distribution.cap, half_life_steps=2.0 * steps)


def from_trace(path: Path, *, cap: int | None = None, scale: float = 1.0, repeat: int = 1) -> Workload:
    """Take the lengths of a recorded trace; the last epoch is simulated, predicted from the earlier ones.

    Left out are incomplete groups, prompts that came back less often than most, and an incomplete last step.

    Args:
        cap: length at which answers were cut off; None: the longest length of the trace.
        scale: factor on all lengths.
        repeat: number of copies of each group, to make larger steps from a small trace.

    Raises:
        ValueError: most prompts came only once.
    """
    table = read_trace(path)
    answers = table.filter(pc.invert(table["validate"])).group_by(["prompt_key", "epoch"], use_threads=False)
    groups = answers.aggregate([("step", "min"), ("length", "list")]).sort_by(
        [("prompt_key", "ascending"), ("epoch", "ascending")]
    )
    columns = [groups[name].to_pylist() for name in ("prompt_key", "step_min", "length_list")]
    samples = _most_frequent([len(lengths) for lengths in columns[-1]])
    visits: dict[int, list[tuple[int, list[int]]]] = defaultdict(list)  # first steps and lengths of complete groups
    for key, step, lengths in zip(*columns, strict=True):
        if len(lengths) == samples:
            visits[key].append((step, lengths))
    epochs = _most_frequent([len(found) for found in visits.values()])
    if epochs < 2:
        raise ValueError(f"{path}: most of its prompts came only once: give a trace of two epochs or more")
    chosen = [found[:epochs] for found in visits.values() if len(found) >= epochs]
    chosen.sort(key=lambda found: found[-1][0])
    per_step = _most_frequent(list(Counter(found[-1][0] for found in chosen).values()))
    chosen = chosen[: len(chosen) // per_step * per_step]
    lengths = np.array([[group for _, group in found] for found in chosen])  # [prompts, epochs, samples]
    lengths = np.maximum(1, np.rint(lengths * scale)).astype(np.int64).swapaxes(0, 1)
    lengths = lengths.reshape(epochs, -1, per_step, samples)
    most = int(lengths.max()) if cap is None else round(cap * scale)
    return _last_epoch(np.repeat(lengths, repeat, axis=2), most, half_life_steps=2.0 * lengths.shape[1])


def _most_frequent(counts: list[int]) -> int:
    return int(np.bincount(counts).argmax()) if len(counts) else 0


def from_recorded(keys: np.ndarray, lengths: np.ndarray) -> Workload:
    """Take the lengths that real replicas generated, each step predicted from the earlier ones, as in a job.

    Args:
        keys: uint64 [steps, groups], keys of the prompts.
        lengths: int64 [steps, groups, samples], in tokens.
    """
    most = float(lengths.max())
    mean, correlations = _predict(keys, lengths, most, LengthPredictor(), lag=1)
    known = correlations[~np.isnan(correlations)]
    correlation = float(np.mean(known)) if len(known) else float("nan")
    return Workload(lengths=lengths, mean=mean, max_tokens=most, rank_correlation=correlation)


def _last_epoch(lengths: np.ndarray, cap: int, half_life_steps: float) -> Workload:
    """Return the last epoch of [epochs, steps, groups, samples], predicted from lengths up to two steps earlier."""
    epochs, steps, groups, samples = lengths.shape
    keys = np.tile(np.arange(steps * groups, dtype=np.uint64).reshape(steps, groups), (epochs, 1))
    predictor = LengthPredictor(half_life_steps=half_life_steps)
    mean, correlations = _predict(keys, lengths.reshape(-1, groups, samples), cap, predictor, lag=2)
    ranks = np.argsort(np.argsort(lengths.mean(axis=3).reshape(epochs, -1), axis=1), axis=1)
    changes = np.abs(np.diff(ranks, axis=0)) / ranks.shape[1]
    return Workload(
        lengths=lengths[-1],
        mean=mean[-steps:],
        max_tokens=float(cap),
        rank_correlation=float(np.mean(correlations[-steps:])),
        rank_churn=float(changes.mean()) if epochs > 1 else float("nan"),
    )


def _predict(
    keys: np.ndarray, lengths: np.ndarray, cap: float, predictor: LengthPredictor, lag: int
) -> tuple[np.ndarray, np.ndarray]:
    """Predict every step from those at least `lag` steps earlier; return the means and the rank correlations."""
    means, correlations = [], []
    for step in range(len(keys) + lag - 1):
        if step < len(keys):
            means.append(predictor.predict(keys[step]))
        known = step - lag + 1
        if known >= 0:
            answers = lengths[known].ravel()
            repeated = np.repeat(keys[known], lengths.shape[2])
            correlations.append(predictor.observe(repeated, answers, answers >= cap, known))
    return np.stack(means), np.array(correlations)
