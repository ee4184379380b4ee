"""HistoSpec's proposer with planted acceptance: measures whole engines at a given acceptance, with any weights.

Tokens sampled with random weights cannot be predicted. Requests are therefore restricted to a single token
(`SamplingParams.allowed_token_ids`, which adds a mask of the logits). A draft consists of copies of that token, which
are accepted, followed by copies of another token, which are rejected. The proposer does all its usual work, so its time
is included; only its drafts are replaced.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rhyme_verl.histospec.proposer import RhymeProposer

ALLOWED_TOKEN = 5
OTHER_TOKEN = 6


class PlantedProposer(RhymeProposer):
    """Loaded by vLLM (`speculative_config.method="custom_class"`)."""

    def __init__(self, vllm_config: Any) -> None:
        super().__init__(vllm_config)
        self._max_draft_tokens = vllm_config.speculative_config.num_speculative_tokens
        self._random = np.random.default_rng(0)
        self.mean_accepted = 0.0  # per verification, if drafts may be long enough; 0: no drafts

    def _draft(
        self, sampled_token_ids: list[list[int]], num_tokens_no_spec: np.ndarray, token_ids_cpu: np.ndarray
    ) -> list[list[int]]:
        """Return drafts whose numbers of accepted and of rejected tokens are geometrically distributed."""
        super()._draft(sampled_token_ids, num_tokens_no_spec, token_ids_cpu)
        num_rows = len(sampled_token_ids)
        longest = min(self._max_draft_tokens, min(self._bound) // num_rows - 1)
        if self.mean_accepted <= 0.0 or longest < 1:
            return [[] for _ in sampled_token_ids]
        right, wrong = self._random.geometric(1 / (1 + self.mean_accepted), (2, num_rows)) - 1
        drafts = []
        for row, sampled in enumerate(sampled_token_ids):
            draft = [ALLOWED_TOKEN] * right[row] + [OTHER_TOKEN] * wrong[row]
            drafts.append(draft[:longest] if sampled else [])
        return drafts
