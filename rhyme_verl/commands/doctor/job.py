"""Checks of a job's whole config, in addition to those that every job runs before it starts."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from rhyme_verl.commands.doctor.engine import check_engine, check_stats
from rhyme_verl.commands.doctor.finding import Finding, fault, note, ok
from rhyme_verl.config import KEY, ConfigError, RhymeConfig, load_config, rhyme_settings
from rhyme_verl.integration.preflight import MANAGER, MANAGER_KEY, ROLLOUT, prepare_job, schedules

LOGGING_LEVEL = "ray_kwargs.ray_init.runtime_env.env_vars.VERL_LOGGING_LEVEL"

# What verl's trainer needs on a machine without a GPU, in addition to VERL_PLATFORM=cpu.
CPU_KEYS: Mapping[str, Any] = {
    "trainer.device": "cpu",
    "actor_rollout_ref.actor.strategy": "fsdp2",
    "actor_rollout_ref.ref.strategy": "fsdp2",
    "actor_rollout_ref.model.use_remove_padding": False,
    f"{ROLLOUT}.free_cache_engine": False,
    f"{ROLLOUT}.enable_sleep_mode": False,
}


def compose_job(config_dir: Path | None, config_name: str, overrides: Sequence[str]) -> Any:
    """Compose the config that `verl.trainer.main_ppo` gets from the same arguments, without importing verl.

    Raises:
        ConfigError: the config does not compose.
    """
    from hydra import compose, initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    verl = find_spec("verl")
    if verl is None or verl.origin is None:
        raise ConfigError("verl is not installed, so its config cannot be composed", "install it first")
    shipped = Path(verl.origin).parent / "trainer" / "config"
    try:
        with initialize_config_dir(config_dir=str((config_dir or shipped).resolve()), version_base=None):
            config = compose(config_name, overrides=[*overrides, f"hydra.searchpath=[file://{shipped}]"])
            OmegaConf.resolve(config)
            return config
    except (HydraException, OmegaConfBaseException) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"the job's config does not compose: {reason}", "pass the arguments of the job") from error


def check_config(config: Any, environment: Mapping[str, str]) -> Iterator[Finding]:
    """Check a composed config without changing it."""
    rollout = OmegaConf.select(config, ROLLOUT)
    manager = OmegaConf.select(config, MANAGER_KEY)
    if rollout is None or (rollout.get("name") != "rhyme" and manager != MANAGER):
        yield note("job", "the job does not use rhyme_verl", f"set {ROLLOUT}.name=rhyme")
        return
    checked = copy.deepcopy(config)
    try:
        prepare_job(checked)
    except ConfigError as error:
        yield fault("job", error.problem, error.remedy)
        return
    rhyme = load_config(rhyme_settings(OmegaConf.select(checked, ROLLOUT)))
    yield ok("job", f"settings are valid, {ROLLOUT}.name={rollout.get('name')}")
    yield from _agent_loops(checked, rhyme)
    yield from _trainer(config, environment)
    yield from _folders(rhyme)
    yield from _checkpoints(config, environment)
    yield from _epochs(config, rhyme)
    if environment.get("VERL_PLATFORM", "").strip().lower() == "cpu":
        yield from _cpu(config)
    elif rollout.get("name") == "rhyme":
        yield from check_engine(config, rhyme)
    yield from check_stats(rhyme)


def _agent_loops(checked: Any, rhyme: RhymeConfig) -> Iterator[Finding]:
    manager = OmegaConf.select(checked, MANAGER_KEY)
    if manager == MANAGER:
        yield ok("agent loops", f"HistoPipe {'schedules rollouts' if schedules(checked, rhyme) else 'is off'}")
    elif rhyme.trace.path is not None:
        yield fault("agent loops", f"{KEY}.trace.path is set, but {manager} records no trace", f"unset {MANAGER_KEY}")
    else:
        yield note(
            "agent loops",
            f"{MANAGER_KEY}={manager}: rollouts are not scheduled by length, and rewards do not reach the history",
            f"unset {MANAGER_KEY} to turn HistoPipe on",
        )


def _trainer(config: Any, environment: Mapping[str, str]) -> Iterator[Finding]:
    is_separate = OmegaConf.select(config, "trainer.v1.trainer_mode") == "separate_async"
    level = environment.get("VERL_LOGGING_LEVEL") or OmegaConf.select(config, LOGGING_LEVEL) or "INFO"
    if (
        is_separate
        and not OmegaConf.select(config, "actor_rollout_ref.hybrid_engine", default=True)
        and level == "INFO"
    ):
        yield fault(
            "trainer",
            "verl 0.9.1 fails in separate_async with hybrid_engine=false at its default logging level",
            "export VERL_LOGGING_LEVEL=WARNING; on a running Ray cluster, also set it in "
            f"{LOGGING_LEVEL.rpartition('.')[0]}",
        )


def _folders(rhyme: RhymeConfig) -> Iterator[Finding]:
    folders = {
        "trainer.default_local_dir (history.snapshot_dir)": rhyme.history.snapshot_dir,
        f"{KEY}.stats_path": rhyme.stats_path,
        f"{KEY}.trace.path": rhyme.trace.path,
    }
    for key, folder in folders.items():
        if folder is None:
            continue
        if problem := _not_writable(Path(folder)):
            yield fault("folders", f"{key}={folder}: {problem}", "give a folder that all nodes can write to")
        else:
            yield ok("folders", f"{key}={folder} is writable")


def _checkpoints(config: Any, environment: Mapping[str, str]) -> Iterator[Finding]:
    folder = OmegaConf.select(config, "trainer.default_local_dir")
    address = OmegaConf.select(config, "ray_kwargs.ray_init.address") or environment.get("RAY_ADDRESS")
    if folder is not None and address not in (None, "local") and not os.path.isabs(folder):
        yield note(
            "folders",
            f"trainer.default_local_dir={folder} is relative, and on a running Ray cluster verl resolves it in another "
            "folder than that in which the job is started: the history is then neither saved nor resumed",
            "give an absolute folder that all nodes can write to",
        )


def _not_writable(folder: Path) -> str | None:
    """Return why a folder, which may not exist yet, is not writable; None if it is."""
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists() or parent.is_symlink())
    if not existing.is_dir():
        return f"{existing} is not a folder"
    return None if os.access(existing, os.W_OK | os.X_OK) else f"{existing} is not writable"


def _epochs(config: Any, rhyme: RhymeConfig) -> Iterator[Finding]:
    epochs = OmegaConf.select(config, "trainer.total_epochs")
    if rhyme.spec.enabled and epochs is not None and epochs < 2:
        yield note(
            "history",
            f"trainer.total_epochs={epochs}: no prompt is repeated; drafts come from siblings and other prompts only",
            "set trainer.total_epochs to 2 or more to draft from earlier answers",
        )


def _cpu(config: Any) -> Iterator[Finding]:
    wrong = [
        f"{key}={str(wanted).lower()}"
        for key, wanted in CPU_KEYS.items()
        if OmegaConf.select(config, key, default=None) != wanted
    ]
    if wrong:
        yield fault(
            "CPU platform",
            "VERL_PLATFORM=cpu, but the job's settings need a GPU",
            f"set (with + for new keys) {' '.join(wrong)}",
        )
    else:
        yield ok("CPU platform", "the job's settings suit a machine without a GPU")
