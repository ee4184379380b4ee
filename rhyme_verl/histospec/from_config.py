"""Creates the compiled core's index and drafter from rhyme's settings."""

from __future__ import annotations

import os

from rhyme_verl._core import Drafter, HistoryIndex
from rhyme_verl.config import GIB, RhymeConfig

_ALL_IDS = 1 << 30
MAX_LIVE_TOKENS = 1 << 23  # of at most 40 bytes
_CORES_PER_THREAD = 8  # leaves cores for the engine's other work and for other engines
_MAX_THREADS = 8


def make_index(config: RhymeConfig) -> HistoryIndex:
    """Return an empty history index for one replica."""
    history = config.history
    return HistoryIndex(
        window_epochs=history.window_epochs,
        max_tokens_per_prompt=history.max_tokens_per_prompt,
        max_bytes=int(history.replica_budget_gib * GIB),
    )


def make_drafter(
    index: HistoryIndex,
    config: RhymeConfig,
    max_draft_tokens: int | None = None,
    vocab_size: int | None = None,
    *,
    max_live_tokens: int = MAX_LIVE_TOKENS,
    **parts: bool,
) -> Drafter:
    """Return a drafter that reads `index`.

    Args:
        max_draft_tokens: second upper bound, in addition to `spec.max_draft_tokens`.
        vocab_size: token ids from this value on are not drafted; None: no limit.
        max_live_tokens: limit on the tokens of running answers, and of finished ones until the history has them.
        parts: for ablations, False for each part that is off; `DraftPolicy` in `csrc/drafter.h` explains them.
    """
    spec = config.spec
    usable_cores = len(os.sched_getaffinity(0))
    return Drafter(
        index,
        cost_aware=spec.policy == "cost_aware",
        max_draft_tokens=min(spec.max_draft_tokens, max_draft_tokens or spec.max_draft_tokens),
        num_threads=spec.num_threads or min(_MAX_THREADS, max(1, usable_cores // _CORES_PER_THREAD)),
        vocab_size=_ALL_IDS if vocab_size is None else vocab_size,
        min_acceptance=spec.min_acceptance,
        max_live_tokens=max_live_tokens,
        **parts,
    )
