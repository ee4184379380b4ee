"""Checks a verl job's whole config before Ray starts, and fills in the keys that `rollout.name=rhyme` implies.

Every error is one line with the full key and the remedy. The module depends on verl's config keys and checkpoint
folders only, and does not import verl.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.errors import CompactHydraException
from omegaconf import OmegaConf
from pyarrow import ArrowException, parquet

from rhyme_verl.config import KEY, ConfigError, RhymeConfig, load_config, rhyme_settings
from rhyme_verl.integration import package_file
from rhyme_verl.version import unsupported_hosts

logger = logging.getLogger(__name__)

ROLLOUT = "actor_rollout_ref.rollout"
MANAGER_KEY = f"{ROLLOUT}.agent.agent_loop_manager_class"
ROUTER_KEY = f"{ROLLOUT}.router_config_path"
MANAGER = "rhyme_verl.integration.agent_loop.RhymeAgentLoopManager"
ROUTER_FILE = "histopipe/router.yaml"
AHEAD_KEY = "trainer.v1.colocate_async.num_warmup_batches"
PLUGINS = "vllm.logits_processors"  # entry points of processors that vLLM runs in every engine
PIPELINED = "colocate_async"  # the trainer mode in which batches are submitted ahead

package_file.register()


class JobError(CompactHydraException, ConfigError):
    """A ConfigError that Hydra prints as one line, without a stack trace."""

    def __str__(self) -> str:
        return f"rhyme_verl: {ConfigError.__str__(self)}"


def prepare_job(config: Any, overrides: Sequence[str] | None = None) -> None:
    """Check and complete a verl job's whole config; do nothing if the job does not use rhyme_verl.

    Args:
        overrides: the job's command line; by default that of Hydra's application, if one runs.

    Raises:
        JobError: the job cannot run as it is configured.
    """
    if not uses_rhyme(config):
        return
    try:
        rhyme = load_config(rhyme_settings(OmegaConf.select(config, ROLLOUT)))
        _check_job(config, rhyme)
        if overrides is None:
            overrides = HydraConfig.get().overrides.task if HydraConfig.initialized() else ()
        _complete_job(config, rhyme, overrides)
    except ConfigError as error:
        raise JobError(error.problem, error.remedy) from None


def check_runner(config: Any, runner: Any, supported: Any) -> None:
    """Reject a job that uses rhyme_verl and is started by one of verl's other trainers, which ignore `trainer.use_v1`.

    Args:
        runner: the Ray actor class that runs the job.
        supported: that of verl's V1 trainer.

    Raises:
        JobError: `runner` is not derived from `supported`.
    """
    if not uses_rhyme(config):
        return
    if not hasattr(runner, "__ray_metadata__"):
        raise JobError(
            f"the runner of the job is {runner!r}, and {ROLLOUT}.name=rhyme needs to know its class",
            "give run_ppo the Ray actor class itself, without `.options(...)`",
        )
    ours, theirs = (each.__ray_metadata__.modified_class.__ray_actor_class__ for each in (supported, runner))
    if not issubclass(theirs, ours):
        raise JobError(
            f"{theirs.__module__}.{theirs.__name__} does not run verl's V1 trainer, which {ROLLOUT}.name=rhyme needs",
            f"start the job with verl.trainer.main_ppo and set trainer.v1.trainer_mode, or set {ROLLOUT}.name=vllm",
        )


def _check_job(config: Any, rhyme: RhymeConfig) -> None:
    """Reject a version, a path or a setting that is unsupported, or conflicts with HistoSpec or HistoPipe."""
    rollout = OmegaConf.select(config, ROLLOUT)
    for problem, remedy in unsupported_hosts():
        raise ConfigError(problem, remedy)
    if rollout.get("name") == "rhyme":
        check_engine_kwargs(rollout, rhyme)
        _check_policy_path(OmegaConf.select(config, "actor_rollout_ref.model.path"), runs_on_cluster(config))
        _check_parallelism(rollout)
    if not OmegaConf.select(config, "trainer.use_v1", default=True):
        raise ConfigError(
            "trainer.use_v1=false, but rhyme_verl supports verl's V1 trainer only", "set trainer.use_v1=true"
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


def _complete_job(config: Any, rhyme: RhymeConfig, overrides: Sequence[str]) -> None:
    """Fill in the keys that the job leaves open: agent-loop manager, router, warm-up batches, and history folders."""
    rollout = OmegaConf.select(config, ROLLOUT)
    if _has_our_manager(config) and rollout.get("name") == "rhyme":
        OmegaConf.update(config, MANAGER_KEY, MANAGER, force_add=True)
    _keep_other_engines(config)
    _locate_snapshots(config, rhyme)
    if rollout.get("name") == "rhyme" and rhyme.spec.enabled:
        _warn_of_media(config)
    reason = obstacle(config, rhyme)
    if reason is None and OmegaConf.select(config, "trainer.v1.trainer_mode", default=PIPELINED) == PIPELINED:
        _submit_ahead(config, rhyme.pipe.max_age, overrides)
        _check_sampler(config, rhyme.pipe.max_age)
    elif reason is not None and rhyme.pipe.enabled:
        logger.info("HistoPipe is off, because of %s", reason)
    if reason is None or _names_router(rollout):
        OmegaConf.update(config, ROUTER_KEY, package_file.package_file(ROUTER_FILE), force_add=True)


def obstacle(config: Any, rhyme: RhymeConfig) -> str | None:
    """Return the setting that keeps HistoPipe from scheduling this job's rollouts; None if it schedules them."""
    if not rhyme.pipe.enabled:
        return f"{KEY}.pipe.enabled=false"
    if not _has_our_manager(config):
        return f"{MANAGER_KEY}={OmegaConf.select(config, MANAGER_KEY)}"
    rollout = OmegaConf.select(config, ROLLOUT)
    router = rollout.get("router_config_path")
    if rollout.get("full_determinism") and not _names_router(rollout):
        return f"{ROLLOUT}.full_determinism=true"
    return None if router is None or _names_router(rollout) else f"{ROUTER_KEY}={router}"


