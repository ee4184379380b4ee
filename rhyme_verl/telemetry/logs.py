"""Makes what rhyme_verl says visible in every process, whatever other libraries do to the root logger.

Ray sets no logging up in actors, verl lets only warnings through, and importing its engines leaves the root logger's
handler at errors.
"""

from __future__ import annotations

import logging


class _FallbackHandler(logging.StreamHandler):  # type: ignore[type-arg]  # no generic before Python 3.11
    """Writes the messages that no handler of the root logger writes."""

    def emit(self, record: logging.LogRecord) -> None:
        if not any(record.levelno >= handler.level for handler in logging.getLogger().handlers):
            super().emit(record)


def show() -> None:
    """Let messages of this package from INFO on appear in this process, unless its logging has been set up already."""
    package = logging.getLogger("rhyme_verl")
    if package.level == logging.NOTSET and not package.handlers:
        package.setLevel(logging.INFO)
        handler = _FallbackHandler()
        handler.setFormatter(logging.Formatter("%(levelname)s:%(asctime)s:%(name)s: %(message)s"))
        package.addHandler(handler)
