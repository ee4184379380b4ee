"""Saves the lengths of answers with verl's checkpoints, so that a resumed job can predict lengths from the start.

A file is complete or absent. It contains arrays only, so loading it executes no code.
"""

from __future__ import annotations

import logging
import zipfile
from pathlib import Path

import numpy as np

from rhyme_verl.histopipe.lengths import LengthPredictor
from rhyme_verl.history import snapshot
from rhyme_verl.telemetry.files import replacing

logger = logging.getLogger(__name__)

FILE = Path(snapshot.FOLDER) / "lengths.npz"  # relative to a checkpoint's folder


def save_lengths(checkpoint: Path, state: dict[str, np.ndarray]) -> None:
    """Save the result of `LengthPredictor.state` in a checkpoint; remove the lengths of those whose models are gone.

    A failure is logged.
    """
    path = checkpoint / FILE
    try:
        path.parent.mkdir(exist_ok=True)
        with replacing(path) as unfinished, open(unfinished, "wb") as file:
            np.savez(file, allow_pickle=False, **state)
        for expired in snapshot.expired_checkpoints(checkpoint):
            (expired / FILE).unlink(missing_ok=True)
    except OSError as error:
        logger.error("cannot save the lengths of answers to %s: %s", path, error)


def load_lengths(checkpoint: Path, predictor: LengthPredictor) -> bool:
    """Load the lengths of a checkpoint, and return whether there are any; log and ignore a damaged file."""
    path = checkpoint / FILE
    try:
        with np.load(path, allow_pickle=False) as arrays:
            predictor.restore(dict(arrays))
        return True
    except FileNotFoundError:
        return False
    except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile) as error:
        reason = str(error).partition("\n")[0]
        logger.warning("cannot load %s, answer lengths are learnt from scratch: %s", path, reason)
        return False
