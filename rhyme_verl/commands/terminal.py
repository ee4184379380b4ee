"""Console output of the commands: tables keep their columns in log files as well, and errors are one red line."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console

LOG_WIDTH = 150  # columns, if the output is not a terminal


def open_console() -> Console:
    """Return a console on the current standard output."""
    return Console(soft_wrap=True, highlight=False, width=None if sys.stdout.isatty() else LOG_WIDTH)


@contextmanager
def errors_of(command: str) -> Iterator[None]:
    """End a command with exit code 1 and the message of an error that its user can fix."""
    try:
        yield
    except (ValueError, OSError) as error:
        open_console().print(f"rhyme {command}: {error}", style="red", markup=False)
        raise typer.Exit(1) from None
