"""Reads which settings of vLLM's `suffix` method are the fastest in the replay of a trace."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from benchmarks.common.result_files import RESULTS

DRAFTER_RESULT = RESULTS / "drafter.json"
NUM_SPECULATIVE_TOKENS = 32  # as in vLLM's documentation


def best_suffix(trace: str, rows: int, path: Path = DRAFTER_RESULT) -> dict[str, Any]:
    """Return vLLM's `speculative_config` with the highest modelled tokens/s in bench-drafter's result.

    Args:
        trace: name of the trace in the result.
        rows: number of running sequences; the replay's nearest number by ratio counts.
        path: result file of bench-drafter.

    Raises:
        ValueError: the result or the trace in it is missing.
    """
    from benchmarks.drafting.bench import ARCTIC_TUNED

    try:
        by_rows = json.loads(path.read_text(encoding="utf-8"))["traces"][trace][ARCTIC_TUNED]
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"{path}: no replay of the trace {trace} ({error!r}): run make bench-drafter") from None
    nearest = min(by_rows, key=lambda played: abs(math.log(int(played) / rows)))
    return suffix_config(by_rows[nearest]["settings"])


def suffix_config(settings: dict[str, Any]) -> dict[str, Any]:
    """Return vLLM's `speculative_config` for `suffix` with its defaults and these settings of an ArcticDrafter."""
    settings = dict(settings)
    num_tokens = settings.pop("num_speculative_tokens", NUM_SPECULATIVE_TOKENS)
    prefixed = {f"suffix_decoding_{name}": value for name, value in settings.items()}
    return {"method": "suffix", "num_speculative_tokens": num_tokens, **prefixed}
