"""HistoSpec with planted acceptance: measures whole engines at a given acceptance, with any weights.

Tokens sampled with random weights cannot be predicted. Requests are therefore restricted to a single token
(`SamplingParams.allowed_token_ids`, which adds a mask of the logits). A draft consists of copies of that token, which
are accepted, followed by copies of another token, which are rejected. The proposer and the compiled core do all their
usual work, so their time is included; only the drafts are replaced.
"""

from __future__ import annotations

from typing import Any

import numpy as np

ALLOWED_TOKEN = 5
OTHER_TOKEN = 6
NUM_QUANTILES = 64


def plant(worker: Any, mean_accepted: float) -> None:
    """Let the proposer of a vLLM worker draft with this acceptance from now on. `Engine.worker` takes this function.

    Args:
        mean_accepted: tokens per verification, if drafts may be long enough; 0: no drafts.
    """
    proposer = worker.model_runner.drafter
    core = proposer.drafter.core if isinstance(proposer.drafter, PlantedDrafter) else proposer.drafter
    most = worker.vllm_config.speculative_config.num_speculative_tokens
    proposer.drafter = PlantedDrafter(core, mean_accepted, most)


def accepted_per_draft(worker: Any) -> float:
    """Return the mean number of accepted tokens per draft since `plant` was called; 0 without drafts."""
    planted: PlantedDrafter = worker.model_runner.drafter.drafter
    return planted.num_accepted / max(1, planted.num_drafts)


class PlantedDrafter:
    """Has the methods of the compiled core (`rhyme_verl._core.Drafter`), calls them, and replaces its drafts.

    The numbers of accepted and of rejected tokens of a draft are geometrically distributed. They are quantiles in a
    fixed order, so that few drafts have the right mean. A draft has at least one token.
    """

    def __init__(self, core: Any, mean_accepted: float, max_draft_tokens: int) -> None:
        self.core = core
        self.num_drafts = self.num_accepted = 0
        self._drafts_at_all = mean_accepted > 0.0
        self._max_draft_tokens = max_draft_tokens
        self._calls = 0
        below = (np.arange(NUM_QUANTILES) + 0.5) / NUM_QUANTILES
        fails = 1.0 / (1.0 + mean_accepted)
        self._quantiles = np.floor(np.log1p(-below) / np.log1p(-fails)).astype(int) if self._drafts_at_all else below

    def __getattr__(self, name: str) -> Any:
        return getattr(self.core, name)

    def draft(
        self,
        token_ids: np.ndarray,
        num_tokens: np.ndarray,
        slots: np.ndarray,
        *,
        max_model_len: int,
        max_step_tokens: int,
        max_sampled_rows: int,
        **others: Any,
    ) -> list[list[int]]:
        limits = {"max_step_tokens": max_step_tokens, "max_sampled_rows": max_sampled_rows}
        self.core.draft(token_ids, num_tokens, slots, max_model_len=max_model_len, **limits, **others)
        rooms = np.where(slots >= 0, max_model_len - 1 - num_tokens[: len(slots)], 0)
        return self._plant(rooms, **limits)

    def draft_first(
        self,
        slots: np.ndarray,
        sampled: np.ndarray,
        rooms: np.ndarray,
        expected: np.ndarray,
        drafts: np.ndarray,
        lengths: np.ndarray,
        *,
        max_step_tokens: int,
        max_sampled_rows: int,
        num_rows: int = 0,
        **others: Any,
    ) -> None:
        limits = {"max_step_tokens": max_step_tokens, "max_sampled_rows": max_sampled_rows, "num_rows": num_rows}
        self.core.draft_first(slots, sampled, rooms, expected, drafts, lengths, **limits, **others)
        for row, draft in enumerate(self._plant(np.where(slots >= 0, rooms, 0), **limits)):
            drafts[row, : len(draft)] = draft
            lengths[row] = len(draft)

    def consider(self, *args: Any, **kwargs: Any) -> bool:
        self.core.consider(*args, **kwargs)
        return self._drafts_at_all

    def wants_undrafted(self, num_rows: int) -> bool:
        return False

    def _plant(
        self, rooms: np.ndarray, *, max_step_tokens: int, max_sampled_rows: int, num_rows: int = 0
    ) -> list[list[int]]:
        num_rows = max(1, len(rooms), num_rows)
        longest = min(self._max_draft_tokens, max_step_tokens // num_rows - 1)
        if max_sampled_rows:
            longest = min(longest, max_sampled_rows // num_rows - 1)
        if not self._drafts_at_all or longest < 1:
            return [[] for _ in rooms]
        self._calls += 1
        rows = np.arange(len(rooms))
        right = self._quantiles[(37 * self._calls + 11 * rows) % NUM_QUANTILES]
        wrong = self._quantiles[(29 * self._calls + 5 * rows + NUM_QUANTILES // 2) % NUM_QUANTILES]
        wrong = np.maximum(wrong, right == 0)
        drafts = []
        for room, accepted, rejected in zip(rooms.tolist(), right.tolist(), wrong.tolist(), strict=True):
            draft = ([ALLOWED_TOKEN] * accepted + [OTHER_TOKEN] * rejected)[: max(0, min(longest, room))]
            drafts.append(draft)
            self.num_drafts += bool(draft)
            self.num_accepted += min(accepted, len(draft))
        return drafts
