"""Makes what rhyme_verl's own actors say visible: Ray shows what they print, but sets no logging up in them."""

from __future__ import annotations

import logging


def show() -> None:
    """Let messages of this package from INFO on appear in this process, unless logging has been set up already."""
    package = logging.getLogger(__package__)
    if package.handlers or logging.getLogger().handlers:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s rhyme_verl %(levelname)s: %(message)s"))
    package.addHandler(handler)
    package.setLevel(logging.INFO)
    package.propagate = False