def check_engine_kwargs(rollout: Any, rhyme: RhymeConfig) -> None:
    """Reject engine settings that conflict with HistoSpec; none is overridden.

    Args:
        rollout: verl's rollout config, as DictConfig or RolloutConfig.
    """
    if not rhyme.spec.enabled:
        return
    engine_kwargs = (rollout.get("engine_kwargs", None) or {}).get("vllm", None) or {}
    mtp = rollout.get("mtp", None) or {}
    ours, theirs = f"{KEY}.spec.enabled", f"{ROLLOUT}.engine_kwargs.vllm"
    conflict, remedy = None, "remove the former, or set the latter to false"
    if engine_kwargs.get("speculative_config") is not None:
        conflict = f"{theirs}.speculative_config and {ours} both enable speculative decoding"
    elif mtp.get("enable", False) and mtp.get("enable_rollout", False):
        conflict = f"{ROLLOUT}.mtp.enable_rollout and {ours} both enable speculative decoding"
    elif engine_kwargs.get("worker_extension_cls") is not None:
        conflict = f"{theirs}.worker_extension_cls replaces the extension that {ours} needs"
    elif rollout.get("full_determinism", False):
        conflict = f"{ROLLOUT}.full_determinism=true conflicts with {ours}: drafts depend on measured times"
    elif engine_kwargs.get("logits_processors"):
        conflict = f"{theirs}.logits_processors conflicts with {ours}: beside drafts, vLLM runs none"
    elif installed := [plugin.name for plugin in entry_points(group=PLUGINS)]:  # vLLM leaves them out silently
        conflict = f"the logits processors {installed}, which are installed as {PLUGINS}, conflict with {ours}: "
        conflict += "beside drafts, vLLM runs none"
    if conflict:
        raise ConfigError(conflict, remedy)
    if engine_kwargs.get("async_scheduling") and rhyme.spec.async_scheduling == "off":
        key = f"{KEY}.spec.async_scheduling"
        raise ConfigError(f"{theirs}.async_scheduling=true conflicts with {key}=off", f"set {key}=auto")


