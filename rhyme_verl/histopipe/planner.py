"""Shares a step's prompt groups out over the replicas by predicted length: HistoPipe's two tiers, as pure functions.

Tier 1 sorts the work from long to short and cuts the order into one contiguous range a replica, each as large as the
replica can finish within its budget of seconds by the step-cost table: long sequences run few together, which makes
each of them fast, and short ones many. The smallest budgets are searched that the whole work fits in; what the fleet
could do beyond that is turned into margin for answers that are longer than predicted.

Tier 2 is about what follows. Where all that the replicas do until their next weights is known, a step that ends in a
barrier or two steps that are rolled out with the same weights, all budgets are alike (`barrier`). Where the next step
is not known (`pipelined`), budgets fall linearly along the ranks, and ranks are given out in opposite orders in odd and
even steps, so that the budgets of a pair add up to the same on every replica. Source: RhymeRL, arXiv 2508.18588.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from rhyme_verl.histopipe.ranges import Budgets, Cut, Fleet, Ranges, Work

Mode = Literal["pipelined", "barrier"]

SPAN_SCORES = (1.3, 2.0, 2.6, 3.3, 4.5)  # tried for the longest that an answer is planned with
LEAST_GAIN = 0.03  # that a plan has to promise: an even deal depends less on predictions
MAX_DRAWS = 32
SAMPLED_SEQUENCES = 524288  # lengths drawn, in all, to compare them
LAST_TO_FIRST = (0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 1.0)  # tried ratios of a pair's smallest budget to its largest
SEARCH_REPLICAS = 64  # budgets are searched with at most this many stand-ins for all replicas
TOLERANCE = 1e-3  # of the budget search
GROWTH = 1.002  # of budgets that were too small for whole sequences
SLACK = 0.02  # of the shortest time there is, given up for margin


def find_budgets(ranges: Ranges, fleet: Fleet, mode: Mode) -> Budgets:
    """Return the smallest budgets in which the fleet finishes the work.

    Args:
        ranges: the work.
        fleet: the replicas.
        mode: `pipelined`: the sum of first and last, a pair's seconds, is minimised. `barrier`: all budgets are alike
            and the makespan is. What a fleet could do beyond that becomes margin, for `SLACK` more time.
    """
    stand_ins = min(SEARCH_REPLICAS, len(fleet.speeds))
    copies = float(fleet.speeds.sum()) / stand_ins
    speeds = [1.0] * stand_ins

    def fits(budgets: Budgets) -> bool:
        return ranges.cut(budgets, speeds, copies).complete

    def smallest(ratio: float) -> Budgets:
        first = _bisect(lambda first: fits(Budgets(first, ratio * first)))
        return Budgets(first, ratio * first)

    ratios = (1.0,) if mode == "barrier" else LAST_TO_FIRST
    best = min((smallest(ratio) for ratio in ratios), key=lambda one: one.first + one.last).scaled(1.0 + SLACK)
    inverse = _bisect(lambda inverse: fits(Budgets(best.first, best.last, 1.0 / inverse)), 1.0)
    return Budgets(best.first, best.last, 1.0 / inverse)


def _bisect(fits: Callable[[float], bool], most: float = float("inf")) -> float:
    """Return the smallest number that fits, where all above it do; `most` is known to."""
    high = min(1.0, most)
    while high < most and not fits(high):
        high = min(2.0 * high, most)
    low = high / 2.0 if high > 1.0 else 0.0
    while high - low > max(TOLERANCE * high, TOLERANCE):
        middle = (low + high) / 2.0
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def exact_cut(ranges: Ranges, budgets: Budgets, speeds: np.ndarray) -> tuple[Cut, Budgets]:
    """Cut for replicas of these speeds, in the order of their ranks, and give all more time until everything fits.

    The search for budgets has stand-ins for the replicas, and halves of sequences.
    """
    growth = GROWTH
    while not (cut := ranges.cut(budgets, speeds.tolist())).complete:
        budgets = budgets.scaled(growth)
        growth **= 1.2  # mostly one or two rounds; very unequal speeds take more
    return cut, budgets


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A step's work in order, longest first, and how it is cut.

    Attributes:
        ranges: the work.
        budgets: by which it is cut.
        cut: the ranges.
        spans: float64 [groups], what the longest answer of each group is planned with.
        sequences: int64 [sequences], numbers of the sequences (group by group in the order of `Work`), longest first.
    """

    ranges: Ranges
    budgets: Budgets
    cut: Cut
    spans: np.ndarray
    sequences: np.ndarray


