"""The arguments with which vLLM loads HistoSpec. Does not import vLLM."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from rhyme_verl.config import RhymeConfig

PROPOSER = "rhyme_verl.histospec.proposer.RhymeProposer"
ADDITIONAL_CONFIG_KEY = "rhyme"  # rhyme's settings in vLLM's `additional_config`


def speculative_config(max_draft_tokens: int) -> dict[str, Any]:
    """Return vLLM's `speculative_config`.

    It allows the maximum number of draft tokens at every batch size. Without this entry, vLLM 0.28 and later pad a
    prompt of which only one token is not cached to a full draft of invalid ids: sampling then takes as much memory as
    if every request had a full draft, and vLLM's CPU build is not exact. With data parallelism vLLM drops the entry.
    """
    return {
        "method": "custom_class",
        "model": PROPOSER,
        "num_speculative_tokens": max_draft_tokens,
        "num_speculative_tokens_per_batch_size": [[1, 1, max_draft_tokens]],  # larger batches: as the last entry
    }


def with_settings(additional_config: Any, settings: RhymeConfig) -> dict[str, Any]:
    """Return vLLM's `additional_config` (mapping, JSON or None) with rhyme's settings, which the proposer reads."""
    given = json.loads(additional_config) if isinstance(additional_config, str) else additional_config
    return {**(given or {}), ADDITIONAL_CONFIG_KEY: dataclasses.asdict(settings)}
