"""The lengths of answers on disk, beside the history in verl's checkpoints, so that a resumed job schedules as before.

A file is complete or absent, and holds arrays only: nothing in it is ever executed.
"""

from __future__ import annotations

import logging
import os
import zipfile
from pathlib import Path

import numpy as np

from rhyme_verl.histopipe.lengths import LengthPredictor

logger = logging.getLogger(__name__)

FILE = Path("rhyme_history") / "lengths.npz"  # within a checkpoint's folder
LATEST = "latest_checkpointed_iteration.txt"  # verl writes it when a checkpoint is complete


def latest_step(checkpoints: Path) -> int | None:
    """Return the step of the latest complete checkpoint, or None."""
    try:
        return int((checkpoints / LATEST).read_text())
    except (OSError, ValueError):
        return None


def save_lengths(checkpoints: Path, step: int, state: dict[str, np.ndarray]) -> None:
    """Save what `LengthPredictor.state` returned to a checkpoint; a failure is logged."""
    path = checkpoints / f"global_step_{step}" / FILE
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(unfinished, "wb") as file:
            np.savez(file, allow_pickle=False, **state)
        os.replace(unfinished, path)
    except OSError as error:
        logger.error("the lengths of answers could not be saved to %s: %s", path, error)


def load_lengths(checkpoint: Path, predictor: LengthPredictor) -> bool:
    """Load what the checkpoint has, if anything; a damaged file is logged and ignored."""
    path = checkpoint / FILE
    if not path.is_file():
        return False
    try:
        with np.load(path, allow_pickle=False) as arrays:
            predictor.restore({name: arrays[name] for name in arrays.files})
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        reason = str(error).partition("\n")[0]
        logger.warning("%s cannot be used, lengths are learnt from scratch: %s", path, reason)
        return False
    return True
