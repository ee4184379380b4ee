"""Checks of a job's whole config, in addition to those that every job runs before it starts."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from rhyme_verl.commands.doctor.finding import Finding, fault, note, ok
from rhyme_verl.config import KEY, ConfigError, RhymeConfig, load_config, rhyme_settings
from rhyme_verl.integration.preflight import (
    MANAGER,
    MANAGER_KEY,
    ROLLOUT,
    obstacle,
    prepare_job,
    runs_on_cluster,
    uses_rhyme,
)

ENVIRONMENT = "ray_kwargs.ray_init.runtime_env.env_vars"  # what a job sends to its processes on a running cluster
LOGGING_LEVEL = "VERL_LOGGING_LEVEL"

# How a model's config.json names layers that keep a state: Mamba, linear attention.
STATE_LAYERS = ("mamba", "linear_attention", "ssm")
STATE_KEYS = ("mamba_d_state", "ssm_state_size", "linear_num_value_heads", "hybrid_override_pattern", "mamba_num_heads")
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
            own, others = _search_path((config_dir or shipped) / f"{config_name}.yaml", overrides)
            path = ",".join(json.dumps(one) for one in [*own, f"file://{shipped}"])
            config = compose(config_name, overrides=[*others, f"hydra.searchpath=[{path}]"])
            OmegaConf.resolve(config)
            return config
    except (HydraException, OmegaConfBaseException) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"the job's config does not compose: {reason}", "pass the arguments of the job") from error


def _search_path(file: Path, overrides: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return a job's own search path for configs, which an override replaces, and all other overrides."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    key, others = "hydra.searchpath", []
    found = OmegaConf.select(OmegaConf.load(file), key) if file.is_file() else None
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        if override.key_or_group == key:
            found = override.value()
        else:
            others.append(str(override.input_line))
    return [str(one) for one in found or ()], others


def environment_of(config: Any) -> dict[str, str]:
    """Return the environment variables that a job sends to its processes."""
    return {name: str(value) for name, value in (OmegaConf.select(config, ENVIRONMENT) or {}).items()}


def check_config(
    config: Any, environment: Mapping[str, str], on_cluster: bool = False, overrides: Sequence[str] = ()
) -> Iterator[Finding]:
    """Check a composed config without changing it.

    Args:
        environment: variables of the process that starts the job. Its processes on a running cluster do not have them.
        on_cluster: whether it is known that the job runs on a running Ray cluster; else its address tells.
        overrides: the job's command line, if it is known.
    """
    on_cluster |= runs_on_cluster(config, environment)
    rollout = OmegaConf.select(config, ROLLOUT)
    if rollout is None:
        yield fault("job", f"the config has no {ROLLOUT}", "give the whole config of a verl job")
        return
    if not uses_rhyme(config):
        yield note("job", "the job does not use rhyme_verl", f"set {ROLLOUT}.name=rhyme")
        return
    checked = copy.deepcopy(config)
    try:
        prepare_job(checked, overrides)
    except ConfigError as error:
        yield fault("job", error.problem, error.remedy)
        return
    rhyme = load_config(rhyme_settings(OmegaConf.select(checked, ROLLOUT)))
    yield ok("job", f"settings are valid, {ROLLOUT}.name={rollout.get('name')}")
    yield from _agent_loops(checked, rhyme)
    yield from _trainer(config, environment_of(config) if on_cluster else {**environment, **environment_of(config)})
    yield from _folders(config, rhyme, on_cluster)
    yield from _epochs(config, rhyme)
    if environment.get("VERL_PLATFORM", "").strip().lower() == "cpu":
        yield from _cpu(config)
    elif rollout.get("name") == "rhyme" and rhyme.spec.enabled:
        yield from _engine(config, rhyme)
    yield from _stats(rhyme)


def _agent_loops(checked: Any, rhyme: RhymeConfig) -> Iterator[Finding]:
    manager = OmegaConf.select(checked, MANAGER_KEY)
    if manager == MANAGER:
        yield ok("agent loops", f"HistoPipe {'is off' if obstacle(checked, rhyme) else 'schedules rollouts'}")
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
    is_hybrid = OmegaConf.select(config, "actor_rollout_ref.hybrid_engine", default=True)
    if is_separate and not is_hybrid and environment.get(LOGGING_LEVEL, "INFO") in ("DEBUG", "INFO"):
        yield fault(
            "trainer",
            "verl 0.9.1 fails in separate_async with hybrid_engine=false at logging level INFO (the default) or DEBUG",
            f"export {LOGGING_LEVEL}=WARNING; on a running Ray cluster, set +{ENVIRONMENT}.{LOGGING_LEVEL}=WARNING",
        )


def _folders(config: Any, rhyme: RhymeConfig, on_cluster: bool) -> Iterator[Finding]:
    folders = {
        "trainer.default_local_dir (history.snapshot_dir)": rhyme.history.snapshot_dir,
        f"{KEY}.stats_path": rhyme.stats_path,
        f"{KEY}.trace.path": rhyme.trace.path,
    }
    for key, folder in folders.items():
        if folder is None:
            continue
        parents = (Path(folder), *Path(folder).parents)  # the folder may not exist yet
        existing = next(parent for parent in parents if parent.exists() or parent.is_symlink())
        if existing.is_dir() and os.access(existing, os.W_OK | os.X_OK):
            yield ok("folders", f"{key}={folder} is writable")
        else:
            problem = "is not writable" if existing.is_dir() else "is not a folder"
            remedy = "give a folder that all nodes can write to"
            yield fault("folders", f"{key}={folder}: {existing} {problem}", remedy)
    given = {**folders, "trainer.default_local_dir": OmegaConf.select(config, "trainer.default_local_dir")}
    for key, folder in given.items() if on_cluster else ():
        if folder is not None and not os.path.isabs(folder):
            lost = ": the history is then neither saved nor resumed" if key.startswith("trainer") else ""
            yield note(
                "folders",
                f"{key}={folder} is relative, and the processes of a running Ray cluster do not run in the folder in "
                f"which the job is started{lost}",
                "give an absolute folder that all nodes can write to",
            )


def _epochs(config: Any, rhyme: RhymeConfig) -> Iterator[Finding]:
    epochs = OmegaConf.select(config, "trainer.total_epochs")
    if rhyme.spec.enabled and epochs is not None and epochs < 2:
        yield note(
            "history",
            f"trainer.total_epochs={epochs}: no prompt is repeated; drafts come from siblings and other prompts only",
            "set trainer.total_epochs to 2 or more to draft from earlier answers",
        )


def _cpu(config: Any) -> Iterator[Finding]:
    wrong = {key: wanted for key, wanted in CPU_KEYS.items() if OmegaConf.select(config, key) != wanted}
    if wrong:
        settings = " ".join(f"{key}={str(wanted).lower()}" for key, wanted in wrong.items())
        problem = "VERL_PLATFORM=cpu, but the job's settings need a GPU"
        yield fault("CPU platform", problem, f"set (with + for new keys) {settings}")
    else:
        yield ok("CPU platform", "the job's settings suit a machine without a GPU")


def _engine(config: Any, rhyme: RhymeConfig) -> Iterator[Finding]:
    """Check a job on GPUs that drafts for settings that make drafting expensive."""
    key = f"{ROLLOUT}.engine_kwargs.vllm.compilation_config"
    given = OmegaConf.select(config, key) or {}
    mode = (_parse(given, key) if isinstance(given, str) else given).get("cudagraph_mode")
    if str(mode).upper() == "FULL_DECODE_ONLY":
        yield note(
            "CUDA graphs",
            "FULL_DECODE_ONLY: steps with drafts run without graphs",
            f"remove {key}.cudagraph_mode: steps with drafts then have full graphs if the GPU's attention backend "
            "allows them for drafts of different lengths, and piecewise ones otherwise",
        )
    model = _text_config(OmegaConf.select(config, "actor_rollout_ref.model.path"))
    layers = str(model.get("layer_types") or model.get("layers_block_type"))
    has_state = any(key in model for key in STATE_KEYS) or any(kind in layers for kind in STATE_LAYERS)
    if has_state:
        yield note(
            "model",
            "its layers keep a state, for which vLLM does not verify drafts exactly: HistoSpec stays off, and only "
            "HistoPipe works",
            f"set {KEY}.spec.enabled=false, which says the same",
        )
    if model.get("kv_lora_rank"):
        yield note(
            "model",
            "it has multi-head latent attention: HistoSpec drafts synchronously, and vLLM's backends are slow if rows "
            "have drafts of different lengths",
            f"compare with {KEY}.spec.enabled=false",
        )


def _stats(rhyme: RhymeConfig) -> Iterator[Finding]:
    """Check the statistics that the replicas of earlier runs wrote to `stats_path`, if any."""
    for path in sorted(Path(rhyme.stats_path).glob("replica-*.jsonl")) if rhyme.stats_path else ():
        lines = path.read_text(encoding="utf-8").split("\n")[:-1]  # a last line without an end may be incomplete
        last = json.loads(lines[-1]) if lines else {}
        if last.get("drafting_off"):
            yield fault(
                "drafting",
                f"HistoSpec failed in {path.stem} and was off at step {last.get('step')}; rollouts ran undrafted",
                "look for `HistoSpec failed` in the log of that rollout server, and report it",
            )


def _text_config(path: str | None) -> dict[str, Any]:
    """Return the language model's part of a model's config.json; empty if the model is not in a local folder."""
    file = Path(os.path.expanduser(path or "")) / "config.json"
    if path is None or not file.is_file():
        return {}
    config = _parse(file.read_text(encoding="utf-8"), str(file))
    found: dict[str, Any] = config.get("text_config") or config
    return found


def _parse(text: str, source: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{source} is not JSON: {error}") from None
