"""Predicts the lengths of a prompt's answers from the lengths of its earlier answers.

The length of an answer that was cut off at the limit is only a lower bound. Such lengths are treated as censored
(Kaplan-Meier estimator). Does not depend on verl, vLLM or Ray. Not thread-safe.
"""

from __future__ import annotations

import numpy as np

POPULATION_QUANTILES = 25  # points that represent the length distribution over all prompts
POPULATION_SIZE = 65536  # number of latest lengths, over all prompts, that form this distribution
MAX_PROMPTS = 1 << 20  # their arrays take about 320 MB with 32 answers per prompt


class LengthPredictor:
    """Predicts from a prompt's latest answers, and from those of all prompts if it has few or none.

    Args:
        answers_per_prompt: number of latest answers that are kept per prompt.
        half_life_steps: training steps after which the weight of a length is halved.
        prior_answers: weight of the distribution over all prompts, in answers of the prompt itself.
        default_tokens: predicted length before any answer has been observed.
        max_prompts: number of prompts that are kept; a new prompt replaces the one known longest.
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
        self._keys = np.zeros(0, dtype=np.uint64)  # prompt of each row
        self._seen = np.zeros(0, dtype=np.int64)  # answers observed per row, including overwritten ones
        self._lengths = np.zeros((0, answers_per_prompt), dtype=np.int32)
        self._censored = np.zeros((0, answers_per_prompt), dtype=bool)
        self._steps = np.zeros((0, answers_per_prompt), dtype=np.int32)
        self._all_lengths = np.zeros(POPULATION_SIZE, dtype=np.int32)
        self._all_censored = np.zeros(POPULATION_SIZE, dtype=bool)
        self._all_steps = np.zeros(POPULATION_SIZE, dtype=np.int32)
        self._num_all = 0

    def observe(self, prompt_keys: np.ndarray, lengths: np.ndarray, truncated: np.ndarray, step: int) -> float:
        """Record a step's answers, and return how well they were predicted.

        Args:
            prompt_keys: uint64 [answers], key of each answer's prompt, in any order.
            lengths: [answers], in tokens.
            truncated: bool [answers], whether the answer was cut off at the length limit.
            step: training step; an earlier step than the latest counts as the latest.

        Returns:
            Spearman's rank correlation of predicted and true lengths, over answers; NaN if nothing was predicted or one
            side is constant.
        """
        keys = np.asarray(prompt_keys, dtype=np.uint64)
        lengths = np.asarray(lengths, dtype=np.float64)
        truncated = np.asarray(truncated, dtype=bool)
        correlation = float("nan")
        if not len(keys):
            return correlation
        step = self._step = max(step, self._step)
        unique, group = np.unique(keys, return_inverse=True)
        if self._num_all:
            correlation = rank_correlation(self.predict(unique)[group], lengths)
        order = np.argsort(group, kind="stable")
        counts = np.bincount(group)
        position = np.arange(len(keys)) - np.repeat(np.cumsum(counts) - counts, counts)  # among the prompt's answers
        row = np.repeat(self._rows_for(unique), counts)
        column = (self._seen[row] + position) % self._lengths.shape[1]
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
        return correlation

    def __len__(self) -> int:
        """Return the number of answers observed so far."""
        return self._num_all

    @property
    def num_prompts(self) -> int:
        """Number of known prompts."""
        return len(self._rows)

    def knows(self, prompt: int) -> bool:
        """Return whether an answer to this prompt has been observed."""
        return prompt in self._rows

    def state(self) -> dict[str, np.ndarray]:
        """Return a copy of the predictor's state, for `restore`."""
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
        """Replace the predictor's state by one that `state` returned.

        Raises:
            KeyError, ValueError: it is not such a state, or has another number of answers per prompt.
        """
        num, num_all = len(state["prompts"]), len(state["all_lengths"])
        if state["lengths"].shape != (num, self._lengths.shape[1]) or num_all > POPULATION_SIZE:
            raise ValueError("the arrays do not have the shapes of a length predictor's state")
        self._rows = {key: row for row, key in enumerate(state["prompts"].tolist())}
        self._keys, self._seen, self._lengths = (state[name].copy() for name in ("prompts", "seen", "lengths"))
        self._censored, self._steps = state["censored"].copy(), state["steps"].copy()
        self._all_lengths[:num_all] = state["all_lengths"]
        self._all_censored[:num_all] = state["all_censored"]
        self._all_steps[:num_all] = state["all_steps"]
        self._step, self._num_all = (int(value) for value in state["counters"])

    def predict(self, prompt_keys: np.ndarray) -> np.ndarray:
        """Return the expected length of one more answer to each prompt, in tokens (float64 [prompts]).

        Lengths beyond the longest observed one count as that length.

        Args:
            prompt_keys: uint64 [prompts].
        """
        keys = np.asarray(prompt_keys, dtype=np.uint64)
        if not self._num_all:
            return np.full(len(keys), self._default_tokens)
        population = self._population()
        rows = np.array([self._rows.get(key, -1) for key in keys.tolist()], dtype=np.int64)
        found = np.full(len(keys), population.mean())
        known = np.flatnonzero(rows >= 0)
        if len(known):
            found[known] = self._known(rows[known], population)
        return found

    def _known(self, rows: np.ndarray, population: np.ndarray) -> np.ndarray:
        num_kept = self._lengths.shape[1]
        kept = np.arange(num_kept)[None, :] < self._seen[rows, None]
        weights = np.where(kept, self._recency(self._steps[rows]), 0.0)
        shape = (len(rows), len(population))
        lengths = np.concatenate([self._lengths[rows], np.broadcast_to(population, shape)], axis=1)
        censored = np.concatenate([self._censored[rows], np.zeros(shape, dtype=bool)], axis=1)
        weights = np.concatenate([weights, np.full(shape, self._prior / len(population))], axis=1)
        return expected_lengths(lengths, censored, weights)

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
        """Return the rows of these distinct prompts; a new one takes a free row, or that of the one known longest."""
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


