"""Selects the settings of vLLM's `suffix` method that are fastest in the replay of a trace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.common.result_files import RESULTS

DRAFTER_RESULT = RESULTS / "drafter.json"
NUM_SPECULATIVE_TOKENS = 32  # as in vLLM's documentation


def best_suffix(trace: str, rows: int, path: Path = DRAFTER_RESULT) -> dict[str, Any]:
    """Return vLLM's `speculative_config` with the highest modelled tokens/s in bench-drafter's result.

    Args:
        trace: name of the trace in the result.
        rows: concurrency of the replay.
        path: result file of bench-drafter.

    Raises:
        ValueError: the result or the trace in it is missing.
    """
    from benchmarks.drafting.bench import ARCTIC

    try:
        played = json.loads(path.read_text(encoding="utf-8"))["traces"][trace]
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"{path}: no replay of the trace {trace} ({error!r}): run make bench-drafter") from None
    at = str(rows)
    speeds = {name: played[name][at]["modelled_tokens_per_s"] for name in ARCTIC if at in played.get(name, {})}
    if not speeds:
        raise ValueError(f"{path}: suffix was not replayed at {rows} rows")
    settings = ARCTIC[max(speeds, key=speeds.__getitem__)]
    return suffix_config({f"suffix_decoding_{name}": value for name, value in settings.items()})


def suffix_config(settings: dict[str, Any]) -> dict[str, Any]:
    """Return vLLM's `speculative_config` for `suffix` with its defaults and these settings."""
    return {"method": "suffix", "num_speculative_tokens": NUM_SPECULATIVE_TOKENS, **settings}
