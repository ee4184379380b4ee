"""Predicts how long the answers to a prompt will be, from how long its earlier ones were.

An answer that was cut off at the cap has not shown its length, only that it is at least that: such lengths are
censored (Kaplan and Meier's estimator), not taken for lengths. Knows nothing of verl, vLLM or Ray. Not thread-safe.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

POPULATION_QUANTILES = 25  # points that stand for the distribution over all prompts
DEFAULT_P90, DEFAULT_MEAN = 3.0, 1.45  # by the median: a log-normal with p99/median 7
POPULATION_SIZE = 65536  # latest lengths, of any prompt, that it is drawn from
MAX_PROMPTS = 1 << 20  # with 32 answers each, 270 MB


@dataclass(frozen=True, kw_only=True)
class LengthPrediction:
    """Predicted tokens of one answer to each of some prompts; float64 arrays of [prompts].

    Attributes:
        p50: as many answers are longer as are shorter.
        p90: one answer in ten is longer.
        mean: expected length, the part beyond the longest length seen left out.
    """

    p50: np.ndarray
    p90: np.ndarray
    mean: np.ndarray


@dataclass(frozen=True, kw_only=True)
class PredictionError:
    """How right the predictions made for a step were; NaN where nothing was predicted or nothing varied.

    Attributes:
        rank_correlation: Spearman's, of predicted mean and true length, over answers.
        below_p50: share of lengths at most the predicted p50; 0.5 is right, more if lengths tie.
        below_p90: share of lengths at most the predicted p90; 0.9 is right.
    """

    rank_correlation: float
    below_p50: float
    below_p90: float


def unknown_error() -> PredictionError:
    """Return the error of a step for which nothing was predicted."""
    return PredictionError(rank_correlation=np.nan, below_p50=np.nan, below_p90=np.nan)


class LengthPredictor:
    """Lengths of each prompt's latest answers, and of all prompts' for those seen rarely or never.

    Args:
        answers_per_prompt: latest answers of a prompt that are kept.
        half_life_steps: training steps after which a length counts half.
        prior_answers: the distribution over all prompts counts as much as this many answers of the prompt itself.
        default_tokens: median that is predicted while nothing has been seen at all, with a long tail.
        max_prompts: known at once; the one known longest makes room for a new one.
    """

    def __init__(
        self,
        *,
        answers_per_prompt: int = 32,
        half_life_steps: float = 64.0,
        prior_answers: float = 1.0,
        default_tokens: float = 1024.0,
        max_prompts: int = MAX_PROMPTS,
    ) -> None:
        self._half_life = half_life_steps
        self._prior = prior_answers
        self._default_tokens = default_tokens
        self._max_prompts = max_prompts
        self._step = 0
        self._rows: dict[int, int] = {}
        self._keys = np.zeros(0, dtype=np.uint64)  # of prompts, by row
        self._seen = np.zeros(0, dtype=np.int64)  # answers ever
        self._lengths = np.zeros((0, answers_per_prompt), dtype=np.int32)
        self._censored = np.zeros((0, answers_per_prompt), dtype=bool)
        self._steps = np.zeros((0, answers_per_prompt), dtype=np.int32)
        self._all_lengths = np.zeros(POPULATION_SIZE, dtype=np.int32)
        self._all_censored = np.zeros(POPULATION_SIZE, dtype=bool)
        self._all_steps = np.zeros(POPULATION_SIZE, dtype=np.int32)
        self._num_all = 0

    def observe(
        self, prompt_keys: np.ndarray, lengths: np.ndarray, truncated: np.ndarray, step: int
    ) -> PredictionError:
        """Take a step's answers in, and return how well they had been predicted before.

        Args:
            prompt_keys: uint64 [answers], a prompt's key once for each of its answers, in any order.
            lengths: tokens [answers].
            truncated: bool [answers], whether the answer was cut off before its end.
            step: training step; one before the latest counts as that.
        """
        keys = np.asarray(prompt_keys, dtype=np.uint64)
        lengths = np.asarray(lengths, dtype=np.float64)
        truncated = np.asarray(truncated, dtype=bool)
        error = unknown_error()
        if not len(keys):
            return error
        step = self._step = max(step, self._step)
        unique, group = np.unique(keys, return_inverse=True)
        if self._num_all:
            error = prediction_error(self.predict(unique), group, lengths)
        order = np.argsort(group, kind="stable")
        counts = np.bincount(group)
        place = np.arange(len(keys)) - np.repeat(np.cumsum(counts) - counts, counts)  # within the prompt's answers
        row = np.repeat(self._rows_for(unique), counts)
        column = (self._seen[row] + place) % self._lengths.shape[1]
        self._lengths[row, column] = lengths[order]
        self._censored[row, column] = truncated[order]
        self._steps[row, column] = step
        np.add.at(self._seen, row, 1)
        latest = slice(-POPULATION_SIZE, None)
        index = (self._num_all + np.arange(len(keys))[latest]) % POPULATION_SIZE
        self._all_lengths[index] = lengths[latest]
        self._all_censored[index] = truncated[latest]
        self._all_steps[index] = step
        self._num_all += len(keys)
        return error

    def __len__(self) -> int:
        """Return the number of answers ever taken in."""
        return self._num_all

    @property
    def num_prompts(self) -> int:
        """Return the number of prompts that are known."""
        return len(self._rows)

    def knows(self, prompt: int) -> bool:
        """Return whether an answer to this prompt has been seen."""
        return prompt in self._rows

    def state(self) -> dict[str, np.ndarray]:
        """Return a copy of all that is known, for `restore`."""
        num, num_all = len(self._rows), min(self._num_all, POPULATION_SIZE)
        return {
            "prompts": self._keys[:num].copy(),
            "seen": self._seen[:num].copy(),
            "lengths": self._lengths[:num].copy(),
            "censored": self._censored[:num].copy(),
            "steps": self._steps[:num].copy(),
            "all_lengths": self._all_lengths[:num_all].copy(),
            "all_censored": self._all_censored[:num_all].copy(),
            "all_steps": self._all_steps[:num_all].copy(),
            "counters": np.array([self._step, self._num_all]),
        }

    def restore(self, state: dict[str, np.ndarray]) -> None:
        """Take over what `state` returned, instead of all that is known.

        Raises:
            KeyError, ValueError: it is not such a state, or one with another number of answers a prompt.
        """
        num, num_all = len(state["prompts"]), len(state["all_lengths"])
        if state["lengths"].shape != (num, self._lengths.shape[1]) or num_all > POPULATION_SIZE:
            raise ValueError("its arrays do not have the shapes of a predictor's state")
        self._rows = {key: row for row, key in enumerate(state["prompts"].tolist())}
        self._keys, self._seen, self._lengths = (state[name].copy() for name in ("prompts", "seen", "lengths"))
        self._censored, self._steps = state["censored"].copy(), state["steps"].copy()
        self._all_lengths[:num_all] = state["all_lengths"]
        self._all_censored[:num_all] = state["all_censored"]
        self._all_steps[:num_all] = state["all_steps"]
        self._step, self._num_all = (int(value) for value in state["counters"])

    def predict(self, prompt_keys: np.ndarray) -> LengthPrediction:
        """Predict the length of one more answer to each prompt (uint64 [prompts])."""
        keys = np.asarray(prompt_keys, dtype=np.uint64)
        if not self._num_all:
            unknown = np.full(len(keys), self._default_tokens)
            return LengthPrediction(p50=unknown, p90=DEFAULT_P90 * unknown, mean=DEFAULT_MEAN * unknown)
        population = self._population()
        rows = np.array([self._rows.get(key, -1) for key in keys.tolist()], dtype=np.int64)
        p50, p90, mean = (
            np.full(len(keys), statistic[0])
            for statistic in survival_statistics(
                population[None, :], np.zeros((1, len(population)), dtype=bool), np.ones((1, len(population)))
            )
        )
        known = np.flatnonzero(rows >= 0)
        if len(known):
            p50[known], p90[known], mean[known] = self._known(rows[known], population)
        return LengthPrediction(p50=p50, p90=p90, mean=mean)

    def _known(self, rows: np.ndarray, population: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        num_kept = self._lengths.shape[1]
        kept = np.arange(num_kept)[None, :] < self._seen[rows, None]
        weights = np.where(kept, self._recency(self._steps[rows]), 0.0)
        shape = (len(rows), len(population))
        lengths = np.concatenate([self._lengths[rows], np.broadcast_to(population, shape)], axis=1)
        censored = np.concatenate([self._censored[rows], np.zeros(shape, dtype=bool)], axis=1)
        weights = np.concatenate([weights, np.full(shape, self._prior / len(population))], axis=1)
        return survival_statistics(lengths, censored, weights)

    def _population(self) -> np.ndarray:
        """Return quantiles [POPULATION_QUANTILES] of the lengths of all prompts."""
        num = min(self._num_all, POPULATION_SIZE)
        lengths, censored = self._all_lengths[:num], self._all_censored[:num]
        times, survival = _survival(lengths, censored, self._recency(self._all_steps[:num]))
        levels = (np.arange(POPULATION_QUANTILES) + 0.5) / POPULATION_QUANTILES
        found: np.ndarray = times[np.minimum(np.searchsorted(1.0 - survival, levels), num - 1)]
        return found

    def _recency(self, steps: np.ndarray) -> np.ndarray:
        return np.exp2((steps - self._step) / self._half_life)

    def _rows_for(self, keys: np.ndarray) -> np.ndarray:
        """Return the rows of these different prompts; a new one takes a free row, or that of the one known longest."""
        rows = []
        for key in keys.tolist():
            row = self._rows.get(key)
            if row is None:
                row = len(self._rows)
                if row == self._max_prompts:
                    row = self._rows.pop(next(iter(self._rows)))
                self._rows[key] = row
                if row < len(self._seen):
                    self._seen[row] = 0
            rows.append(row)
        if len(self._rows) > len(self._seen):
            more = max(len(self._rows), 2 * len(self._seen)) - len(self._seen)
            self._keys, self._seen = np.pad(self._keys, (0, more)), np.pad(self._seen, (0, more))
            self._lengths, self._censored, self._steps = (
                np.pad(table, ((0, more), (0, 0))) for table in (self._lengths, self._censored, self._steps)
            )
        found = np.array(rows, dtype=np.int64)
        self._keys[found] = keys
        return found


def survival_statistics(
    lengths: np.ndarray, censored: np.ndarray, weights: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return p50, p90 and mean [rows] of weighted, partly censored lengths [rows, answers].

    A quantile that lies among censored answers is the longest length of the row: all that is known is that it is no
    shorter.
    """
    times, survival = _survival(lengths, censored, weights)
    last = times.shape[1] - 1

    def quantile(share: float) -> np.ndarray:
        index = np.minimum((survival > 1.0 - share + 1e-9).sum(axis=1), last)
        return np.take_along_axis(times, index[:, None], axis=1)[:, 0]

    start = np.zeros((len(times), 1))
    widths = np.diff(np.concatenate([start, times], axis=1), axis=1)
    mean = (widths * np.concatenate([start + 1.0, survival[:, :-1]], axis=1)).sum(axis=1)
    return quantile(0.5), quantile(0.9), mean


