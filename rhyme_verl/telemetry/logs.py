"""Makes rhyme_verl's log lines visible in every process, however other libraries configure the root logger.

Ray does not configure logging in actors, verl shows only warnings, and importing its engines leaves the root logger's
handler at errors.
"""

from __future__ import annotations

import logging
from typing import Any


class _FallbackHandler(logging.StreamHandler):  # type: ignore[type-arg]  # not generic before Python 3.11
    """Writes only messages that no handler of the root logger writes."""

    def emit(self, record: logging.LogRecord) -> None:
        if not any(record.levelno >= handler.level for handler in logging.getLogger().handlers):
            super().emit(record)


def show() -> None:
    """Show this package's messages from INFO on in this process, unless its logging is already configured."""
    package = logging.getLogger("rhyme_verl")
    if package.level == logging.NOTSET and not package.handlers:
        package.setLevel(logging.INFO)
        handler = _FallbackHandler()
        handler.setFormatter(logging.Formatter("%(levelname)s:%(asctime)s:%(name)s: %(message)s"))
        package.addHandler(handler)


class LogOnce:
    """Logs the first message of each kind; what happens again and again would flood a job's log."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._logged: set[str] = set()

    def __call__(self, level: int, message: str, *args: object, **options: Any) -> None:
        """Log as `Logger.log` does, unless this text has been logged before, with whatever arguments."""
        if message not in self._logged:
            self._logged.add(message)
            self._logger.log(level, message, *args, **options)
