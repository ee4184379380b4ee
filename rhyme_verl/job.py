"""Checks of a whole verl job, made before Ray starts: every error is one line with the full key or the version.

Also tells the rollout where verl keeps its checkpoints, which only the whole job's config says, and names the router
that belongs to the dispatch module. Knows verl's config
keys and its folders of checkpoints, and nothing else of verl.
"""

from __future__ import annotations

import logging
import math
import os
from pathlib import Path
from typing import Any

from hydra.errors import CompactHydraException
from omegaconf import OmegaConf

from rhyme_verl.config import KEY, ConfigError, RhymeConfig, load_config, rhyme_settings
from rhyme_verl.version import unsupported_hosts

logger = logging.getLogger(__name__)

ROLLOUT = "actor_rollout_ref.rollout"
MANAGER = "rhyme_verl.dispatch.RhymeAgentLoopManager"
ROUTER_FILE = "histopipe/router.yaml"
ROUTER = Path(__file__).parent / ROUTER_FILE


class JobError(CompactHydraException, ConfigError):
    """A ConfigError that Hydra prints as one line, without a stack trace."""


def check_job(config: Any) -> None:
    """Check the parts of a verl job that rhyme_verl depends on; does nothing when the job uses none of its classes.

    Fills in where the history is saved, what it resumes from and HistoPipe's router, unless the job's config says so
    itself.

    Raises:
        JobError: unsupported verl or vLLM, a bad setting, an engine setting that HistoSpec cannot work beside, a
            missing policy path, verl's trainer before V1, a router without its dispatch module.
    """
    rollout = OmegaConf.select(config, ROLLOUT)
    if rollout is None:
        return
    is_rhyme = rollout.get("name") == "rhyme"
    has_manager = OmegaConf.select(rollout, "agent.agent_loop_manager_class") == MANAGER
    has_router = str(rollout.get("router_config_path") or "").endswith(ROUTER_FILE)
    if not (is_rhyme or has_manager or has_router):
        return
    try:
        if problems := unsupported_hosts():
            raise ConfigError(problems[0])
        rhyme = load_config(rhyme_settings(rollout))
        if is_rhyme:
            check_engine_kwargs(rollout, rhyme)
            _check_policy_path(OmegaConf.select(config, "actor_rollout_ref.model.path"))
        if not OmegaConf.select(config, "trainer.use_v1", default=True):
            raise ConfigError(
                "trainer.use_v1=false, and rhyme_verl extends verl's trainer V1 only: set trainer.use_v1=true"
            )
        _check_pipe(rollout, has_manager, has_router)
        _locate_snapshots(config, rhyme)
        if has_router or (has_manager and rhyme.pipe.enabled and _has_default_router(rollout)):
            if rhyme.pipe.enabled:
                _check_age(config, rhyme)
            # An absolute path: verl looks others up in the working directory of a Ray actor.
            OmegaConf.update(config, f"{ROLLOUT}.router_config_path", str(ROUTER), force_add=True)
    except ConfigError as error:
        raise JobError(f"rhyme_verl: {error}") from None


def check_engine_kwargs(rollout: Any, rhyme: RhymeConfig) -> None:
    """Refuse what HistoSpec cannot work beside; never override it silently.

    Args:
        rollout: verl's rollout config, as DictConfig or RolloutConfig.
    """
    if not rhyme.spec.enabled:
        return
    engine_kwargs = (rollout.get("engine_kwargs", None) or {}).get("vllm", None) or {}
    mtp = rollout.get("mtp", None) or {}
    ours, theirs = f"{KEY}.spec.enabled", f"{ROLLOUT}.engine_kwargs.vllm"
    clash = None
    if engine_kwargs.get("speculative_config") is not None:
        clash = f"{theirs}.speculative_config and {ours} both ask for drafts"
    elif mtp.get("enable", False) and mtp.get("enable_rollout", False):
        clash = f"{ROLLOUT}.mtp.enable_rollout and {ours} both ask for drafts"
    elif engine_kwargs.get("worker_extension_cls") is not None:
        clash = f"{theirs}.worker_extension_cls takes the place of the one that {ours} needs"
    elif engine_kwargs.get("async_scheduling"):
        clash = f"{theirs}.async_scheduling=true does not go with {ours}: vLLM schedules synchronously with its drafter"
    elif rollout.get("full_determinism", False):
        clash = f"{ROLLOUT}.full_determinism=true does not go with {ours}: what is drafted depends on the clock"
    elif (rollout.get("disaggregation", None) or {}).get("enabled", False):
        clash = f"{ROLLOUT}.disaggregation.enabled=true does not go with {ours}: verl does not start it under this name"
    if clash:
        raise ConfigError(f"{clash}: remove the former, or set the latter to false")


