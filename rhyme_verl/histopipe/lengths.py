"""Predicts the lengths of a prompt's answers from the lengths of its earlier answers.

The length of an answer that was cut off at the limit is only a lower bound. Such lengths are treated as censored
(Kaplan-Meier estimator). Does not depend on verl, vLLM or Ray. Not thread-safe.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

POPULATION_QUANTILES = 25  # points that represent the length distribution over all prompts
POPULATION_SIZE = 65536  # number of latest lengths, over all prompts, that form this distribution
MAX_PROMPTS = 1 << 20  # they take about 320 MB with 32 answers per prompt
ANSWER = [("lengths", np.int32), ("censored", np.bool_), ("steps", np.int32)]  # what is kept of an answer


class LengthPredictor:
    """Predicts from a prompt's latest answers, and from those of all prompts if it has few or none."""

    def __init__(
        self,
        *,
        answers_per_prompt: int = 32,  # number of latest answers that are kept per prompt
        half_life_steps: float = 64.0,  # training steps after which the weight of a length is halved
        prior_answers: float = 1.0,  # weight of the distribution over all prompts, in answers of the prompt itself
        default_tokens: float = 1024.0,  # predicted length before any answer has been observed
        max_prompts: int = MAX_PROMPTS,  # number of prompts that are kept; a new one replaces the one known longest
    ) -> None:
        self._num_kept = answers_per_prompt
        self._half_life = half_life_steps
        self._prior = prior_answers
        self._default_tokens = default_tokens
        self._max_prompts = max_prompts
        self._step = 0
        self._rows: OrderedDict[int, int] = OrderedDict()
        row = [("prompts", np.uint64), ("seen", np.int64)]  # `seen`: answers observed, including overwritten ones
        columns = [(name, dtype, answers_per_prompt) for name, dtype in ANSWER]
        self._prompts = np.zeros(0, dtype=[*row, *columns])
        self._all = np.zeros(POPULATION_SIZE, dtype=ANSWER)
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
        if not len(prompt_keys):
            return float("nan")
        self._step = max(step, self._step)
        unique, group = np.unique(np.asarray(prompt_keys, dtype=np.uint64), return_inverse=True)
        correlation = rank_correlation(self.predict(unique)[group], lengths) if self._num_all else float("nan")
        answers = np.zeros(len(group), dtype=ANSWER)
        answers["lengths"], answers["censored"], answers["steps"] = lengths, truncated, self._step
        order = np.argsort(group, kind="stable")
        counts = np.bincount(group)
        position = np.arange(len(group)) - np.repeat(np.cumsum(counts) - counts, counts)  # among the prompt's answers
        row = np.repeat(self._rows_for(unique), counts)
        column = (self._prompts["seen"][row] + position) % self._num_kept
        for name in answers.dtype.names or ():
            self._prompts[name][row, column] = answers[name][order]
        np.add.at(self._prompts["seen"], row, 1)
        latest = slice(-POPULATION_SIZE, None)
        self._all[(self._num_all + np.arange(len(answers))[latest]) % POPULATION_SIZE] = answers[latest]
        self._num_all += len(answers)
        return correlation

    def __len__(self) -> int:
        """Return the number of answers observed so far."""
        return self._num_all

    def state(self) -> dict[str, np.ndarray]:
        """Return a copy of the predictor's state, for `restore`."""
        prompts, latest = self._prompts[: len(self._rows)].copy(), self._all[: self._num_all].copy()
        return {
            **{name: prompts[name] for name in prompts.dtype.names or ()},
            **{f"all_{name}": latest[name] for name in latest.dtype.names or ()},
            "counters": np.array([self._step, self._num_all]),
        }

    def restore(self, state: dict[str, np.ndarray]) -> None:
        """Replace the state of a new predictor by one that `state` returned.

        Raises:
            KeyError, ValueError: it is not such a state, or has another number of answers per prompt.
        """
        prompts = np.zeros(len(state["prompts"]), dtype=self._prompts.dtype)
        latest = np.zeros_like(self._all)
        for name in prompts.dtype.names or ():
            if state[name].shape != prompts[name].shape:
                raise ValueError(f"{name} does not have the shape of a length predictor's state")
            prompts[name] = state[name]
        for name in latest.dtype.names or ():
            latest[name][: len(state[f"all_{name}"])] = state[f"all_{name}"]
        self._step, self._num_all = (int(value) for value in state["counters"])
        self._rows = OrderedDict((key, row) for row, key in enumerate(prompts["prompts"].tolist()))
        self._prompts, self._all = prompts, latest

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
        prompts, shape = self._prompts[rows], (len(rows), len(population))
        kept = np.arange(self._num_kept)[None, :] < prompts["seen"][:, None]
        weights = np.where(kept, self._recency(prompts["steps"]), 0.0)
        lengths = np.concatenate([prompts["lengths"], np.broadcast_to(population, shape)], axis=1)
        censored = np.concatenate([prompts["censored"], np.zeros(shape, dtype=bool)], axis=1)
        weights = np.concatenate([weights, np.full(shape, self._prior / len(population))], axis=1)
        return expected_lengths(lengths, censored, weights)

    def _population(self) -> np.ndarray:
        """Return quantiles [POPULATION_QUANTILES] of the lengths of all prompts."""
        latest = self._all[: self._num_all]
        times, survival = _survival(latest["lengths"], latest["censored"], self._recency(latest["steps"]))
        levels = (np.arange(POPULATION_QUANTILES) + 0.5) / POPULATION_QUANTILES
        found: np.ndarray = times[np.minimum(np.searchsorted(1.0 - survival, levels), len(times) - 1)]
        return found

    def _recency(self, steps: np.ndarray) -> np.ndarray:
        return np.exp2((steps - self._step) / self._half_life)

    def _rows_for(self, keys: np.ndarray) -> np.ndarray:
        """Return the rows of these distinct prompts; a new one takes a free row, or that of the one known longest."""
        rows = []
        for key in keys.tolist():
            row = self._rows.get(key)
            if row is None:
                full = len(self._rows) == self._max_prompts
                row = self._rows.popitem(last=False)[1] if full else len(self._rows)
                self._rows[key] = row
                if row < len(self._prompts):
                    self._prompts["seen"][row] = 0
            rows.append(row)
        if len(self._rows) > len(self._prompts):
            more = max(len(self._rows), 2 * len(self._prompts)) - len(self._prompts)
            self._prompts = np.concatenate([self._prompts, np.zeros(more, dtype=self._prompts.dtype)])
        self._prompts["prompts"][rows] = keys
        return np.array(rows, dtype=np.int64)


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
    if not (np.ptp(left_ranks) and np.ptp(right_ranks)):
        return float("nan")
    return float(np.corrcoef(left_ranks, right_ranks)[0, 1])


def _ranks(values: np.ndarray) -> np.ndarray:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2.0)[inverse]