def _survival(lengths: np.ndarray, censored: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the sorted lengths, and the share of answers longer than each (Kaplan and Meier), along the last axis."""
    order = np.lexsort((censored, lengths), axis=-1)  # of equal lengths, those that ended come first
    times = np.take_along_axis(lengths, order, axis=-1)
    weights = np.take_along_axis(weights, order, axis=-1)
    ended = ~np.take_along_axis(censored, order, axis=-1)
    at_risk = np.cumsum(weights[..., ::-1], axis=-1)[..., ::-1]
    with np.errstate(invalid="ignore", divide="ignore"):
        dying = np.where(ended & (weights > 0), weights / at_risk, 0.0)
    return times, np.cumprod(1.0 - np.minimum(dying, 1.0), axis=-1)


def prediction_error(prediction: LengthPrediction, group: np.ndarray, lengths: np.ndarray) -> PredictionError:
    """Compare predictions of [prompts] with answers: `group` [answers] is the index of each answer's prompt."""
    return PredictionError(
        rank_correlation=rank_correlation(prediction.mean[group], lengths),
        below_p50=float(np.mean(lengths <= prediction.p50[group])),
        below_p90=float(np.mean(lengths <= prediction.p90[group])),
    )


def rank_correlation(left: np.ndarray, right: np.ndarray) -> float:
    """Return Spearman's rank correlation, ties ranked alike; NaN if one side is constant."""
    left_ranks, right_ranks = _ranks(left), _ranks(right)
    left_ranks -= left_ranks.mean()
    right_ranks -= right_ranks.mean()
    spread = np.sqrt((left_ranks**2).sum() * (right_ranks**2).sum())
    return float((left_ranks * right_ranks).sum() / spread) if spread > 0 else float("nan")


def _ranks(values: np.ndarray) -> np.ndarray:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2.0)[inverse]
