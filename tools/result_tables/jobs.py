"""Tables of whole verl jobs."""

from __future__ import annotations

import itertools
import statistics
from typing import Any

from benchmarks.jobs.job_figures import STOCK, TRAINER_SHARE, baseline
from tools.result_tables.markdown import head, result_of, row_of, with_machine


def headline() -> str:
    """The main cases of the end-to-end benchmark."""
    result = result_of("end_to_end")
    modes = {"sync": "`sync`", "colocate": "`colocate_async`"}
    rollouts = {
        "stock": "stock",
        "wait 3": "stock, verl's `wait` at 3",
        "suffix best": "vLLM's `suffix`, best settings",
        "rhyme": "rhyme",
    }
    lines = head(
        "trainer mode", "rollout", "steps per hour", "relative to stock `sync`", "accepted per verify", "maximum age",
        "mixed answers",
    )  # fmt: skip
    for mode, rollout in itertools.product(modes, rollouts):
        row = result["summary"].get(f"{mode} {rollout}")
        if row is None:  # `sync` never waits
            continue
        lines.append(
            row_of(
                modes[mode],
                rollouts[rollout],
                f"{row['steps_per_hour']:,.0f}",
                f"{row['steps_per_hour_ratio']:.2f}",
                f"{row['accepted_per_verify']:.2f}" if row["accepted_per_verify"] else "",
                f"{row['age_max']:g}",
                f"{row['mixed_share']:.0%}",
            )
        )
    return with_machine(lines, result)


def end_to_end(name: str = "end_to_end") -> str:
    """Whole verl jobs on emulated accelerators with published step times."""
    result = result_of(name)
    stock_case = baseline(result["summary"])
    stock = result["summary"][stock_case]
    trains_between = stock_case == STOCK
    lines = head(
        "job", "rounds", "rollout s per step (quartiles)", "host time", "steps per hour", f"relative to `{stock_case}`",
        "at its tokens", "device only", *["training 50 %, 100 %"] * trains_between, "accepted per verify",
        "age, mean and maximum", "mixed answers", "reward, first and last quarter", "late steps",
    )  # fmt: skip
    for case, row in result["summary"].items():
        quartiles, rewards = row["rollout_seconds_quartiles"], row["reward_by_quarter"]
        lines.append(
            row_of(
                f"`{case}`",
                str(len(row["rounds"])),
                f"{row['rollout_seconds_mean']:.1f} ({quartiles[0]:.1f}, {quartiles[1]:.1f}, {quartiles[2]:.1f})",
                f"{row['host_share']:.0%}" if row["host_share"] else "",
                f"{row['steps_per_hour']:.0f}",
                f"{row['steps_per_hour_ratio']:.2f}",
                f"{_at_equal_tokens(row, stock):.2f}",
                f"{row['device_only']['steps_per_hour_ratio']:.2f}",
                *[", ".join(f"{_relative(row, stock, share):.2f}" for share in (0.5, 1.0))] * trains_between,
                f"{row['accepted_per_verify']:.2f}",
                f"{row['age_mean']:.2f}, {row['age_max']:g}",
                f"{row['mixed_share']:.0%}",
                f"{rewards[0]:.2f}, {rewards[-1]:.2f}",
                f"{row['late_step_share']:.1%}" + ("" if row["is_valid"] else ": **not valid**"),
            )
        )
    return with_machine(lines, result)


def _relative(row: dict[str, Any], stock: dict[str, Any], share: float) -> float:
    """Return the steps per hour relative to stock's if training takes this share of stock's median rollout time."""
    ratios = []
    for number, one in row["rounds"].items():
        other = stock["rounds"][number]
        trainer_seconds = share / TRAINER_SHARE * (3600 / other["steps_per_hour"] - other["rollout_seconds_mean"])
        ours, theirs = (each["rollout_seconds_mean"] + trainer_seconds for each in (one, other))
        ratios.append(theirs / ours)
    return statistics.median(ratios)


def _at_equal_tokens(row: dict[str, Any], stock: dict[str, Any]) -> float:
    """Return the steps per hour relative to stock's if a step generated as many tokens as stock's at the same speed."""
    ratios = []
    for number, one in row["rounds"].items():
        other = stock["rounds"][number]
        trainer_seconds = 3600 / one["steps_per_hour"] - one["rollout_seconds_mean"]
        rollout_seconds = one["rollout_seconds_mean"] * other["generated_tokens"] / one["generated_tokens"]
        ratios.append(3600 / other["steps_per_hour"] / (rollout_seconds + trainer_seconds))
    return statistics.median(ratios)


def epochs() -> str:
    """The main cases of the end-to-end benchmark, epoch by epoch."""
    result = result_of("end_to_end")
    lines = head(
        "job", "epoch", "rollout s per step", "step s", "tokens/s", "accepted per verify",
        "age, mean and maximum", "mixed answers", "reward, and its range over the rounds",
    )  # fmt: skip
    for case, row in result["summary"].items():
        by_name = row["epochs"]
        for epoch in range(len(by_name["reward"])):
            value = {name: values[epoch] for name, values in by_name.items()}
            rewards = [one["epochs"]["reward"][epoch] for one in row["rounds"].values()]
            lines.append(
                row_of(
                    f"`{case}`",
                    str(epoch + 1),
                    f"{value['rollout_seconds']:.1f}",
                    f"{value['step_seconds']:.1f}",
                    f"{value['tokens_per_s']:,.0f}",
                    f"{value['accepted_per_verify']:.2f}",
                    f"{value['age_mean']:.2f}, {value['age_max']:g}",
                    f"{value['mixed_share']:.0%}",
                    f"{value['reward']:.2f} ({min(rewards):.2f} to {max(rewards):.2f})",
                )
            )
    return with_machine(lines, result)


def own_speed() -> str:
    """Whole verl jobs at this machine's own speed."""
    results = {name: result_of(name) for name in ("end_to_end_own_speed", "end_to_end_gsm8k_own_speed")}
    lines = head(
        "workload", "job", "rounds", "rollout s per step (quartiles)", "tokens/s (range over the rounds)", "step s",
        "reward by epoch", "largest difference of a token's probability",
    )  # fmt: skip
    for result in results.values():
        for case, row in result["summary"].items():
            first, median, third = row["rollout_seconds_quartiles"]
            rounds = row["rounds"].values()
            speeds = [one["tokens_per_s"] for one in rounds]
            lines.append(
                row_of(
                    {"longtail": "long tail", "gsm8k": "GSM8K recipe"}[result["workload"]],
                    f"`{case}`",
                    f"{len(rounds)}",
                    f"{median:.2f} ({first:.2f} to {third:.2f})",
                    f"{row['tokens_per_s']:,.0f} ({min(speeds):,.0f} to {max(speeds):,.0f})",
                    f"{row['raw_step_seconds']:.1f}",
                    ", ".join(f"{reward:.2f}" for reward in row["epochs"]["reward"]),
                    f"{max(one['largest_probs_difference'] for one in rounds):.0e}",
                )
            )
    return with_machine(lines, results["end_to_end_own_speed"])
