"""The settings under `actor_rollout_ref.rollout.custom.rhyme`, verl's free extension field.

Turns a mapping into validated, frozen dataclasses without importing verl. Every error names the full key. The table of
docs/settings.md is generated from the field texts here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Optional

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

KEY = "actor_rollout_ref.rollout.custom.rhyme"
GIB = 1 << 30
MAX_DRAFT_TOKENS = 127  # vLLM's rejection sampler takes at most 128 tokens per request and step


class ConfigError(ValueError):
    """A job's config cannot be used; the message is one line, `problem: remedy`.

    Attributes:
        problem: what is wrong, with the full key.
        remedy: what to set instead.
    """

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(problem, remedy)
        self.problem = problem
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.problem}: {self.remedy}"


def _setting(
    default: Any,
    help_text: str,
    low: float | None = None,
    high: float | None = None,
    choices: tuple[str, ...] | None = None,
) -> Any:
    return field(default=default, metadata={"help": help_text, "low": low, "high": high, "choices": choices})


@dataclass(frozen=True, kw_only=True)
class SpecConfig:
    """HistoSpec: drafting from history."""

    enabled: bool = _setting(True, "Draft tokens from earlier answers. `false`: neither drafts nor history.")
    max_draft_tokens: int = _setting(
        24,
        "Maximum number of draft tokens per request and step (vLLM's `num_speculative_tokens`).",
        1,
        MAX_DRAFT_TOKENS,
    )
    max_step_tokens: Optional[int] = _setting(  # noqa: UP045  OmegaConf reads Optional
        None,
        "Maximum number of tokens in an engine step with drafts and, with log-probs, of sampled rows, which are padded "
        "to the longest draft. Default for tokens: 7/8 of `rollout.max_num_batched_tokens`, but no more than the "
        "largest CUDA graph as long as the requests fit into it. Default for rows: what three quarters of the GPU "
        "memory that is free when a rollout starts holds.",
        1,
        1 << 20,
    )
    policy: str = _setting(
        "cost_aware",
        "How draft lengths are chosen, in addition to `min_acceptance`. `fixed`: always up to `max_draft_tokens`. "
        "`cost_aware`: verify only those draft tokens that raise the batch's expected tokens per second, given the "
        "measured step times.",
        choices=("cost_aware", "fixed"),
    )
    min_acceptance: float = _setting(
        0.05,
        "Minimum probability that a draft token and all draft tokens before it are accepted; others are not drafted.",
        0.0,
        1.0,
    )
    async_scheduling: str = _setting(
        "auto",
        "`auto`: draft under vLLM's asynchronous scheduling wherever vLLM would use it without drafts, so that the "
        "accelerator does not wait for the scheduler. `off`: schedule synchronously.",
        choices=("auto", "off"),
    )
    num_threads: Optional[int] = _setting(  # noqa: UP045
        None,
        "Threads per engine process that draft for large batches. By default one per eight CPU cores, at most 8.",
        1,
        64,
    )


@dataclass(frozen=True, kw_only=True)
class HistoryConfig:
    """The history: earlier answers, kept per prompt."""

    window_epochs: int = _setting(3, "Number of most recent rollouts of each prompt whose answers are kept.", 1, 1000)
    max_tokens_per_prompt: int = _setting(
        262144,
        "Maximum number of tokens per prompt that an engine holds; the oldest answers are dropped first.",
        1,
        2**29,
    )
    replica_budget_gib: float = _setting(
        4.0,
        "Memory limit for the history in each engine process, in GiB; the least recently updated prompts go first.",
        1e-6,
        1e6,
    )
    budget_gib: float = _setting(
        4.0,
        "Memory limit for the store of all answers, over all shards, in GiB; beyond it, the prompts with the most "
        "answers lose their oldest ones.",
        0.001,
        4096.0,
    )
    shards: int = _setting(
        1, "Number of Ray actors among which the store is divided. Set it to the replicas / 64.", 1, 1024
    )
    snapshot_dir: Optional[str] = _setting(  # noqa: UP045
        None, "Checkpoint folder with which the history is saved. Filled in from `trainer.default_local_dir`."
    )
    resume_from: Optional[str] = _setting(  # noqa: UP045
        None, "Checkpoint whose history is loaded at the start. If verl resumes from a checkpoint, it is that one."
    )


@dataclass(frozen=True, kw_only=True)
class PipeConfig:
    """HistoPipe: rollouts scheduled by the lengths of earlier answers."""

    enabled: bool = _setting(
        True, "Schedule rollouts by predicted answer length. `false` keeps verl's own load balancer and order."
    )
    max_age: int = _setting(
        2,
        "Maximum number of weight updates between an answer's first token and the step that trains on it, with "
        "`trainer.v1.trainer_mode=colocate_async`. With 1, no answer is interrupted. `sync` always has 0; "
        "`separate_async` has verl's own limits.",
        0,
        64,
    )


@dataclass(frozen=True, kw_only=True)
class TraceConfig:
    """The trace of a run's trajectories."""

    path: Optional[str] = _setting(  # noqa: UP045
        None, "Folder for a Parquet trace of all answers (step, epoch, prompt, sample, tokens, reward)."
    )


