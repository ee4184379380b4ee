"""The demo on one CPU machine: stock verl trains with GRPO, first with rhyme, then for two epochs without it.

Run from the repository's root with `make demo`, or `python -m examples.quickstart.demo --help`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from examples.quickstart.progress import Step
from examples.quickstart.quickstart import BATCH_SIZE, RHYME_KEY, console, run
from examples.quickstart.report import by_epoch, draw, epoch_table, write_summary

COMPARED_EPOCH = 2  # the first epoch with earlier answers to draft from
NOISE_RATIO = 1.1  # speed-ups below this are within noise


def main(
    out: Annotated[Path, typer.Option(help="Folder of the run: data, logs, summary.json, curves.png.")] = Path(
        "runs/demo"
    ),
    epochs: Annotated[int, typer.Option(min=1, help="Epochs over the same prompts.")] = 4,
    num_problems: Annotated[int, typer.Option(help=f"Training problems, a multiple of {BATCH_SIZE}.")] = 32,
    override: Annotated[
        list[str] | None, typer.Option(help="A verl (Hydra) override, e.g. actor_rollout_ref.rollout.n=4; repeatable.")
    ] = None,
    drafts: Annotated[bool, typer.Option(help="Whether rhyme drafts; --no-drafts turns HistoSpec off.")] = True,
    compare: Annotated[bool, typer.Option(help="Whether to run two epochs with stock verl as well.")] = True,
) -> None:
    """Train the quickstart policy with verl GRPO and rhyme, and compare its rollouts with those of stock verl."""
    if num_problems % BATCH_SIZE or num_problems < BATCH_SIZE:
        raise typer.BadParameter(f"--num-problems must be a multiple of {BATCH_SIZE}")
    rollout, overrides = "rhyme" if drafts else "rhyme-off", override or []
    steps = run(out, epochs, num_problems, rollout, [f"+{RHYME_KEY}.trace.path={out.resolve() / 'trace'}", *overrides])
    table = by_epoch(steps)
    console.print(epoch_table(table))
    facts = {"rollout": rollout, "num_problems": num_problems, "batch_size": BATCH_SIZE}
    stock: list[Step] = []
    if compare and epochs >= COMPARED_EPOCH:
        console.print(f"\nThe same job with stock verl and vLLM, {COMPARED_EPOCH} epochs:")
        stock_out = out.with_name(f"{out.name}-stock")
        stock = run(stock_out, COMPARED_EPOCH, num_problems, "vllm", overrides)
        facts["stock_rollout_seconds"] = _rollout_seconds(stock)
    write_summary(out / "summary.json", table, steps, facts)
    draw(out / "curves.png", steps)
    console.print(f"wrote {out / 'summary.json'} and {out / 'curves.png'}; verl's output is in {out / 'verl.log'}")
    console.print(f"`rhyme report {out}` writes a report page of the run.")
    if stock:
        console.print(f"\n{_verdict(steps, stock)}")


def _rollout_seconds(steps: list[Step]) -> float:
    """Return the total rollout seconds of the compared epoch."""
    return sum(step.rollout_seconds for step in steps if step.epoch == COMPARED_EPOCH)


def _verdict(steps: list[Step], stock: list[Step]) -> str:
    ratio = _rollout_seconds(stock) / _rollout_seconds(steps)
    speed = f"{ratio:.2f}x as fast as" if ratio >= NOISE_RATIO else f"within noise ({ratio:.2f}x) of"
    compared = [step for step in steps if step.epoch == COMPARED_EPOCH]
    accepted, drafts = (sum(getattr(step, name) for step in compared) for name in ("accepted", "num_drafts"))
    return (
        f"In epoch {COMPARED_EPOCH}, rollouts were {speed} stock verl's, with {accepted / max(1, drafts):.1f} accepted "
        f"tokens per verified draft; reward went from {by_epoch(steps)[0]['reward']:.2f} in epoch 1 to "
        f"{by_epoch(steps)[-1]['reward']:.2f} in epoch {steps[-1].epoch}; the oldest answer trained on was "
        f"{max(step.max_age for step in steps)} weight updates old."
    )


if __name__ == "__main__":
    typer.run(main)
