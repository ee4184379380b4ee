"""Checks a whole verl job before Ray starts, and fills in what follows from `rollout.name=rhyme`.

Every error is one line with the full key and the remedy. Knows verl's config keys and its checkpoint folders, and
nothing else of verl.
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
MANAGER_KEY = f"{ROLLOUT}.agent.agent_loop_manager_class"
ROUTER_KEY = f"{ROLLOUT}.router_config_path"
MANAGER = "rhyme_verl.integration.agent_loop.RhymeAgentLoopManager"
ROUTER_FILE = "histopipe/router.yaml"
ROUTER = Path(__file__).parents[1] / ROUTER_FILE


class JobError(CompactHydraException, ConfigError):
    """A ConfigError that Hydra prints as one line, without a stack trace."""

    def __str__(self) -> str:
        return f"rhyme_verl: {ConfigError.__str__(self)}"


def prepare_job(config: Any) -> None:
    """Check a verl job's whole config and complete it; does nothing if the job uses no part of rhyme_verl.

    Raises:
        JobError: the job cannot run as it is configured.
    """
    rollout = OmegaConf.select(config, ROLLOUT)
    if rollout is None or not (rollout.get("name") == "rhyme" or _manager(config) == MANAGER or _names_router(rollout)):
        return
    try:
        rhyme = load_config(rhyme_settings(rollout))
        check_job(config, rhyme)
        complete_job(config, rhyme)
    except ConfigError as error:
        raise JobError(error.problem, error.remedy) from None


def check_job(config: Any, rhyme: RhymeConfig) -> None:
    """Refuse a job that rhyme_verl cannot run as it is configured.

    Raises:
        ConfigError: unsupported verl or vLLM, an engine setting that HistoSpec conflicts with, a missing policy path, a
            trainer before V1, a router without its agent-loop manager, a sampler that would wait for held groups.
    """
    rollout = OmegaConf.select(config, ROLLOUT)
    for problem, remedy in unsupported_hosts():
        raise ConfigError(problem, remedy)
    if rollout.get("name") == "rhyme":
        check_engine_kwargs(rollout, rhyme)
        _check_policy_path(OmegaConf.select(config, "actor_rollout_ref.model.path"))
    if not OmegaConf.select(config, "trainer.use_v1", default=True):
        raise ConfigError(
            "trainer.use_v1=false, and rhyme_verl extends verl's V1 trainer only", "set trainer.use_v1=true"
        )
    if _names_router(rollout) and not _has_our_manager(config):
        raise ConfigError(
            f"{ROUTER_KEY} names HistoPipe's router, which needs rhyme_verl's agent-loop manager",
            f"leave {MANAGER_KEY} unset with {ROLLOUT}.name=rhyme, or set it to {MANAGER}",
        )
    if _names_router(rollout) and rollout.get("full_determinism"):
        raise ConfigError(
            f"{ROUTER_KEY} names HistoPipe's router, which conflicts with {ROLLOUT}.full_determinism=true",
            "unset one of them",
        )
    if schedules(config, rhyme):
        _check_sampler(config, rhyme)


def complete_job(config: Any, rhyme: RhymeConfig) -> None:
    """Fill in what the job leaves open: agent-loop manager, router, batches ahead, and where the history is saved."""
    rollout = OmegaConf.select(config, ROLLOUT)
    if not _has_our_manager(config):
        if rhyme.pipe.enabled:
            logger.info("HistoPipe is off: the job has an agent-loop manager of its own (%s)", _manager(config))
    elif rollout.get("name") == "rhyme":
        OmegaConf.update(config, MANAGER_KEY, MANAGER, force_add=True)
    _locate_snapshots(config, rhyme)
    if schedules(config, rhyme):
        _submit_ahead(config, rhyme)
        # An absolute path: verl looks others up in the working directory of a Ray actor.
        OmegaConf.update(config, ROUTER_KEY, str(ROUTER), force_add=True)


def schedules(config: Any, rhyme: RhymeConfig) -> bool:
    """Return whether HistoPipe schedules this job's rollouts."""
    rollout = OmegaConf.select(config, ROLLOUT)
    is_free = rollout.get("router_config_path") is None and not rollout.get("full_determinism")
    return rhyme.pipe.enabled and _has_our_manager(config) and (is_free or _names_router(rollout))


def check_engine_kwargs(rollout: Any, rhyme: RhymeConfig) -> None:
    """Refuse what HistoSpec conflicts with; nothing of it is overridden.

    Args:
        rollout: verl's rollout config, as DictConfig or RolloutConfig.
    """
    if not rhyme.spec.enabled:
        return
    engine_kwargs = (rollout.get("engine_kwargs", None) or {}).get("vllm", None) or {}
    mtp = rollout.get("mtp", None) or {}
    ours, theirs = f"{KEY}.spec.enabled", f"{ROLLOUT}.engine_kwargs.vllm"
    conflict = None
    if engine_kwargs.get("speculative_config") is not None:
        conflict = f"{theirs}.speculative_config and {ours} both ask for drafts"
    elif mtp.get("enable", False) and mtp.get("enable_rollout", False):
        conflict = f"{ROLLOUT}.mtp.enable_rollout and {ours} both ask for drafts"
    elif engine_kwargs.get("worker_extension_cls") is not None:
        conflict = f"{theirs}.worker_extension_cls takes the place of the one that {ours} needs"
    elif engine_kwargs.get("async_scheduling"):
        conflict = f"{theirs}.async_scheduling=true conflicts with {ours}, whose drafter vLLM schedules synchronously"
    elif rollout.get("full_determinism", False):
        conflict = f"{ROLLOUT}.full_determinism=true conflicts with {ours}: what is drafted depends on the clock"
    elif (rollout.get("disaggregation", None) or {}).get("enabled", False):
        conflict = (
            f"{ROLLOUT}.disaggregation.enabled=true conflicts with {ours}: verl does not start it for this rollout"
        )
    if conflict:
        raise ConfigError(conflict, "remove the former, or set the latter to false")