def _has_default_router(rollout: Any) -> bool:
    return rollout.get("router_config_path") is None and not rollout.get("full_determinism")


def _check_pipe(rollout: Any, has_manager: bool, has_router: bool) -> None:
    if has_router and not has_manager:
        raise ConfigError(
            f"{ROLLOUT}.router_config_path names HistoPipe's router, which needs "
            f"{ROLLOUT}.agent.agent_loop_manager_class={MANAGER}: set that too (it alone is enough)"
        )
    if has_router and rollout.get("full_determinism"):
        raise ConfigError(
            f"{ROLLOUT}.router_config_path names HistoPipe's router, which binds by load: it does not go with "
            f"{ROLLOUT}.full_determinism=true, set one of them back"
        )


def _check_age(config: Any, rhyme: RhymeConfig) -> None:
    """Make verl submit as many batches ahead as units take, and refuse samplers that would wait for held groups."""
    mode = OmegaConf.select(config, "trainer.v1.trainer_mode", default="colocate_async")
    if mode != "colocate_async":
        return
    max_age, key = rhyme.pipe.max_age, "trainer.v1.colocate_async.num_warmup_batches"
    warmup = OmegaConf.select(config, key, default=1)
    if warmup == 1 and max_age > 1:
        OmegaConf.update(config, key, max_age, force_add=True)
        logger.info("%s is %d now, as %s.pipe.max_age needs", key, max_age, KEY)
        warmup = max_age
    elif warmup < max_age:
        logger.warning(
            "%s.pipe.max_age=%d needs %s=%d: with %s answers are younger", KEY, max_age, key, max_age, warmup
        )
    sampler = OmegaConf.select(config, "trainer.v1.sampler") or {}
    threshold = sampler.get("max_off_policy_threshold")
    if threshold is None:
        return
    strategy = sampler.get("max_off_policy_strategy", "drop")
    if strategy == "wait":
        raise ConfigError(
            f"trainer.v1.sampler.max_off_policy_strategy=wait would wait for groups that HistoPipe holds back: set "
            f"trainer.v1.sampler.max_off_policy_threshold=null ({KEY}.pipe.max_age bounds the age), or "
            f"{KEY}.pipe.enabled=false"
        )
    least = math.ceil(warmup) + max(1, max_age) + 1
    if strategy == "drop" and threshold < least:
        raise ConfigError(
            f"trainer.v1.sampler.max_off_policy_threshold={threshold} would drop groups that HistoPipe holds back: set "
            f"it to {least} or more, or to null ({KEY}.pipe.max_age bounds the age)"
        )


def _check_policy_path(path: str | None) -> None:
    if path is None or "://" in path:
        return
    looks_local = path.startswith((".", "/", "~")) or path.count("/") > 1
    if looks_local and not os.path.exists(os.path.expanduser(path)):
        raise ConfigError(f"actor_rollout_ref.model.path={path} does not exist: give a model folder or a hub name")


def _locate_snapshots(config: Any, rhyme: RhymeConfig) -> None:
    trainer = OmegaConf.select(config, "trainer")
    if trainer is None or trainer.get("default_local_dir") is None:
        return
    found = {"snapshot_dir": os.path.abspath(trainer.default_local_dir), "resume_from": _checkpoint_to_resume(trainer)}
    for name, path in found.items():
        if path is not None and getattr(rhyme.history, name) is None:
            OmegaConf.update(config, f"{KEY}.history.{name}", path, force_add=True)


def _checkpoint_to_resume(trainer: Any) -> str | None:
    """The checkpoint folder that verl's trainer will resume from, if any."""
    mode = trainer.get("resume_mode", "disable")
    if mode == "resume_path" and trainer.get("resume_from_path"):
        return os.path.abspath(trainer.resume_from_path)
    latest = Path(os.path.abspath(trainer.default_local_dir)) / "latest_checkpointed_iteration.txt"
    if mode != "auto" or not latest.is_file():
        return None
    return str(latest.with_name(f"global_step_{latest.read_text().strip()}"))
