"""The demo on one CPU machine: verl trains with GRPO, with rhyme's drafts, with both of its parts, and without it.

Run from the repository's root with `make demo`, or `python -m examples.quickstart.demo --help`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from examples.quickstart.progress import Step
from examples.quickstart.quickstart import BATCH_SIZE, RHYME_KEY, console, run
from examples.quickstart.report import by_epoch, draw, epoch_table, write_summary

COMPARED_EPOCH = 2  # the first epoch with earlier answers to draft from
DRAFTS, UNITS, STOCK = "rhyme", "rhyme, units", "stock verl"
OVERLAPPING = "trainer.v1.trainer_mode=colocate_async"


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
    compare: Annotated[
        bool, typer.Option(help="Whether to run two epochs with HistoPipe's units, and with stock verl, as well.")
    ] = True,
) -> None:
    """Train the quickstart policy with verl GRPO and rhyme, and compare its steps with those of stock verl."""
    if num_problems % BATCH_SIZE or num_problems < BATCH_SIZE:
        raise typer.BadParameter(f"--num-problems must be a multiple of {BATCH_SIZE}")
    rollout, overrides = "rhyme" if drafts else "rhyme-off", override or []
    console.print("1. HistoSpec: the trainer waits for each batch (verl's mode `sync`); drafts from earlier answers")
    trace = f"+{RHYME_KEY}.trace.path={out.resolve() / 'trace'}"
    runs = {DRAFTS: run(out, epochs, num_problems, rollout, [trace, *overrides])}
    table = by_epoch(runs[DRAFTS])
    console.print(epoch_table(table))
    if compare and epochs >= COMPARED_EPOCH:
        console.print("\n2. And HistoPipe's cross-step pairing (mode `colocate_async`): answers are up to 2 steps old")
        units_out, stock_out = (out.with_name(f"{out.name}-{name}") for name in ("units", "stock"))
        runs[UNITS] = run(units_out, COMPARED_EPOCH, num_problems, rollout, [OVERLAPPING, *overrides])
        console.print("\n3. The same job with stock verl and vLLM (mode `sync`)")
        runs[STOCK] = run(stock_out, COMPARED_EPOCH, num_problems, "vllm", overrides)
    facts = {"rollout": rollout, "num_problems": num_problems, "batch_size": BATCH_SIZE}
    facts |= {"compared": {name: _epoch(steps) for name, steps in runs.items() if len(runs) > 1}}
    write_summary(out / "summary.json", table, runs[DRAFTS], facts)
    draw(out / "curves.png", runs)
    console.print(f"wrote {out / 'summary.json'} and {out / 'curves.png'}; verl's output is in {out / 'verl.log'}")
    console.print(f"`rhyme report {out}` writes a report page of the run.\n")
    if len(runs) > 1:
        console.print(_comparison(runs))
    first, last = table[0], table[-1]
    console.print(f"Reward went from {first['reward']:.2f} in epoch 1 to {last['reward']:.2f} in epoch {last['epoch']}")


def _epoch(steps: list[Step]) -> dict[str, float]:
    """Return the figures of the compared epoch."""
    compared = [step for step in steps if step.epoch == COMPARED_EPOCH]
    (figures,) = by_epoch(compared)
    return {**figures, "max_age": max(step.max_age for step in compared)}


def _comparison(runs: dict[str, list[Step]]) -> Table:
    table = Table(
        title=f"epoch {COMPARED_EPOCH}, one run each: seconds of rollouts, speed against stock, seconds with training",
        caption="accepted: tokens per verified draft; age: steps from an answer's first token to its training, at most",
    )
    for heading in ("", "rollout s", "speed", "step s", "accepted", "age"):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    stock = _epoch(runs[STOCK])
    for name, steps in runs.items():
        row = _epoch(steps)
        table.add_row(
            name,
            f"{row['rollout_seconds']:.1f}",
            f"{stock['rollout_seconds'] / row['rollout_seconds']:.2f}x" if row["rollout_seconds"] else "-",
            f"{row['step_seconds']:.1f}",
            f"{row['accepted_per_verify']:.1f}" if row["drafted"] else "-",
            f"{row['max_age']:.0f}",
        )
    return table


if __name__ == "__main__":
    typer.run(main)
