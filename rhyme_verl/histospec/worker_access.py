"""Access to HistoSpec's proposer inside a vLLM worker, through `collective_rpc`.

Use it as vLLM's `worker_extension_cls` to run HistoSpec without verl; under verl `worker_extension` mixes it in. vLLM
refuses extension attributes that its worker already has, hence the prefix.
"""

from __future__ import annotations

from typing import Any


class HistoSpecWorker:
    """Worker extension: binds the proposer to the worker's batch and reads its counters."""

    rank: int
    model_runner: Any
    vllm_config: Any

    def rhyme_bind(self, feed: dict[str, str | None] | None = None) -> bool:
        """Bind the proposer to this worker's batch; only the rank whose drafts vLLM uses takes part.

        Args:
            feed: where answers are published, the fields of a `history.feed.FeedAddress`.

        Returns:
            Whether this worker's proposer drafts.

        Raises:
            FeedError: the publisher cannot be reached.
        """
        from rhyme_verl.history.feed import FeedAddress
        from rhyme_verl.histospec.proposer import RhymeProposer

        drafter = getattr(self.model_runner, "drafter", None)
        if not isinstance(drafter, RhymeProposer) or self.rank != _output_rank(self.vllm_config.parallel_config):
            return False
        drafter.bind(self.model_runner, None if feed is None else FeedAddress(**feed))  # type: ignore[arg-type]
        return True

    def rhyme_stats(self) -> dict[str, float]:
        """Return the proposer's running totals, or an empty dict on a worker that does not draft."""
        from rhyme_verl.histospec.proposer import RhymeProposer

        drafter = getattr(self.model_runner, "drafter", None)
        if not isinstance(drafter, RhymeProposer) or not (drafter.is_bound or drafter.has_failed):
            return {}
        return drafter.stats()


def _output_rank(parallel_config: Any) -> int:
    """The rank whose model output, and so whose drafts, vLLM's executor uses: the first of the last pipeline stage."""
    stage_size = parallel_config.tensor_parallel_size * parallel_config.prefill_context_parallel_size
    return int(parallel_config.world_size - stage_size)
