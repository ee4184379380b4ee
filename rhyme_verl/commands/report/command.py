"""The command `rhyme report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rhyme_verl.commands.terminal import errors_of, open_console


def report(
    run_dir: Annotated[list[Path], typer.Argument(help="Folder of a run; several runs are compared side by side.")],
    out: Annotated[Path | None, typer.Option(help="Output file. By default report.html in the first folder.")] = None,
    name: Annotated[
        list[str] | None, typer.Option(help="Name of a run on the page, in the order of the folders; repeatable.")
    ] = None,
) -> None:
    """Build one self-contained HTML page from the files of training runs.

    Each folder and its subfolders are searched for verl's metrics (a JSON-lines file of the `file` logger), rhyme's
    statistics and schedule (`custom.rhyme.stats_path`) and its trace (`custom.rhyme.trace.path`). Sections without data
    name the setting that records it.
    """
    try:
        from rhyme_verl.commands.report.page import build
        from rhyme_verl.commands.report.run import read_run
    except ModuleNotFoundError as error:
        raise typer.BadParameter(f"the report needs pandas and plotly ({error}): pip install pandas plotly") from None
    if name and len(name) != len(run_dir):
        raise typer.BadParameter(f"--name: give one for each of the {len(run_dir)} folders, or none")
    with errors_of("report"):
        runs = [read_run(folder, name[i] if name else None) for i, folder in enumerate(run_dir)]
        path = out or run_dir[0] / "report.html"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(build(runs), encoding="utf-8")
    open_console().print(f"wrote {path}")
