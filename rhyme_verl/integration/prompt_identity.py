"""Identifies a prompt over all epochs: verl gives each rollout of it a new uid."""

from __future__ import annotations

import hashlib
import json
from typing import Any


def digest_of(raw_prompt: Any) -> int:
    """Return a uint64 that identifies a prompt in all epochs."""
    text = json.dumps(list(raw_prompt), sort_keys=True, default=_content)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _content(value: Any) -> str:
    """Represent a value that JSON does not support (image, array, bytes) by its content, equal in every epoch."""
    data = value.tobytes() if hasattr(value, "tobytes") else value
    if not isinstance(data, bytes):
        return str(data)
    form = [getattr(value, name, None) for name in ("mode", "size", "shape", "dtype")]
    return f"{type(value).__name__} {form} {hashlib.blake2b(data, digest_size=16).hexdigest()}"