def schedule(work: Work, fleet: Fleet, mode: Mode, *, seed: int = 0) -> Schedule:
    """Order and cut a step's work for replicas by rank, in the order of `fleet.speeds`.

    How much longer than expected answers have to be planned for is found by trial: lengths are drawn from the
    predictions, and the schedule that ends first on average is taken.
    """
    if mode == "barrier" and np.ptp(work.p50) == 0.0:
        return _even_schedule(work, fleet)  # nothing is known to tell groups apart
    rng = np.random.default_rng(seed)
    num_sequences = int(work.samples.sum())
    certain = bool(np.all(work.p90 <= work.p50))
    num_draws = 1 if certain else max(1, min(MAX_DRAWS, SAMPLED_SEQUENCES // num_sequences))
    median = np.repeat(work.p50, work.samples)
    spread = np.repeat(work.spread(), work.samples)
    draws = median * np.exp(spread * rng.standard_normal((num_draws, num_sequences)))
    lengths = np.minimum(draws, work.max_tokens)

    def mean_seconds(one: Schedule) -> float:
        return float(np.mean([_seconds(one, draw, fleet, mode) for draw in lengths]))

    trials = [_schedule(work, scores, fleet, mode) for scores in ((0.0,) if certain else SPAN_SCORES)]
    best = min(trials, key=mean_seconds)
    if mode == "barrier":
        even = _even_schedule(work, fleet)
        if mean_seconds(best) > (1.0 if certain else 1.0 - LEAST_GAIN) * mean_seconds(even):
            return even
    return best


def _even_schedule(work: Work, fleet: Fleet) -> Schedule:
    """Deal the longest sequences out in turn, as many to each replica: best where lanes, not lengths, are short."""
    spans = work.spans(0.0)
    ranges = Ranges(work, spans, fleet)
    sequences = _longest_first(work, ranges)
    num, num_sequences = len(fleet.speeds), len(sequences)
    wave = min(fleet.max_running, -(-num_sequences // num))
    ranges.limit_wave(wave)
    total = ranges.tokens_before(num_sequences)
    alone = fleet.cost.replica_seconds(total, work.max_tokens, fleet.max_running) / fleet.speeds.min()
    seconds = 2.0 * float(alone)  # not what the work is cut by
    budgets = Budgets(seconds, seconds)
    place = np.arange(min(num_sequences, wave * num))
    sequences[: len(place)] = sequences[np.lexsort((place, place % num))]
    cut = ranges.cut(budgets, fleet.speeds.tolist())
    return Schedule(ranges=ranges, budgets=budgets, cut=cut, spans=spans, sequences=sequences)


def _schedule(work: Work, scores: float, fleet: Fleet, mode: Mode) -> Schedule:
    spans = work.spans(scores)
    ranges = Ranges(work, spans, fleet)
    cut, budgets = exact_cut(ranges, find_budgets(ranges, fleet, mode), fleet.speeds)
    return Schedule(ranges=ranges, budgets=budgets, cut=cut, spans=spans, sequences=_longest_first(work, ranges))


def _longest_first(work: Work, ranges: Ranges) -> np.ndarray:
    """Return the numbers [sequences] of all sequences in the order of the ranges."""
    samples = work.samples[ranges.order]
    first = (np.cumsum(work.samples) - work.samples)[ranges.order]
    within = np.arange(samples.sum()) - np.repeat(np.cumsum(samples) - samples, samples)
    return np.repeat(first, samples) + within


def ranks_of(schedule: Schedule, tokens: np.ndarray) -> np.ndarray:
    """Return the rank [sequences] that should run each sequence of the schedule, of expected `tokens` in its order."""
    rank = np.searchsorted(np.asarray(schedule.cut.ends), np.arange(len(tokens)) + 0.5)
    fillers = rank == len(schedule.cut.ends)
    if fillers.any():
        spare = np.cumsum(schedule.cut.spare)
        done = np.cumsum(tokens[fillers])
        rank[fillers] = np.searchsorted(spare / spare[-1], (done - tokens[fillers] / 2.0) / done[-1])
    return rank


def _seconds(one: Schedule, lengths: np.ndarray, fleet: Fleet, mode: Mode) -> float:
    """Return the seconds of the step, or of a pair of such steps, if the answers have these lengths."""
    num = len(fleet.speeds)
    ordered = lengths[one.sequences]
    rank = ranks_of(one, ordered)
    longest = np.zeros(num)
    np.maximum.at(longest, rank, ordered)
    tokens = np.bincount(rank, weights=ordered, minlength=num)
    seconds = fleet.cost.replica_seconds(tokens, longest, fleet.max_running) / fleet.speeds
    return float((seconds if mode == "barrier" else seconds + seconds[::-1]).max())


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Who should run what.

    Attributes:
        replica: int64 [sequences], group by group in the order of `Work`; the planned replica of each sequence.
        order: int64 [sequences], all sequences in the order in which they should be started, longest first.
        seconds: float64 [replicas], predicted seconds of each replica's range.
        budgets: what the ranges were cut by.
    """

    replica: np.ndarray
    order: np.ndarray
    seconds: np.ndarray
    budgets: Budgets


def plan(work: Work, fleet: Fleet, mode: Mode, *, step: int = 1) -> Plan:
    """Plan one step.

    Args:
        work: its prompt groups.
        fleet: the replicas.
        mode: `barrier` if the work, a step or a pair of steps, is all that the fleet does until it is over;
            `pipelined` for one step of a pair whose other step is not known.
        step: number of the step, for `pipelined`; odd ones go from short to long over the replicas, even ones from
            long to short.
    """
    num_replicas = len(fleet.speeds)
    ranks = np.arange(num_replicas)
    if mode == "barrier":
        replica_of_rank = np.argsort(-fleet.speeds, kind="stable")
    else:
        replica_of_rank = ranks[::-1] if step % 2 else ranks
    one = schedule(work, replace(fleet, speeds=fleet.speeds[replica_of_rank]), mode)
    tokens = np.repeat(work.tokens, work.samples)[one.sequences]
    rank = _keep_groups_together(ranks_of(one, tokens), work.samples[one.ranges.order])
    replica = np.empty(len(tokens), dtype=np.int64)
    replica[one.sequences] = replica_of_rank[rank]
    total = np.bincount(replica[one.sequences], weights=tokens, minlength=num_replicas)
    longest = np.zeros(num_replicas)
    np.maximum.at(longest, replica, np.repeat(one.spans, work.samples))
    seconds = fleet.cost.replica_seconds(total, longest, fleet.max_running) / fleet.speeds
    return Plan(replica=replica, order=one.sequences, seconds=seconds, budgets=one.budgets)


def _keep_groups_together(rank: np.ndarray, samples: np.ndarray) -> np.ndarray:
    """Give a group that lies on two ranges, each of them at least as large as the group, to the one with more of it."""
    size = np.bincount(rank)
    ends = np.cumsum(samples)
    first, last = rank[ends - samples], rank[ends - 1]
    middle = rank[ends - samples // 2 - 1]
    whole = (last - first == 1) & (np.minimum(size[first], size[last]) >= 2 * samples)
    return np.where(np.repeat(whole, samples), np.repeat(middle, samples), rank)
