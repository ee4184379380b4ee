"""The vLLM worker extensions of rhyme's rollout: verl's own, with access to HistoSpec's proposer.

Kept apart from `rollout.py` so that an engine process does not import verl's HTTP server.
"""

from __future__ import annotations

from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

from rhyme_verl.histospec.worker_access import HistoSpecWorker
from rhyme_verl.platforms.cpu_worker import CpuWorkerExtension


class RhymeWorkerExtension(HistoSpecWorker, vLLMColocateWorkerExtension):
    """On accelerators."""


class RhymeCpuWorkerExtension(HistoSpecWorker, CpuWorkerExtension):
    """On the CPU platform, with its way of loading weights."""
