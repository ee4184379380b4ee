"""The compiled core's index and drafter, made from rhyme's settings."""

from __future__ import annotations

from rhyme_verl._core import Drafter, DraftLength, DraftPolicy, HistoryIndex
from rhyme_verl.config import RhymeConfig

_GIB = 1 << 30


def make_index(config: RhymeConfig) -> HistoryIndex:
    """An empty history index of one replica."""
    spec, history = config.spec, config.history
    return HistoryIndex(
        gram_tokens=spec.min_match_tokens,
        window_epochs=history.window_epochs,
        max_tokens_per_prompt=history.max_tokens_per_prompt,
        max_bytes=int(history.replica_budget_gib * _GIB),
        recency_weight=spec.recency_weight,
        reward_weight=spec.reward_weight,
    )


def make_drafter(
    index: HistoryIndex, config: RhymeConfig, max_draft_tokens: int | None = None, vocab_size: int | None = None
) -> Drafter:
    """A drafter that reads `index`.

    Args:
        max_draft_tokens: lowers the settings' own bound.
        vocab_size: token ids from this on are not drafted; None: all ids are the model's.
    """
    spec = config.spec
    policy = DraftPolicy()
    policy.length = getattr(DraftLength, spec.policy)
    policy.gram_tokens = spec.min_match_tokens
    policy.max_draft_tokens = min(spec.max_draft_tokens, max_draft_tokens or spec.max_draft_tokens)
    if vocab_size is not None:
        policy.vocab_size = vocab_size
    policy.initial_window = spec.initial_window
    policy.window_increase = spec.window_increase
    policy.window_decrease = spec.window_decrease
    policy.min_acceptance = spec.min_acceptance
    policy.agreement_weight = spec.agreement_weight
    policy.sibling_weight = spec.sibling_weight
    policy.phrases = spec.phrases
    policy.rejoin = spec.rejoin
    return Drafter(index, policy)
