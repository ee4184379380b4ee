"""Console output of the commands: tables keep their columns in log files as well."""

from __future__ import annotations

import sys

from rich.console import Console

LOG_WIDTH = 150  # columns, if the output is not a terminal


def open_console() -> Console:
    """Return a console on the current standard output."""
    return Console(soft_wrap=True, highlight=False, width=None if sys.stdout.isatty() else LOG_WIDTH)
