"""Checks of what drafting costs with a job's model and engine settings on a GPU, and of the statistics of its runs."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from rhyme_verl.commands.doctor.finding import Finding, fault, note
from rhyme_verl.config import KEY, RhymeConfig
from rhyme_verl.integration.preflight import ROLLOUT

LONG_DRAFT = 8  # tokens; a stateful model needs one more copy of its state per draft token
# How a model's config.json names layers that keep a state, and multi-head latent attention.
STATE_LAYERS = ("mamba", "linear_attention", "ssm")
STATE_KEYS = ("mamba_d_state", "ssm_state_size", "linear_num_value_heads", "hybrid_override_pattern", "mamba_num_heads")
LATENT_KEY = "kv_lora_rank"


def check_engine(config: Any, rhyme: RhymeConfig) -> Iterator[Finding]:
    """Check a job on GPUs for settings that make drafting expensive; skip a job that does not draft."""
    if not rhyme.spec.enabled:
        return
    yield from _graphs(config)
    model = _text_config(OmegaConf.select(config, "actor_rollout_ref.model.path"))
    if has_state(model) and rhyme.spec.max_draft_tokens > LONG_DRAFT:
        yield note(
            "model",
            f"its layers keep a state, and vLLM stores one copy per draft token, {rhyme.spec.max_draft_tokens} per "
            "request: fewer requests run concurrently",
            f"set {KEY}.spec.max_draft_tokens to a value from 4 to {LONG_DRAFT}",
        )
    if model.get(LATENT_KEY):
        yield note(
            "model",
            "it has multi-head latent attention: vLLM's backends for it are slow if rows have drafts of different "
            "lengths, as with HistoSpec",
            f"compare with {KEY}.spec.enabled=false",
        )


def check_stats(rhyme: RhymeConfig) -> Iterator[Finding]:
    """Check the statistics that the replicas of earlier runs wrote to `stats_path`, if any."""
    if rhyme.stats_path is None:
        return
    for path in sorted(Path(rhyme.stats_path).glob("replica-*.jsonl")):
        lines = path.read_text(encoding="utf-8").split("\n")[:-1]  # a last line without an end may be incomplete
        last = json.loads(lines[-1]) if lines else {}
        if last.get("drafting_off"):
            yield fault(
                "drafting",
                f"HistoSpec failed in {path.stem} and was off at step {last.get('step')}; rollouts ran undrafted",
                "look for `HistoSpec failed` in the log of that rollout server, and report it",
            )


def has_state(model: Mapping[str, Any]) -> bool:
    """Return whether a model's config (text part of config.json) has layers with a state: Mamba, linear attention."""
    layers = model.get("layer_types") or model.get("layers_block_type") or ()
    return any(key in model for key in STATE_KEYS) or any(
        kind in str(layer) for layer in layers for kind in STATE_LAYERS
    )


def _graphs(config: Any) -> Iterator[Finding]:
    key = f"{ROLLOUT}.engine_kwargs.vllm.compilation_config"
    given = OmegaConf.select(config, key)
    given = json.loads(given) if isinstance(given, str) else given or {}
    mode = str(given.get("cudagraph_mode") or "").upper()
    if mode == "FULL_DECODE_ONLY":
        yield note(
            "CUDA graphs",
            f"{mode}: its graphs serve steps in which every request has a full draft, which hardly ever happens; all "
            "others run without graphs",
            f"remove {key}.cudagraph_mode: HistoSpec then takes FULL if the GPU's attention backend allows it for "
            "drafts of different lengths, and PIECEWISE otherwise; benchmarks/engines/gpu_check.sh compares the two",
        )


def _text_config(path: str | None) -> dict[str, Any]:
    """Return the language model's part of a model's config.json; empty if the model is not in a local folder."""
    file = Path(os.path.expanduser(path or "")) / "config.json"
    if path is None or not file.is_file():
        return {}
    config = json.loads(file.read_text(encoding="utf-8"))
    found: dict[str, Any] = config.get("text_config") or config
    return found
