"""The compiled core's index and drafter, made from rhyme's settings."""

from __future__ import annotations

import os

from rhyme_verl._core import Drafter, HistoryIndex
from rhyme_verl.config import RhymeConfig

_GIB = 1 << 30
_ALL_IDS = 1 << 30
MAX_LIVE_TOKENS = 1 << 22
_CORES_PER_THREAD = 8  # an engine has other work for them, and a machine several engines
_MAX_THREADS = 8


def default_threads() -> int:
    """Threads that draft in an engine process, by the cores that it may use."""
    return min(_MAX_THREADS, max(1, len(os.sched_getaffinity(0)) // _CORES_PER_THREAD))


def make_index(config: RhymeConfig) -> HistoryIndex:
    """An empty history index of one replica."""
    history = config.history
    return HistoryIndex(
        window_epochs=history.window_epochs,
        max_tokens_per_prompt=history.max_tokens_per_prompt,
        max_bytes=int(history.replica_budget_gib * _GIB),
    )


def make_drafter(
    index: HistoryIndex,
    config: RhymeConfig,
    max_draft_tokens: int | None = None,
    vocab_size: int | None = None,
    *,
    max_live_tokens: int = MAX_LIVE_TOKENS,
    siblings: bool = True,
    common: bool = True,
    rejoin: bool = True,
    stragglers_first: bool = True,
) -> Drafter:
    """A drafter that reads `index`.

    Args:
        max_draft_tokens: lowers the settings' own bound.
        vocab_size: token ids from this on are not drafted; None: all ids are the model's.
        max_live_tokens: bound on the tokens of finished siblings that are kept until their history comes.
        siblings: follow the other running answers to a prompt; this and the following are turned off in ablations only.
        common: count contexts over all prompts.
        rejoin: go on in a text after a difference.
        stragglers_first: weigh requests by the expected rest of their answers (policy `cost_aware`).
    """
    spec = config.spec
    return Drafter(
        index,
        cost_aware=spec.policy == "cost_aware",
        max_draft_tokens=min(spec.max_draft_tokens, max_draft_tokens or spec.max_draft_tokens),
        num_threads=spec.num_threads or default_threads(),
        vocab_size=_ALL_IDS if vocab_size is None else vocab_size,
        min_acceptance=spec.min_acceptance,
        max_live_tokens=max_live_tokens,
        siblings=siblings,
        common=common,
        rejoin=rejoin,
        stragglers_first=stragglers_first,
    )
