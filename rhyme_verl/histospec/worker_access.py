"""Access to HistoSpec's proposer inside a vLLM worker, through `collective_rpc`.

Use it as vLLM's `worker_extension_cls` to run HistoSpec without verl; with verl, `worker_extension` includes it. vLLM
rejects an extension with attributes that its worker already has, hence the prefix `rhyme_`.
"""

from __future__ import annotations

from typing import Any


class HistoSpecWorker:
    """Worker extension that binds the proposer to the worker's batch and reads its counters."""

    rank: int
    model_runner: Any
    vllm_config: Any

    def rhyme_feed_key(self) -> str:
        """Return the public key with which this worker subscribes to answers over TCP."""
        from rhyme_verl.history.feed import own_keys

        return own_keys()[0].decode()

    def rhyme_bind(self, feed: dict[str, str | None] | None = None) -> bool:
        """Bind the proposer to this worker's batch. Only the rank whose drafts vLLM uses does so.

        Args:
            feed: fields of the `history.feed.FeedAddress` at which answers are published; None: do not subscribe.

        Returns:
            Whether this worker's proposer drafts.

        Raises:
            FeedError: the publisher cannot be reached, or does not accept this worker's key.
        """
        from rhyme_verl.history.feed import FeedAddress
        from rhyme_verl.histospec.proposer import Proposer

        drafter = getattr(self.model_runner, "drafter", None)
        if not isinstance(drafter, Proposer):
            return False
        parallel = self.vllm_config.parallel_config
        stage_size = parallel.tensor_parallel_size * parallel.prefill_context_parallel_size
        if self.rank != parallel.world_size - stage_size:  # the first rank of the last pipeline stage
            drafter.connect(self.model_runner)
            return False
        drafter.bind(self.model_runner, None if feed is None else FeedAddress(**feed))  # type: ignore[arg-type]
        return True

    def rhyme_stats(self) -> dict[str, float]:
        """Return the proposer's running totals, or an empty dict on a worker that does not draft."""
        from rhyme_verl.histospec.proposer import Proposer

        drafter = getattr(self.model_runner, "drafter", None)
        if not isinstance(drafter, Proposer) or not (drafter.is_bound or drafter.has_failed):
            return {}
        return drafter.stats()
