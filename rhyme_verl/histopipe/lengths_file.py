"""Saves the lengths of answers with verl's checkpoints, so that a resumed job can predict lengths from the start.

A file is complete or absent. It contains arrays only, so loading it executes no code.
"""

from __future__ import annotations

import logging
import zipfile
from pathlib import Path

import numpy as np

from rhyme_verl.histopipe.lengths import LengthPredictor
from rhyme_verl.telemetry.files import replacing

logger = logging.getLogger(__name__)

FILE = Path("rhyme_history") / "lengths.npz"  # relative to a checkpoint's folder
LATEST = "latest_checkpointed_iteration.txt"  # verl writes this file when a checkpoint is complete


def latest_step(checkpoints: Path) -> int | None:
    """Return the step of the latest complete checkpoint, or None."""
    try:
        return int((checkpoints / LATEST).read_text())
    except (OSError, ValueError):
        return None


def save_lengths(checkpoints: Path, step: int, state: dict[str, np.ndarray]) -> bool:
    """Save the result of `LengthPredictor.state` in a checkpoint, and return whether it exists; log a failure."""
    path = checkpoints / f"global_step_{step}" / FILE
    if not path.parents[1].is_dir():
        return False
    try:
        path.parent.mkdir(exist_ok=True)
        with replacing(path) as unfinished, open(unfinished, "wb") as file:
            np.savez(file, allow_pickle=False, **state)
    except OSError as error:
        logger.error("cannot save the lengths of answers to %s: %s", path, error)
    return True


def load_lengths(checkpoint: Path, predictor: LengthPredictor) -> bool:
    """Load the lengths of a checkpoint, and return whether there are any; log and ignore a damaged file."""
    path = checkpoint / FILE
    if not path.is_file():
        return False
    try:
        with np.load(path, allow_pickle=False) as arrays:
            predictor.restore({name: arrays[name] for name in arrays.files})
    except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile) as error:
        reason = str(error).partition("\n")[0]
        logger.warning("cannot load %s, answer lengths are learnt from scratch: %s", path, reason)
        return False
    return True
