"""Lets vLLM run HistoSpec under its asynchronous scheduling. All that is replaced in vLLM for it is in this file.

vLLM's model runner (V1) can run drafts of different lengths asynchronously, but only for its own method `ngram_gpu`:
the scheduler plans a step with K placeholders per request, and the runner calls a function that trims them to the
drafts before it prepares the step. HistoSpec trims and drafts in such functions (`async_proposer`). Replaced are:

In the process that creates vLLM's config, while it creates one with HistoSpec (`register`):
- `vllm.config.vllm.NgramGPUTypes`, the methods that vLLM schedules asynchronously, also names `custom_class`. The
  scheduler becomes `async_scheduler.RhymeScheduler`, and the drafter's class `AsyncProposer`.
- The checks of the config do not see `num_speculative_tokens_per_batch_size` (`engine_arguments`).
- HistoSpec is taken out of the config of a model with an inner state: vLLM does not verify its drafts exactly.

In a worker, when it creates that drafter (`install`), in `vllm.v1.worker.gpu_model_runner`:
- `NgramProposerGPU` is `AsyncProposer`, because the runner asserts the class of its drafter.
- `update_scheduler_for_invalid_drafts`, called before the runner updates its batch, is `AsyncProposer.trim`.
- `update_ngram_gpu_tensors_incremental`, called after that, is `AsyncProposer.draft`. vLLM's function copies what only
  its own drafter reads, and so does `copy_num_valid_draft_tokens`, which does nothing.
- The runner's tensors for its own drafter (RUNNER_TENSORS) are small arrays on the host.
- The runner's `speculative_config` names the method `ngram_gpu`. The engine's config still names HistoSpec, so vLLM
  keeps its torch.compile cache, which it switches off for `ngram_gpu`.

Without one of these names HistoSpec runs synchronously, and says so once.
"""

from __future__ import annotations

import copy
import logging
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import numpy as np
import wrapt

from rhyme_verl.histospec.engine_arguments import BY_BATCH_SIZE, PROPOSER, settings_in

logger = logging.getLogger(__name__)

ASYNC_PROPOSER = "rhyme_verl.histospec.async_proposer.AsyncProposer"
SCHEDULER = "rhyme_verl.histospec.async_scheduler.RhymeScheduler"
RUNNER_MODULE = "vllm.v1.worker.gpu_model_runner"
RUNNER_NAMES = (
    "NgramProposerGPU",
    "update_scheduler_for_invalid_drafts",
    "copy_num_valid_draft_tokens",
    "update_ngram_gpu_tensors_incremental",
)
RUNNER_TENSORS = ("token_ids_gpu_tensor", "num_tokens_no_spec_gpu", "_ngram_pinned_idx_buf", "_ngram_pinned_val_buf")
CONFIG_NAME = "NgramGPUTypes"


def register() -> None:
    """Let vLLM's configs with HistoSpec schedule asynchronously. vLLM calls this in every process. Idempotent."""
    wrapt.register_post_import_hook(_open_gate, "vllm.config.vllm")


def install(proposer: Any, vllm_config: Any) -> None:
    """Replace the names in this worker's model runner, which is creating `proposer`.

    The runner gets its own `speculative_config`, with the method `ngram_gpu`. It has taken the config's object before
    it creates its drafter, so that object changes and the config gets a copy of what it was.

    Raises:
        RuntimeError: one of the names is missing.
    """
    if problem := missing_hook():
        raise RuntimeError(f"{problem}: install a vLLM that rhyme_verl supports, or set spec.async_scheduling=off")
    from vllm.v1.worker import gpu_model_runner

    module: Any = gpu_model_runner
    module.NgramProposerGPU = type(proposer)
    module.update_scheduler_for_invalid_drafts = proposer.trim
    module.update_ngram_gpu_tensors_incremental = proposer.draft
    module.copy_num_valid_draft_tokens = lambda *args, **kwargs: None
    for name in RUNNER_TENSORS:
        setattr(module.GPUModelRunner, name, np.zeros(vllm_config.scheduler_config.max_num_seqs, np.int32))
    theirs = vllm_config.speculative_config
    vllm_config.speculative_config = copy.copy(theirs)
    theirs.method = "ngram_gpu"


