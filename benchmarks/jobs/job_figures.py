"""The figures and bars of the end-to-end benchmark, from the analysed steps of its jobs."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable
from typing import Any

from rich.table import Table
from scipy import stats

from benchmarks.common.result_files import bar
from benchmarks.jobs.emulated_clock import EmulatedTime
from examples.quickstart.progress import SAME_PROBABILITY

EPOCH_STEPS = 4  # an epoch is whole units of two steps; figures are from the second epoch on
TRAINER_SHARE = 0.15  # trainer's time in steps/h, as a share of stock verl's rollout seconds
STOCK = "sync stock"
SEPARATE = "separate"  # cases whose trainer has GPUs of its own and trains meanwhile
SEPARATE_STOCK = f"{SEPARATE} stock"
OWN_MODES = ("sync stock", "colocate stock", "colocate wait 2", "colocate wait 3")  # without rhyme or `suffix`
ALPHA, POWER = 0.05, 0.8  # of the test for equal rewards
# By result: figure, case, compared with, at least. Rollout seconds are compared the other way around.
RATIO_BARS: dict[str, tuple[tuple[str, str, str, float], ...]] = {
    "end_to_end": (
        ("steps_per_hour", "colocate rhyme", "sync stock", 2.6),
        ("rollout_seconds_mean", "sync rhyme", "sync stock", 2.3),
        ("rollout_seconds_mean", "sync histospec", "sync stock", 1.8),
        ("steps_per_hour", "sync rhyme", "sync suffix best", 1.25),
        ("steps_per_hour", "colocate rhyme", "colocate suffix best", 1.25),
        ("steps_per_hour", "sync rhyme", "sync histospec", 0.98),
        ("steps_per_hour", "sync rhyme, 1 replica", "sync histospec, 1 replica", 0.98),
    ),
    "end_to_end_gsm8k_noisy": (("rollout_seconds_mean", "sync rhyme", "sync stock", 1.3),),
}
OURS = ("histospec", "histopipe", "rhyme")
NEVER_SLOWER, NEVER_SLOWER_IN_A_ROUND = 0.98, 0.95  # rollout speed of these, relative to stock in the same mode
RECENT = 2  # steps: verl's modes without older answers are compared apart

Rounds = dict[int, dict[str, Any]]  # figures by round


def figures_of(run: dict[str, Any], dilation: float, trainer_seconds: float) -> dict[str, Any]:
    """Return the figures of one run, in emulated seconds.

    `device_only`: without the host time that was charged. `generated_tokens`: generated in these steps; in asynchronous
    modes, they are not those that were trained on in these steps, of which `tokens_per_s` is.
    """
    steps = run["steps"][EPOCH_STEPS:]
    seconds = [step["rollout_seconds"] / dilation for step in steps]
    device_seconds = [(step["rollout_seconds"] - step["host_seconds"]) / dilation for step in steps]
    tokens = sum(step["tokens"] for step in steps)
    first_tokens = sum(step["requests"] for step in steps)
    first_epoch = [step["rollout_seconds"] / dilation for step in run["steps"][:EPOCH_STEPS]]
    emulated = _sum(run["emulated"][EPOCH_STEPS:])
    rewards = [step["reward"] for step in run["steps"]]
    quarter = max(1, len(rewards) // 4)
    quarters = [statistics.mean(rewards[i * quarter : (i + 1) * quarter]) for i in range(4)]
    return {
        "rollout_seconds_mean": statistics.mean(seconds),
        "rollout_seconds_quartiles": statistics.quantiles(seconds, n=4),
        "first_epoch_rollout_seconds": statistics.mean(first_epoch),
        "steps_per_hour": 3600 / (statistics.mean(seconds) + trainer_seconds),
        "raw_step_seconds": statistics.median(step["step_seconds"] for step in steps),
        "tokens_per_s": tokens / sum(seconds),
        "generated_tokens": emulated.verifies + emulated.accepted + first_tokens if emulated.seconds else tokens,
        "host_share": emulated.host_seconds / emulated.seconds if emulated.seconds else 0.0,
        "asynchronous": run["asynchronous"],
        "device_only": {
            "rollout_seconds_mean": statistics.mean(device_seconds),
            "steps_per_hour": 3600 / (statistics.mean(device_seconds) + trainer_seconds),
            "tokens_per_s": tokens / sum(device_seconds),
        },
        "accepted_per_verify": emulated.accepted / max(1, emulated.verifies),
        "drafted_per_verify": emulated.drafted / max(1, emulated.verifies),
        "bubble": run["measured"]["bubble"],
        "age_mean": statistics.mean(step["staleness_worst_mean"] for step in steps),
        "age_max": max(step["staleness_worst_max"] for step in steps),
        "mixed_share": statistics.mean(step["spanning_share"] for step in steps),
        "reward_by_quarter": quarters,
        "last_rewards": rewards[-quarter:],
        "min_probs_correlation": min(step["probs_correlation"] for step in run["steps"]),
        "largest_probs_difference": max(step["largest_probs_difference"] for step in run["steps"]),
        "late_step_share": emulated.late_step_share,
        "late_time_share": emulated.late_time_share,
        "is_valid": emulated.is_valid,
        "epochs": {**by_epoch(run["steps"], dilation), "accepted_per_verify": _accepted_by_epoch(run["emulated"])},
    }


def by_epoch(steps: list[dict[str, Any]], dilation: float = 1.0) -> dict[str, list[float]]:
    """Return means over the steps of each epoch; seconds are emulated ones."""
    found: dict[str, list[float]] = {}
    for first in range(0, len(steps), EPOCH_STEPS):
        epoch = steps[first : first + EPOCH_STEPS]
        seconds = [step["rollout_seconds"] / dilation for step in epoch]
        figures = {
            "rollout_seconds": statistics.mean(seconds),
            "step_seconds": statistics.mean(step["step_seconds"] / dilation for step in epoch),
            "tokens_per_s": sum(step["tokens"] for step in epoch) / sum(seconds),
            "bubble": statistics.mean(step["bubble"] for step in epoch),
            "age_mean": statistics.mean(step["staleness_worst_mean"] for step in epoch),
            "age_max": max(step["staleness_worst_max"] for step in epoch),
            "mixed_share": statistics.mean(step["spanning_share"] for step in epoch),
            "reward": statistics.mean(step["reward"] for step in epoch),
        }
        for name, value in figures.items():
            found.setdefault(name, []).append(value)
    return found


def _accepted_by_epoch(emulated: list[dict[str, float]]) -> list[float]:
    epochs = [_sum(emulated[first : first + EPOCH_STEPS]) for first in range(0, len(emulated), EPOCH_STEPS)]
    return [epoch.accepted / max(1, epoch.verifies) for epoch in epochs]


def _sum(steps: list[dict[str, float]]) -> EmulatedTime:
    return EmulatedTime(**{name: sum(step[name] for step in steps) for name in vars(EmulatedTime())})


def figures_by_round(runs: list[dict[str, Any]], dilation: float) -> dict[str, Rounds]:
    """Return the figures by case and round; every round has one trainer time, from its run of stock verl.

    Ratios are relative to STOCK, or to SEPARATE_STOCK where only such cases have run.
    """
    found: dict[str, Rounds] = {}
    for number in sorted({run["round"] for run in runs}):
        of_round = {run["case"]: run for run in runs if run["round"] == number}
        stock_case = baseline(of_round)
        rollouts = [step["rollout_seconds"] / dilation for step in of_round[stock_case]["steps"][EPOCH_STEPS:]]
        trainer_seconds = TRAINER_SHARE * statistics.mean(rollouts)
        figures = {
            name: figures_of(run, dilation, 0.0 if name.startswith(SEPARATE) else trainer_seconds)
            for name, run in of_round.items()
        }
        for name, one in figures.items():
            stock = figures[stock_case]
            for ours, theirs in ((one, stock), (one["device_only"], stock["device_only"])):
                ours["steps_per_hour_ratio"] = ours["steps_per_hour"] / theirs["steps_per_hour"]
            found.setdefault(name, {})[number] = one
    return found


def baseline(chosen: Iterable[str]) -> str:
    """Return the case that the chosen ones are compared with."""
    return SEPARATE_STOCK if all(case.startswith(SEPARATE) for case in chosen) else STOCK


def summarize(by_case: dict[str, Rounds]) -> dict[str, dict[str, Any]]:
    """Return each case's figures, the medians over its rounds (`age_max`: the maximum), and those of each round."""
    return {
        name: {figure: _median([one[figure] for one in rounds.values()]) for figure in next(iter(rounds.values()))}
        | {"age_max": max(one["age_max"] for one in rounds.values()), "rounds": rounds}
        for name, rounds in by_case.items()
    }


