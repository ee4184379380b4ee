"""A drafter for vLLM that proposes one token a fixed number of times, to measure the cost of verification."""

from __future__ import annotations

from typing import Any

import numpy as np


class FixedDrafter:
    """Proposes drafts that the model rejects. Loaded by vLLM (`speculative_config.method="custom_class"`)."""

    def __init__(self, vllm_config: Any) -> None:
        self.num_draft_tokens = 0
        self.token_id = 0

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: there are no weights. vLLM calls this hook."""

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: np.ndarray,
        token_ids_cpu: np.ndarray,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        draft = [self.token_id] * self.num_draft_tokens
        return [list(draft) if sampled else [] for sampled in sampled_token_ids]
