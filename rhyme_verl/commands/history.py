"""The commands `rhyme history info`, `prune` and `export`.

They import the compiled core only when they run, because `rhyme doctor` must start without it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from rhyme_verl.commands.terminal import errors_of, open_console
from rhyme_verl.config import GIB

MIB = 1 << 20

app = typer.Typer(no_args_is_help=True, help="Inspect, prune or export the history saved with checkpoints.")

Where = Annotated[
    Path, typer.Argument(help="A checkpoint (global_step_N), or a folder of checkpoints for all of them.")
]


@app.command()
def info(path: Where) -> None:
    """Show the content of snapshots. The exit code is 1 if there is none or if one is damaged."""
    table = Table()
    for heading in ("snapshot", "shards", "prompts", "answers", "tokens", "steps", "rewarded", "reward", "MiB on disk"):
        table.add_column(heading, justify="left" if heading == "snapshot" else "right")
    from rhyme_verl.history import snapshot_tools as files

    with errors_of("history"):
        for folder in files.find(path):
            found = files.inspect(folder)
            known, answers = found["rewarded"], found["answers"]
            table.add_row(
                folder.parent.name,
                str(found["shards"]),
                f"{found['prompts']:,}",
                f"{answers:,}",
                f"{found['tokens']:,}",
                f"{found['first_step']}-{found['last_step']}" if answers else "-",
                f"{known / answers:.0%}" if answers else "-",
                f"{found['mean_reward']:.3f}" if known else "-",
                f"{found['disk_bytes'] / MIB:,.2f}",
            )
    open_console().print(table)


@app.command()
def prune(
    path: Where,
    window_epochs: Annotated[
        int | None, typer.Option(min=1, help="Number of latest rollouts of each prompt whose answers are kept.")
    ] = None,
    budget_gib: Annotated[
        float | None,
        typer.Option(
            min=1e-6, help="Memory limit in GiB; beyond it, the prompts with the most answers lose their oldest ones."
        ),
    ] = None,
) -> None:
    """Drop old answers from snapshots by the rules of a job (history.window_epochs, history.budget_gib)."""
    if window_epochs is None and budget_gib is None:
        raise typer.BadParameter("give --window-epochs, --budget-gib or both")
    from rhyme_verl.history import snapshot_tools as files

    budget_bytes = None if budget_gib is None else int(budget_gib * GIB)
    with errors_of("history"):
        for folder in files.find(path):
            before, after = files.prune(folder, window_epochs, budget_bytes)
            open_console().print(f"{folder}: {before:,} answers before, {after:,} now")


@app.command()
def export(
    path: Where,
    out: Annotated[Path, typer.Option(help="Output file: .parquet or .jsonl.")],
) -> None:
    """Write the latest snapshot's answers to one file with columns prompt_key, step, reward, tokens (ids)."""
    from rhyme_verl.history import snapshot_tools as files

    with errors_of("history"):
        count = files.export(files.find(path)[-1], out)
    open_console().print(f"wrote {count:,} answers to {out}")