def expected_lengths(lengths: np.ndarray, censored: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return the mean [rows] of weighted, partly censored lengths [rows, answers]."""
    times, survival = _survival(lengths, censored, weights)
    start = np.zeros((len(times), 1))
    widths = np.diff(np.concatenate([start, times], axis=1), axis=1)
    mean: np.ndarray = (widths * np.concatenate([start + 1.0, survival[:, :-1]], axis=1)).sum(axis=1)
    return mean


def _survival(lengths: np.ndarray, censored: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the sorted lengths, and the share of answers longer than each (Kaplan-Meier), along the last axis."""
    order = np.lexsort((censored, lengths), axis=-1)  # among equal lengths, complete answers come first
    times = np.take_along_axis(lengths, order, axis=-1)
    weights = np.take_along_axis(weights, order, axis=-1)
    ended = ~np.take_along_axis(censored, order, axis=-1)
    at_risk = np.cumsum(weights[..., ::-1], axis=-1)[..., ::-1]
    with np.errstate(invalid="ignore", divide="ignore"):
        dying = np.where(ended & (weights > 0), weights / at_risk, 0.0)
    return times, np.cumprod(1.0 - np.minimum(dying, 1.0), axis=-1)


def rank_correlation(left: np.ndarray, right: np.ndarray) -> float:
    """Return Spearman's rank correlation with average ranks for ties; NaN if one side is constant."""
    left_ranks, right_ranks = _ranks(left), _ranks(right)
    left_ranks -= left_ranks.mean()
    right_ranks -= right_ranks.mean()
    spread = np.sqrt((left_ranks**2).sum() * (right_ranks**2).sum())
    return float((left_ranks * right_ranks).sum() / spread) if spread > 0 else float("nan")


def _ranks(values: np.ndarray) -> np.ndarray:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2.0)[inverse]
