"""Checks what verl and vLLM know of rhyme_verl: `python -m rhyme_verl.commands.doctor.probe`.

Prints one JSON object. It runs in a separate process because it imports verl and vLLM, as a job does.
"""

from __future__ import annotations

import json
import os
from typing import Any

# Not from `integration.plugin`, whose import registers what is looked for here.
ROLLOUT_NAME = "rhyme"
METRICS_METHOD = "_consume_sync_metrics"


def main() -> None:
    """Import verl and vLLM, and print what they know of rhyme_verl."""
    import verl  # noqa: F401  this loads verl's plugins
    from verl.plugin.platform import get_platform
    from verl.trainer.ppo.v1 import trainer_base
    from verl.utils import config
    from verl.workers.rollout.base import _ROLLOUT_REGISTRY
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    answers: dict[str, Any] = {
        "rollout": (ROLLOUT_NAME, "async") in _ROLLOUT_REGISTRY,
        "replica": ROLLOUT_NAME in RolloutReplicaRegistry._registry,
        "config_check": hasattr(config.validate_config, "__wrapped__"),
        "metrics": hasattr(getattr(trainer_base.PPOTrainer, METRICS_METHOD, None), "__wrapped__"),
        "platform": get_platform().device_name,
    }
    from vllm.platforms import current_platform
    from vllm.plugins import load_general_plugins

    from rhyme_verl.histospec.engine_arguments import admit_drafting
    from rhyme_verl.platforms.cpu_sampling import expand_kernel_is_exact

    admit_drafting(os.environ)
    load_general_plugins()  # type: ignore[no-untyped-call]
    answers["vllm_platform"] = current_platform.device_type
    answers["sampler"] = not current_platform.is_cpu() or expand_kernel_is_exact()
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
