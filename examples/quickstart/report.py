"""Writes a run's results: the table by epoch, `summary.json` and a plot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.table import Table

from examples.quickstart.progress import Step


def by_epoch(steps: list[Step]) -> list[dict[str, Any]]:
    """Aggregate steps by epoch; rates are ratios of sums, not means of ratios."""
    epochs = []
    for epoch in sorted({step.epoch for step in steps}):
        members = [step for step in steps if step.epoch == epoch]
        drafts = sum(step.num_drafts for step in members)
        drafted = sum(step.drafted for step in members)
        accepted = sum(step.accepted for step in members)
        seconds = sum(step.rollout_seconds for step in members)
        epochs.append(
            {
                "epoch": epoch,
                "reward": sum(step.reward for step in members) / len(members),
                "accepted_per_verify": accepted / drafts if drafts else 0.0,
                "acceptance_rate": accepted / drafted if drafted else 0.0,
                "rollout_tokens_per_s": sum(step.tokens for step in members) / seconds,
                "rollout_seconds": seconds,
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
    table = Table(
        title="by epoch (drafts come from earlier epochs' answers to the prompt; in the first, from running ones)"
    )
    for heading in ("epoch", "reward", "accepted/verify", "acceptance", "rollout tokens/s", "rollout s"):
        table.add_column(heading, justify="right")
    for row in epochs:
        table.add_row(
            str(row["epoch"]),
            f"{row['reward']:.3f}",
            f"{row['accepted_per_verify']:.2f}" if row["drafted"] else "-",
            f"{row['acceptance_rate']:.0%}" if row["drafted"] else "-",
            f"{row['rollout_tokens_per_s']:,.0f}",
            f"{row['rollout_seconds']:.1f}",
        )
    return table


def write_summary(path: Path, epochs: list[dict[str, Any]], steps: list[Step], facts: dict[str, Any]) -> None:
    content = {**facts, "epochs": epochs, "steps": [vars(step) for step in steps]}
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def draw(path: Path, steps: list[Step]) -> None:
    """Draw reward, accepted tokens per verify and rollout speed over the steps."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(3, 1, figsize=(8, 8), sharex=True)
    curves = [
        ("mean reward", [step.reward for step in steps]),
        ("accepted tokens per verify", [step.accepted_per_verify for step in steps]),
        ("rollout tokens/s", [step.rollout_tokens_per_s for step in steps]),
    ]
    first_of_epoch = [step.step for step, before in zip(steps[1:], steps, strict=False) if step.epoch != before.epoch]
    for axis, (label, values) in zip(axes, curves, strict=True):
        axis.plot([step.step for step in steps], values, marker="o")
        axis.set_ylabel(label)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
        for step in first_of_epoch:
            axis.axvline(step - 0.5, color="grey", linestyle=":")
    axes[0].set_title("verl GRPO with rhyme; dotted lines: a new epoch starts")
    axes[-1].set_xlabel("training step")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
