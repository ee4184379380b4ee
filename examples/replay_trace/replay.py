"""Prints how many draft tokens of HistoSpec a recorded run accepts, per epoch, without a model or an engine.

Run from the repository's root: `python -m examples.replay_trace.replay [TRACE]`. Record a trace of your own job with
`custom.rhyme.trace.path`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.drafting.drafters import RhymeDrafter
from benchmarks.drafting.replay import Totals, load_trace, replay, width_of

RECORDED = Path(__file__).parents[2] / "benchmarks/traces/quickstart.parquet"


def table(by_epoch: dict[int, Totals]) -> Table:
    result = Table("epoch", "answers", "tokens", "accepted/verify", "acceptance", "tokens/step")
    for epoch, totals in sorted(by_epoch.items()):
        rates = totals.summary()
        result.add_row(
            str(epoch),
            f"{totals.requests:,}",
            f"{totals.tokens:,}",
            f"{rates['accepted_per_verify']:.2f}",
            f"{rates['acceptance_rate']:.0%}",
            f"{rates['tokens_per_step']:.2f}",
        )
    return result


def main(
    trace: Annotated[Path, typer.Argument(help="Parquet file of a trace, or the folder of its parts.")] = RECORDED,
    concurrency: Annotated[int, typer.Option(min=1, help="Number of concurrent requests.")] = 16,
    max_draft_tokens: Annotated[int, typer.Option(min=1, max=127, help="Maximum number of tokens per draft.")] = 24,
    min_acceptance: Annotated[float, typer.Option(min=0, max=1, help="Like custom.rhyme.spec.min_acceptance.")] = 0.05,
) -> None:
    """Replay a trace and print, per epoch, how many tokens are accepted when drafting from its history."""
    try:
        steps = load_trace(trace)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    drafter = RhymeDrafter(max_draft_tokens, width_of(steps), policy="fixed", min_acceptance=min_acceptance)
    Console(soft_wrap=True).print(table(replay(steps, drafter, concurrency)))


if __name__ == "__main__":
    typer.run(main)