def uses_rhyme(config: Any) -> bool:
    """Return whether a job uses HistoSpec, HistoPipe or the trace."""
    rollout = OmegaConf.select(config, ROLLOUT)
    if rollout is None:
        return False
    is_ours = rollout.get("name") == "rhyme" or OmegaConf.select(config, MANAGER_KEY) == MANAGER
    return is_ours or _names_router(rollout)


def _has_our_manager(config: Any) -> bool:
    """Return whether the job, once completed, runs with rhyme_verl's agent-loop manager."""
    manager = OmegaConf.select(config, MANAGER_KEY)
    return manager == MANAGER or (manager is None and OmegaConf.select(config, f"{ROLLOUT}.name") == "rhyme")


def _names_router(rollout: Any) -> bool:
    return str(rollout.get("router_config_path") or "").endswith(ROUTER_FILE)


def _submit_ahead(config: Any, max_age: int, overrides: Sequence[str]) -> None:
    """Have verl submit as many batches ahead as a unit needs, unless the command line says how many.

    A value in a config file counts only if it is not verl's default, because the composed config does not tell them
    apart.
    """
    given = OmegaConf.select(config, AHEAD_KEY, default=1)
    if given >= max_age:
        return
    if given == 1 and all(each.lstrip("+").partition("=")[0] != AHEAD_KEY for each in overrides):
        OmegaConf.update(config, AHEAD_KEY, max_age, force_add=True)
        logger.info("%s is set to %d, as %s.pipe.max_age requires", AHEAD_KEY, max_age, KEY)
    else:
        message = "%s.pipe.max_age=%d takes effect only with %s=%d; the job sets %s, so no answer gets older than that"
        logger.warning(message, KEY, max_age, AHEAD_KEY, max_age, given)


def _check_sampler(config: Any, max_age: int) -> None:
    """Reject samplers that would wait for, or drop, groups that the router holds back."""
    sampler = OmegaConf.select(config, "trainer.v1.sampler") or {}
    threshold, key = sampler.get("max_off_policy_threshold"), "trainer.v1.sampler.max_off_policy_threshold"
    if threshold is None:
        return
    strategy = sampler.get("max_off_policy_strategy", "drop")
    bounded = f"{KEY}.pipe.max_age bounds the age"
    if strategy == "wait":
        raise ConfigError(
            "trainer.v1.sampler.max_off_policy_strategy=wait would wait for groups that HistoPipe holds back",
            f"set {key}=null ({bounded}), or {KEY}.pipe.enabled=false",
        )
    least = math.ceil(OmegaConf.select(config, AHEAD_KEY, default=1)) + max(1, max_age) + 1
    if strategy == "drop" and threshold < least:
        raise ConfigError(
            f"{key}={threshold} would drop groups that HistoPipe holds back",
            f"set it to {least} or more, or to null ({bounded})",
        )


def _check_parallelism(rollout: Any) -> None:
    """Reject what verl rejects for its vLLM rollout, or would reject later in a Ray actor."""
    key = f"{ROLLOUT}.pipeline_model_parallel_size"
    if (rollout.get("pipeline_model_parallel_size") or 1) > 1:
        raise ConfigError(f"{key}={rollout.pipeline_model_parallel_size}: verl's vLLM rollout has none", "set it to 1")
    backend = (rollout.get("checkpoint_engine", None) or {}).get("backend")
    if backend == "delta_sharded":
        raise ConfigError(
            f"{ROLLOUT}.checkpoint_engine.backend={backend}: verl supports it with {ROLLOUT}.name=vllm only",
            "choose another backend",
        )
    if (rollout.get("disaggregation", None) or {}).get("enabled"):
        raise ConfigError(
            f"{ROLLOUT}.disaggregation.enabled=true: verl supports it with {ROLLOUT}.name=vllm only",
            f"set {ROLLOUT}.disaggregation.enabled=false, or {ROLLOUT}.name=vllm",
        )


