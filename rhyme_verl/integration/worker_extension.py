"""The vLLM worker extensions of rhyme's rollout: verl's own, with access to HistoSpec's proposer.

They are not in `rollout.py`, so that engine processes do not import verl's HTTP server.
"""

from __future__ import annotations

from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

from rhyme_verl.histospec.worker_access import HistoSpecWorker
from rhyme_verl.platforms.cpu_worker import CpuWorkerExtension


class RhymeWorkerExtension(HistoSpecWorker, vLLMColocateWorkerExtension):
    """The worker extension on accelerators."""


class RhymeCpuWorkerExtension(HistoSpecWorker, CpuWorkerExtension):
    """The worker extension on the CPU platform, which loads weights differently."""