def _median(values: list[Any]) -> Any:
    values = [value for value in values if value is not None]
    if not values:
        return None
    if isinstance(values[0], bool):
        return all(values)
    if isinstance(values[0], dict):
        return {name: _median([value[name] for value in values]) for name in values[0]}
    if isinstance(values[0], list):
        return [statistics.median(column) for column in zip(*values, strict=True)]
    return statistics.median(values)


def bars_of(by_case: dict[str, Rounds], result: str = "end_to_end") -> dict[str, dict[str, Any]]:
    """Return the bars of the cases that have run; ratios are medians over the rounds that both cases have.

    Args:
        by_case: see `figures_by_round`.
        result: name of the result, which has its own bars.
    """
    bars = {}

    def ratios(figure: str, case: str, other: str) -> list[float]:
        ours, theirs = by_case.get(case, {}), by_case.get(other, {})
        found = [ours[number][figure] / theirs[number][figure] for number in ours if number in theirs]
        return found if figure == "steps_per_hour" else [1.0 / ratio for ratio in found]

    for figure, case, other, at_least in RATIO_BARS.get(result, ()):
        if found := ratios(figure, case, other):
            what = "steps/h" if figure == "steps_per_hour" else "rollout speed"
            bars[f"{case} / {other}: {what}"] = bar(statistics.median(found), at_least=at_least)
    epochs = {"first_epoch_rollout_seconds": "in epoch 1", "rollout_seconds_mean": "from epoch 2 on"}
    for case, (figure, when) in itertools.product(by_case, epochs.items()):
        mode, _, rollout = case.partition(" ")
        if rollout in OURS and (found := ratios(figure, case, f"{mode} stock")):
            name = f"{case} / {mode} stock: rollout speed {when}"
            bars[name] = bar(statistics.median(found), at_least=NEVER_SLOWER)
            bars[f"{name}, worst round"] = bar(min(found), at_least=NEVER_SLOWER_IN_A_ROUND)
    ours, own = by_case.get("colocate rhyme", {}), by_case.get("colocate stock", {})
    shared = [number for number in ours if number in own]
    if shared:
        for max_age, name, at_least in ((math.inf, "mode", 1.25), (RECENT, f"mode with age <= {RECENT}", 1.5)):
            found = [ours[n]["steps_per_hour"] / _fastest_own(by_case, n, max_age) for n in shared]
            bars[f"colocate rhyme / verl's fastest {name}: steps/h"] = bar(statistics.median(found), at_least=at_least)
        bars["colocate rhyme: maximum age"] = bar(max(ours[number]["age_max"] for number in shared), at_most=2)
        mixed = max(ours[number]["mixed_share"] / own[number]["mixed_share"] for number in shared)
        bars["colocate rhyme / colocate stock: share of mixed answers"] = bar(mixed, at_most=0.5)
    for case, rounds in by_case.items():
        if case.startswith("sync"):  # in other modes, older weights generated some of the tokens
            largest = max(one["largest_probs_difference"] for one in rounds.values())
            bars[f"{case}: largest difference of a token's probability"] = bar(largest, at_most=SAME_PROBABILITY)
    for case, stock in (("sync rhyme", "sync stock"), ("colocate rhyme", "colocate stock")):
        if case in by_case and stock in by_case:
            p_value, detectable = _reward_test(by_case[case], by_case[stock])
            name = f"{case}, {stock}: p-value of equal last rewards (finds a difference of {detectable:.3f})"
            bars[name] = bar(p_value, at_least=ALPHA)
    return bars


