"""Compares two samples of tokens with a chi-square test, and says what it can detect. Knows nothing of engines."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

LEAST_COUNT = 20  # of a token in both samples together; rarer tokens are counted as one
POWER = 0.8


@dataclass(frozen=True)
class Comparison:
    """The result of a test.

    Attributes:
        p_value: probability of a difference at least this large if both samples have one distribution.
        detectable: smallest total variation distance, averaged over the groups, that the test detects with
            probability POWER.
    """

    p_value: float
    detectable: float


def compare(left: Sequence[Sequence[int]], right: Sequence[Sequence[int]], alpha: float) -> Comparison | None:
    """Test whether the tokens of each group have the same distribution in both samples.

    Args:
        left, right: independent token ids by group, such as the second token of every answer to a prompt. The samples
            may differ in size.
        alpha: significance level for which `detectable` holds.

    Returns:
        None if every group has only one token that is not rare, so that nothing can be compared.
    """
    statistic, freedom, size = 0.0, 0, 0.0
    for ours, theirs in zip(left, right, strict=True):
        counts = _counts(Counter(ours), Counter(theirs))
        if len(counts) < 2:
            continue
        ratio = math.sqrt(len(theirs) / len(ours))
        statistic += sum((ratio * a - b / ratio) ** 2 / (a + b) for a, b in counts)
        freedom += len(counts) - 1
        size += len(ours) * len(theirs) / (len(ours) + len(theirs))
    if not freedom:
        return None
    critical = _solve(lambda value: exceeds(value, freedom) > alpha)
    noncentrality = _solve(lambda value: exceeds(critical, freedom, value) < POWER)
    # At a total variation distance d, the noncentrality is at least 4 d² size (Cauchy-Schwarz).
    return Comparison(exceeds(statistic, freedom), min(1.0, math.sqrt(noncentrality / size) / 2.0))


def exceeds(value: float, freedom: int, noncentrality: float = 0.0) -> float:
    """Return the probability that a noncentral chi-square variable exceeds `value`."""
    import torch

    # The distribution is a mixture of central ones, whose weights are Poisson probabilities with this mean.
    mean = noncentrality / 2.0
    index = torch.arange(math.ceil(mean + 12.0 * math.sqrt(mean)) + 1, dtype=torch.float64)
    weights = torch.exp(torch.special.xlogy(index, mean) - mean - torch.lgamma(index + 1.0))
    tails = torch.special.gammaincc(index + freedom / 2.0, torch.full_like(index, value / 2.0))
    return float((weights * tails).sum())


def _counts(ours: Counter[int], theirs: Counter[int]) -> list[tuple[int, int]]:
    """Return the counts of each frequent token in both samples, and of all others together."""
    frequent = [token for token in ours | theirs if ours[token] + theirs[token] >= LEAST_COUNT]
    counts = [(ours[token], theirs[token]) for token in frequent]
    rest = ours.total() - sum(a for a, _ in counts), theirs.total() - sum(b for _, b in counts)
    return [*counts, rest] if sum(rest) else counts


def _solve(is_below: Callable[[float], bool]) -> float:
    """Return the positive number up to which `is_below` holds."""
    low, high = 0.0, 1.0
    while is_below(high):
        high *= 2.0
    for _ in range(50):
        middle = (low + high) / 2.0
        low, high = (middle, high) if is_below(middle) else (low, middle)
    return high
