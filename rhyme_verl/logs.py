"""Makes what rhyme_verl's own actors say visible: verl lets only warnings through, Ray sets no logging up in them."""

from __future__ import annotations

import logging


def show() -> None:
    """Let messages of this package from INFO on appear in this process, unless its level has been set already."""
    package = logging.getLogger(__package__)
    if package.level == logging.NOTSET:
        package.setLevel(logging.INFO)
    if not package.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s rhyme_verl %(levelname)s: %(message)s"))
        package.addHandler(handler)
        package.propagate = False