def _keep_other_engines(config: Any) -> None:
    """Run a reward model, and the teachers of a distillation, with verl's own vLLM rollout.

    Their name is often a copy of the policy's, in verl's config or in a job's script.
    """
    engines = [OmegaConf.select(config, "reward.reward_model.rollout")]
    for name, teacher in (OmegaConf.select(config, "distillation.teacher_models") or {}).items():
        engines.append((teacher or {}).get("inference") if name != "_target_" and hasattr(teacher, "get") else None)
    for engine in engines:
        if engine is not None and engine.get("name") == "rhyme":
            engine.name = "vllm"


def runs_on_cluster(config: Any, environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether a job's address says that it runs on a Ray cluster that is running already."""
    address = OmegaConf.select(config, "ray_kwargs.ray_init.address") or environment.get("RAY_ADDRESS")
    return address not in (None, "local")


def _check_policy_path(path: str | None, on_cluster: bool) -> None:
    """Reject a model folder that does not exist. The machine that starts a job on a cluster does not need it."""
    if path is None or "://" in path:
        return
    looks_local = path.startswith((".", "/", "~")) or path.count("/") > 1
    if not looks_local or os.path.exists(os.path.expanduser(path)):
        return
    problem = f"actor_rollout_ref.model.path={path} does not exist"
    if not on_cluster:
        raise ConfigError(problem, "give a model folder or a hub name")
    logger.warning("%s on the machine that starts the job", problem)


def _warn_of_media(config: Any) -> None:
    """Warn of training data with images, videos or audio.

    The server names a prompt's history by verl's token ids, in which the model's processor has expanded each image to
    placeholders. vLLM expands images itself, and the drafter sees its ids. They are the same for images with Qwen2-VL's
    image processor, whose placeholders verl joins for vLLM; with other processors, no history would ever be found.
    """
    data = OmegaConf.select(config, "data") or {}
    files = data.get("train_files") or []
    columns: set[str] = set()
    for path in [files] if isinstance(files, str) else files:
        path = os.path.expanduser(path)
        if path.endswith(".parquet") and os.path.isfile(path):
            try:
                columns.update(parquet.read_schema(path).names)
            except (OSError, ArrowException) as error:
                logger.warning("the columns of %s cannot be read: %s", path, error)
    for key in ("image_key", "video_key", "audio_key"):
        if data.get(key) in columns:
            message = (
                "data.%s=%s is a column of data.train_files: prompts with equal texts share a history, and it is found "
                "only if vLLM expands a prompt as verl does, as with images for Qwen2-VL's processor"
            )
            logger.warning(message, key, data.get(key))


def _locate_snapshots(config: Any, rhyme: RhymeConfig) -> None:
    """Set the history to be saved with verl's checkpoints, and resumed from them."""
    trainer = OmegaConf.select(config, "trainer")
    if trainer is None or trainer.get("default_local_dir") is None:
        return
    checkpoints = os.path.abspath(trainer.default_local_dir)
    if rhyme.history.snapshot_dir not in (None, checkpoints):
        raise ConfigError(
            f"{KEY}.history.snapshot_dir={rhyme.history.snapshot_dir} is not trainer.default_local_dir={checkpoints}, "
            "with whose checkpoints the history is saved",
            "leave the former unset",
        )
    resumed, given = _checkpoint_to_resume(trainer), rhyme.history.resume_from
    if resumed is not None and given not in (None, resumed):
        logger.info("%s.history.resume_from=%s was for the start: the job resumes %s", KEY, given, resumed)
    for name, path in {"snapshot_dir": checkpoints, "resume_from": resumed}.items():
        if path is not None:
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