def _manager(config: Any) -> str | None:
    manager: str | None = OmegaConf.select(config, MANAGER_KEY)
    return manager


def _has_our_manager(config: Any) -> bool:
    """Whether the job runs with rhyme_verl's agent-loop manager, once it is completed."""
    manager = _manager(config)
    return manager == MANAGER or (manager is None and OmegaConf.select(config, f"{ROLLOUT}.name") == "rhyme")


def _names_router(rollout: Any) -> bool:
    return str(rollout.get("router_config_path") or "").endswith(ROUTER_FILE)


def _batches_ahead(config: Any, rhyme: RhymeConfig) -> tuple[str, int, int] | None:
    """Return verl's key, its value, and the value that the job runs with; None if its mode has no batches ahead."""
    if OmegaConf.select(config, "trainer.v1.trainer_mode", default="colocate_async") != "colocate_async":
        return None
    key = "trainer.v1.colocate_async.num_warmup_batches"
    given = OmegaConf.select(config, key, default=1)
    return key, given, rhyme.pipe.max_age if given == 1 and rhyme.pipe.max_age > 1 else given


def _submit_ahead(config: Any, rhyme: RhymeConfig) -> None:
    """Have verl submit as many batches ahead as a unit takes."""
    ahead = _batches_ahead(config, rhyme)
    if ahead is None:
        return
    key, given, taken = ahead
    if taken != given:
        OmegaConf.update(config, key, taken, force_add=True)
        logger.info("%s is set to %d, as %s.pipe.max_age needs", key, taken, KEY)
    elif taken < rhyme.pipe.max_age:
        message = "%s.pipe.max_age=%d takes effect with %s=%d only; with %s, no answer gets older than that"
        logger.warning(message, KEY, rhyme.pipe.max_age, key, rhyme.pipe.max_age, taken)


def _check_sampler(config: Any, rhyme: RhymeConfig) -> None:
    """Refuse samplers that would wait for, or drop, groups that the router holds back."""
    ahead = _batches_ahead(config, rhyme)
    sampler = OmegaConf.select(config, "trainer.v1.sampler") or {}
    threshold, key = sampler.get("max_off_policy_threshold"), "trainer.v1.sampler.max_off_policy_threshold"
    if ahead is None or threshold is None:
        return
    strategy = sampler.get("max_off_policy_strategy", "drop")
    bounded = f"{KEY}.pipe.max_age bounds the age"
    if strategy == "wait":
        raise ConfigError(
            "trainer.v1.sampler.max_off_policy_strategy=wait would wait for groups that HistoPipe holds back",
            f"set {key}=null ({bounded}), or {KEY}.pipe.enabled=false",
        )
    least = math.ceil(ahead[2]) + max(1, rhyme.pipe.max_age) + 1
    if strategy == "drop" and threshold < least:
        raise ConfigError(
            f"{key}={threshold} would drop groups that HistoPipe holds back",
            f"set it to {least} or more, or to null ({bounded})",
        )


def _check_policy_path(path: str | None) -> None:
    if path is None or "://" in path:
        return
    looks_local = path.startswith((".", "/", "~")) or path.count("/") > 1
    if looks_local and not os.path.exists(os.path.expanduser(path)):
        raise ConfigError(f"actor_rollout_ref.model.path={path} does not exist", "give a model folder or a hub name")


def _locate_snapshots(config: Any, rhyme: RhymeConfig) -> None:
    """Have the history saved with verl's checkpoints, and resumed with them."""
    trainer = OmegaConf.select(config, "trainer")
    if trainer is None or trainer.get("default_local_dir") is None:
        return
    found = {"snapshot_dir": os.path.abspath(trainer.default_local_dir), "resume_from": _checkpoint_to_resume(trainer)}
    for name, path in found.items():
        if path is not None and getattr(rhyme.history, name) is None:
            OmegaConf.update(config, f"{KEY}.history.{name}", path, force_add=True)


def _checkpoint_to_resume(trainer: Any) -> str | None:
    """Return the checkpoint folder that verl's trainer will resume from, if any."""
    mode = trainer.get("resume_mode", "disable")
    if mode == "resume_path" and trainer.get("resume_from_path"):
        return str(os.path.abspath(trainer.resume_from_path))
    latest = Path(os.path.abspath(trainer.default_local_dir)) / "latest_checkpointed_iteration.txt"
    if mode != "auto" or not latest.is_file():
        return None
    return str(latest.with_name(f"global_step_{latest.read_text().strip()}"))
