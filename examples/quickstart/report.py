"""Writes a run's results: the table by epoch, `summary.json` and a plot."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

from examples.quickstart.progress import FIRST_STEP, Step


def by_epoch(steps: list[Step]) -> list[dict[str, Any]]:
    """Aggregate steps by epoch; rates are ratios of sums, not means of ratios, and leave out the job's first step."""
    epochs = []
    for epoch in sorted({step.epoch for step in steps}):
        members = [step for step in steps if step.epoch == epoch]
        drafts = sum(step.num_drafts for step in members)
        drafted = sum(step.drafted for step in members)
        accepted = sum(step.accepted for step in members)
        timed = [step for step in members if step.step > FIRST_STEP]
        seconds = sum(step.rollout_seconds for step in timed)
        epochs.append(
            {
                "epoch": epoch,
                "reward": sum(step.reward for step in members) / len(members),
                "accepted_per_verify": accepted / drafts if drafts else 0.0,
                "acceptance_rate": accepted / drafted if drafted else 0.0,
                "rollout_tokens_per_s": sum(step.tokens for step in timed) / seconds if seconds else 0.0,
                "rollout_seconds": seconds,
                "step_seconds": sum(step.step_seconds for step in timed),
                "tokens": sum(step.tokens for step in members),
                "drafted": drafted,
                "accepted": accepted,
                "verified_drafts": drafts,
                "history_tokens": members[-1].history_tokens,
                "min_probs_correlation": min(step.probs_correlation for step in members),
            }
        )
    return epochs


def epoch_table(epochs: list[dict[str, Any]]) -> Table:
    table = Table(title="by epoch; seconds without the first step, which compiles")
    for heading in ("epoch", "reward", "accepted/verify", "acceptance", "rollout tokens/s", "rollout s"):
        table.add_column(heading, justify="right")
    for row in epochs:
        table.add_row(
            str(row["epoch"]),
            f"{row['reward']:.3f}",
            f"{row['accepted_per_verify']:.2f}" if row["drafted"] else "-",
            f"{row['acceptance_rate']:.0%}" if row["drafted"] else "-",
            f"{row['rollout_tokens_per_s']:,.0f}" if row["rollout_seconds"] else "-",
            f"{row['rollout_seconds']:.1f}" if row["rollout_seconds"] else "-",
        )
    return table


def write_summary(path: Path, epochs: list[dict[str, Any]], steps: list[Step], facts: dict[str, Any]) -> None:
    content = {**facts, "epochs": epochs, "steps": [vars(step) for step in steps]}
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def draw(path: Path, runs: Mapping[str, list[Step]]) -> None:
    """Draw reward, accepted tokens per verify and seconds of the runs over the steps, by the runs' names."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(3, 1, figsize=(8, 8), sharex=True)
    for number, (name, steps) in enumerate(runs.items()):
        style = {"marker": "o", "color": f"C{number}"}
        timed = [step for step in steps if step.step > FIRST_STEP]
        drafted = [step for step in steps if step.num_drafts]
        axes[0].plot([step.step for step in steps], [step.reward for step in steps], label=name, **style)
        axes[1].plot([step.step for step in drafted], [step.accepted_per_verify for step in drafted], **style)
        axes[2].plot([step.step for step in timed], [step.step_seconds for step in timed], **style)
    longest = max(runs.values(), key=len)
    pairs = zip(longest[1:], longest, strict=False)
    first_of_epoch = [later.step for later, step in pairs if later.epoch != step.epoch]
    labels = ("mean reward", "accepted tokens per verify", "seconds per step\n(without the first)")
    for axis, label in zip(axes, labels, strict=True):
        axis.set_ylabel(label)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
        for step in first_of_epoch:
            axis.axvline(step - 0.5, color="grey", linestyle=":")
    axes[0].legend()
    axes[0].set_title("verl GRPO; dotted lines: a new epoch starts")
    axes[-1].set_xlabel("training step")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
