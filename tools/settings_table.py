"""The table of docs/settings.md, from the dataclasses in rhyme_verl/config.py. `tools.docs_tables` puts it there."""

from __future__ import annotations

import dataclasses
import json

from rhyme_verl.config import RhymeConfig


def rows(config: object, prefix: str = "") -> list[tuple[str, str, str]]:
    """Return (key below custom.rhyme, default, help) of every setting."""
    found = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            found += rows(value, f"{prefix}{field.name}.")
        else:
            found.append((f"{prefix}{field.name}", json.dumps(value), field.metadata["help"]))
    return found


def table() -> str:
    lines = ["| key | default | what it does |", "|---|---|---|"]
    lines += [f"| `{key}` | `{default}` | {text} |" for key, default, text in rows(RhymeConfig())]
    return "\n".join(lines)
