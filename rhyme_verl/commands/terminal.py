"""How commands print: tables keep their columns in a log, too."""

from __future__ import annotations

import sys

from rich.console import Console

LOG_WIDTH = 150  # where nothing says how wide the output is


def open_console() -> Console:
    """Return a console on the standard output of this moment."""
    return Console(soft_wrap=True, highlight=False, width=None if sys.stdout.isatty() else LOG_WIDTH)
