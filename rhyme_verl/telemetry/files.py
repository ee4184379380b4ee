"""How rhyme_verl writes files: complete or not at all, and lines that a running job appends."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path in the folder of `path`, which takes its place when the block ends without an error.

    The temporary name starts with a dot and does not end like `path`, so readers of the folder ignore it.

    Raises:
        OSError: the file could not be written; the temporary file is removed.
    """
    unfinished = unfinished_file(path)
    try:
        yield unfinished
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)  # after an error; frees the space in case the disk is full


def unfinished_file(path: Path) -> Path:
    """Return the temporary file from which `path` is written; a process that is killed leaves it behind."""
    return path.with_name(f".{path.name}.unfinished")


class JsonLines:
    """A file of JSON lines. A write error is logged once and ends the writing; nothing is raised.

    Args:
        path: None: nothing is written.
        what: names the content in the log.
    """

    def __init__(self, path: Path | None, what: str) -> None:
        self.path = path
        self._what = what

    def append(self, lines: Sequence[Mapping[str, Any]]) -> None:
        if self.path is None or not lines:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with open(self.path, "a", encoding="utf-8") as file:
                file.writelines(json.dumps(line) + "\n" for line in lines)
        except OSError as error:
            logger.error("%s cannot be written to %s and stop here: %s", self._what, self.path, error)
            self.path = None