@dataclass(frozen=True, kw_only=True)
class RhymeConfig:
    """All settings of rhyme_verl."""

    spec: SpecConfig = field(default_factory=SpecConfig)
    history: HistoryConfig = field(default_factory=HistoryConfig)
    pipe: PipeConfig = field(default_factory=PipeConfig)
    trace: TraceConfig = field(default_factory=TraceConfig)
    stats_path: Optional[str] = _setting(  # noqa: UP045  OmegaConf reads Optional
        None,
        "Folder for JSON-lines files: per-step statistics of each replica, and HistoPipe's schedule.",
    )


SECTIONS = ("spec", "history", "pipe", "trace")


def load_config(settings: Mapping[str, Any] | DictConfig | None) -> RhymeConfig:
    """Build the validated settings from the mapping under `custom.rhyme` (None: all defaults).

    Raises:
        ConfigError: a key is unknown, or a value has the wrong type or is out of range.
    """
    if settings is not None and not isinstance(settings, (Mapping, DictConfig)):
        raise ConfigError(f"{KEY}={settings!r} is not a mapping", "give the settings as keys below it")
    try:
        # Settings may refer to the rest of the job's config.
        given = OmegaConf.to_container(settings, resolve=True) if isinstance(settings, DictConfig) else settings
        schema = OmegaConf.structured(RhymeConfig)
        for node in (schema, *(schema[section] for section in SECTIONS)):
            OmegaConf.set_readonly(node, False)  # OmegaConf makes schemas of frozen dataclasses read-only
        merged = OmegaConf.merge(schema, given or {})
        if merged.spec.async_scheduling == "False":  # as YAML reads an `off` without quotes
            merged.spec.async_scheduling = "off"
        config = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        full_key = ".".join(part for part in (KEY, error.full_key) if part)
        reason = str(error.msg or error).splitlines()[0]
        is_unknown = isinstance(error, (ConfigKeyError, ConfigAttributeError))
        keys = error.parent_node.keys() if isinstance(error.parent_node, DictConfig) else ()
        known = f"known keys here are {', '.join(map(str, keys))}"
        raise ConfigError(f"{full_key}: {reason}", known if is_unknown else "correct its value") from error
    assert isinstance(config, RhymeConfig)
    for section in SECTIONS:
        _check_ranges(getattr(config, section), f"{KEY}.{section}")
    return config


def rhyme_settings(rollout: Any) -> Any:
    """Return the raw `custom.rhyme` mapping of a verl rollout config (DictConfig or dataclass), or None."""
    custom = rollout.get("custom", None)
    return None if custom is None else custom.get("rhyme", None)


def _check_ranges(section: Any, prefix: str) -> None:
    for name, spec in section.__dataclass_fields__.items():
        value, low, high = getattr(section, name), spec.metadata["low"], spec.metadata["high"]
        choices = spec.metadata["choices"]
        if choices is not None and value not in choices:
            raise ConfigError(f"{prefix}.{name}={value!r} is not valid", f"choose from {', '.join(choices)}")
        if value is None:
            continue
        if (low is not None and value < low) or (high is not None and value > high):
            raise ConfigError(f"{prefix}.{name}={value} is out of range", f"give a value from {low} to {high}")