def check_installed(proposer: Any, runner: Any) -> None:
    """Raise RuntimeError unless `runner` runs `proposer` asynchronously."""
    from vllm.v1.worker import gpu_model_runner

    module: Any = gpu_model_runner
    took_effect = {
        "its drafter": runner.drafter is proposer and isinstance(proposer, module.NgramProposerGPU),
        "its method": runner.speculative_config.use_ngram_gpu() and runner.use_async_scheduling,
        "the function that trims drafts": module.update_scheduler_for_invalid_drafts == proposer.trim,
        "the function that drafts": module.update_ngram_gpu_tensors_incremental == proposer.draft,
    }
    for what, holds in took_effect.items():
        if not holds:
            raise RuntimeError(
                f"asynchronous drafting did not take effect in vLLM's model runner ({what}): another plugin may have "
                "replaced it; set spec.async_scheduling=off"
            )


def missing_hook() -> str | None:
    """Return what asynchronous drafting misses in the installed vLLM, or None. Does not import the model runner."""
    spec = find_spec(RUNNER_MODULE)
    source = Path(spec.origin).read_text(encoding="utf-8") if spec is not None and spec.origin else ""
    for name in (*RUNNER_NAMES, *RUNNER_TENSORS):
        if name not in source:
            return f"vLLM's model runner has no {name}"
    return None


def _open_gate(module: Any) -> None:
    if not isinstance(vars(module.VllmConfig)["__post_init__"], wrapt.FunctionWrapper):
        wrapt.wrap_function_wrapper(module, "VllmConfig.__post_init__", _create)


def _create(wrapped: Any, config: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Create a config as vLLM does; if it names HistoSpec, let vLLM decide on asynchronous scheduling as without it.

    A model with an inner state (Mamba, Qwen3-Next) keeps the state after a verified draft where a step without a draft
    does not look for it (vLLM issue 40875), so it is never drafted for.
    """
    speculative = config.speculative_config
    if speculative is None or speculative.model not in (PROPOSER, ASYNC_PROPOSER):
        wrapped(*args, **kwargs)
        return
    if config.model_config.has_inner_state:
        logger.warning("HistoSpec is off: vLLM does not verify drafts exactly for models with an inner state")
        config.speculative_config = None
        wrapped(*args, **kwargs)
        return
    from vllm.config import vllm as module

    if problem := _obstacle(config, module):
        if config.scheduler_config.async_scheduling is not False:
            logger.info("HistoSpec drafts synchronously: %s", problem)
        config.scheduler_config.async_scheduling = False
    with (
        patch.object(module, CONFIG_NAME, Literal["ngram_gpu", "custom_class"], create=True),
        # vLLM's checks take the drafts that it allows by batch size for drafts that it adapts: full graphs become
        # piecewise ones, and with data parallelism the entry is dropped.
        patch.object(speculative, BY_BATCH_SIZE, None),
    ):
        wrapped(*args, **kwargs)
    if config.scheduler_config.async_scheduling:
        speculative.model = ASYNC_PROPOSER
        config.scheduler_config.scheduler_cls = SCHEDULER


def _obstacle(config: Any, module: Any) -> str | None:
    """Return why HistoSpec has to draft synchronously, or None."""
    if ((settings_in(config) or {}).get("spec") or {}).get("async_scheduling") == "off":
        return "spec.async_scheduling=off"
    if config.scheduler_config.scheduler_cls not in (None, SCHEDULER):
        return f"scheduler_cls={config.scheduler_config.scheduler_cls}"
    if config.parallel_config.pipeline_parallel_size > 1:
        return "pipeline parallelism"
    if getattr(config.model_config, "use_mla", False) or config.parallel_config.decode_context_parallel_size > 1:
        return "multi-head latent attention, or context parallelism, for which vLLM counts all placeholders as accepted"
    if getattr(config.model_config, "enable_return_routed_experts", False):
        return "routing replay, for which vLLM counts a step's tokens before drafts are trimmed"
    if not hasattr(module, CONFIG_NAME):
        return f"vLLM's config has no {CONFIG_NAME}"
    return missing_hook()
