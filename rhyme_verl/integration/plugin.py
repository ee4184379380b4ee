"""The plugin that verl loads (entry point group `verl.plugins`): makes `rollout.name=rhyme` valid in every process.

verl imports this module at the end of `import verl`, in the driver and in every Ray worker, and hides the exceptions
that it raises. Errors that a user must see, such as an unsupported version, are therefore raised when the rollout is
used. This module imports neither vLLM nor verl's trainer: post-import hooks delay each registration until verl imports
the module that owns the registry.
"""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

import wrapt

from rhyme_verl.integration import package_file
from rhyme_verl.telemetry import logs

logger = logging.getLogger(__name__)

ROLLOUT_NAME = "rhyme"
METRICS_METHOD = "_consume_sync_metrics"
SNAPSHOT_SECONDS = 120.0


def register() -> None:
    """Register rollout, config check, metrics, paths and, with `VERL_PLATFORM=cpu`, the CPU platform. Idempotent."""
    logs.show()
    package_file.register()
    wrapt.register_post_import_hook(_register_rollout, "verl.workers.rollout.base")
    wrapt.register_post_import_hook(_register_replica, "verl.workers.rollout.replica")
    wrapt.register_post_import_hook(_check_config_early, "verl.utils.config")
    wrapt.register_post_import_hook(_check_runner, "verl.trainer.main_ppo")
    wrapt.register_post_import_hook(_log_metrics, "verl.trainer.ppo.v1.trainer_base")
    if os.environ.get("VERL_PLATFORM", "").strip().lower() == "cpu":
        from rhyme_verl.platforms import cpu

        cpu.register()


def _register_rollout(module: ModuleType) -> None:
    module._ROLLOUT_REGISTRY[(ROLLOUT_NAME, "async")] = "rhyme_verl.integration.rollout.RhymeServerAdapter"


def _register_replica(module: ModuleType) -> None:
    module.RolloutReplicaRegistry.register(ROLLOUT_NAME, _load_replica)


def _load_replica() -> type:
    from rhyme_verl.config import ConfigError
    from rhyme_verl.version import unsupported_hosts

    for problem, remedy in unsupported_hosts():
        raise ConfigError(problem, remedy)
    from rhyme_verl.integration.rollout import RhymeReplica

    return RhymeReplica


def _check_config_early(module: Any) -> None:
    """Make verl's `validate_config`, which every trainer calls before Ray starts, check rhyme's settings as well.

    verl has no hook for a plugin's own settings. Without this check, a Ray actor reports a misspelt key minutes later.
    """

    def validate(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        from rhyme_verl.integration.preflight import prepare_job

        prepare_job(kwargs["config"] if "config" in kwargs else args[0])
        return wrapped(*args, **kwargs)

    _wrap(module, "validate_config", validate)


def _check_runner(module: Any) -> None:
    """Make verl's `run_ppo` refuse jobs with rhyme_verl that are not run by the V1 trainer, and prepare those that are.

    verl's experimental trainers call it before Ray starts. Some programs never call `validate_config`, and verl's own
    ignore `trainer.use_v1`, whose default would let rhyme's agent-loop manager into a trainer that cannot use it. When
    `verl.trainer.main_ppo` itself is the program, it is not imported, and nothing is wrapped.
    """

    def run(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        from rhyme_verl.integration.preflight import check_runner, prepare_job

        given = inspect.signature(wrapped).bind(*args, **kwargs).arguments
        check_runner(given["config"], given["task_runner_class"], module.TaskRunnerV1)
        prepare_job(given["config"])  # changes nothing if `validate_config` has been called
        return wrapped(*args, **kwargs)

    _wrap(module, "run_ppo", run)


def _log_metrics(module: Any) -> None:
    """Merge rhyme's metrics into those that verl's trainer logs for a step, to all its trackers.

    The trainer has no hook for a plugin's metrics: it does not log what the agent-loop manager and the replicas return,
    and two of its three modes drop what a weight sync returns. All modes call the wrapped method right after a step's
    weight update, to collect the metrics of other components.
    """
    trainer = module.PPOTrainer
    if METRICS_METHOD not in vars(trainer):
        logger.warning("verl's trainer lacks %s, so rhyme's metrics will not reach its trackers", METRICS_METHOD)
        return
    from rhyme_verl.telemetry.step_metrics import MetricsReporter

    reporter = MetricsReporter()

    def consume(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if instance.global_steps >= instance.total_training_steps:
            from rhyme_verl.history.actors import wait_for_snapshots

            wait_for_snapshots(SNAPSHOT_SECONDS)  # Ray kills the actors that write them at the job's end
        return {**wrapped(*args, **kwargs), **reporter.take()}

    _wrap(trainer, METRICS_METHOD, consume)


def _wrap(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Wrap a function of a module or class, unless it is wrapped already."""
    if not isinstance(vars(owner)[name], wrapt.FunctionWrapper):
        setattr(owner, name, wrapt.FunctionWrapper(vars(owner)[name], wrapper))


register()