def _fastest_own(by_case: dict[str, Rounds], number: int, max_age: float) -> float:
    """Return the steps per hour of verl's fastest own mode in a round, of those with answers of at most this age."""
    rounds = (by_case[name][number] for name in OWN_MODES if number in by_case.get(name, {}))
    return max(one["steps_per_hour"] for one in rounds if one["age_max"] <= max_age)


def _reward_test(left: Rounds, right: Rounds) -> tuple[float, float]:
    """Compare the steps' mean rewards in the last quarter (Welch's t-test, two-sided).

    Returns:
        The p-value, and the difference of means that the test finds with a probability of `POWER`.
    """
    ours, theirs = ([reward for one in rounds.values() for reward in one["last_rewards"]] for rounds in (left, right))
    found = stats.ttest_ind(ours, theirs, equal_var=False)
    error = math.sqrt(statistics.variance(ours) / len(ours) + statistics.variance(theirs) / len(theirs))
    reach = stats.t.ppf(1.0 - ALPHA / 2.0, found.df) + stats.t.ppf(POWER, found.df)
    return float(found.pvalue), float(error * reach)


def table(summary: dict[str, dict[str, Any]], title: str) -> Table:
    result = Table(title=title)
    headings = (
        "case", "rounds", "rollout s", "steps/h", "ratio", "tok/s", "host", "device only:\nrollout s", "steps/h",
        "ratio", "acc/ver", "bubble", "age", "max", "mixed", "reward by quarter", "corr", "late", "valid",
    )  # fmt: skip
    for heading in headings:
        result.add_column(heading, justify="left" if heading == "case" else "right", no_wrap=True)
    for name, row in summary.items():
        result.add_row(
            name,
            f"{len(row['rounds'])}",
            f"{row['rollout_seconds_mean']:.2f}",
            f"{row['steps_per_hour']:.0f}",
            f"{row['steps_per_hour_ratio']:.2f}",
            f"{row['tokens_per_s']:,.0f}",
            f"{row['host_share']:.1%}" + (", async" if row["asynchronous"] else ""),
            f"{row['device_only']['rollout_seconds_mean']:.2f}",
            f"{row['device_only']['steps_per_hour']:.0f}",
            f"{row['device_only']['steps_per_hour_ratio']:.2f}",
            f"{row['accepted_per_verify']:.2f}",
            f"{row['bubble']:.0%}",
            f"{row['age_mean']:.2f}",
            f"{row['age_max']:g}",
            f"{row['mixed_share']:.0%}",
            " ".join(f"{reward:.2f}" for reward in row["reward_by_quarter"]),
            f"{row['min_probs_correlation']:.4f}",
            f"{row['late_step_share']:.1%}",
            "yes" if row["is_valid"] else "[red]no[/]",
        )
    return result
