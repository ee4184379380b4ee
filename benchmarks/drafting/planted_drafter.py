"""HistoSpec's proposer with planted acceptance: what whole engines gain at a given acceptance, whatever the weights.

With random weights nothing can be foreseen. So requests are allowed a single token (`SamplingParams.allowed_token_ids`,
which costs a masking of the logits), and a draft is some of that token, which are accepted, and then some of another,
which are not. The proposer does all that it would do anyway, so its time is in what is measured; only what it proposes
is replaced.
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
        self.mean_accepted = 0.0  # tokens a verification, where drafts may be long enough; 0: no drafts

    def _draft(
        self, sampled_token_ids: list[list[int]], num_tokens_no_spec: np.ndarray, token_ids_cpu: np.ndarray
    ) -> list[list[int]]:
        """Return drafts whose accepted tokens, and those that follow, are geometrically distributed."""
        super()._draft(sampled_token_ids, num_tokens_no_spec, token_ids_cpu)
        num_rows = len(sampled_token_ids)
        longest = min(self._max_draft_tokens, self._max_step_tokens // num_rows - 1)
        if self.mean_accepted <= 0.0 or longest < 1:
            return [[] for _ in sampled_token_ids]
        right, wrong = self._random.geometric(1 / (1 + self.mean_accepted), (2, num_rows)) - 1
        drafts = []
        for row, sampled in enumerate(sampled_token_ids):
            draft = [ALLOWED_TOKEN] * right[row] + [OTHER_TOKEN] * wrong[row]
            drafts.append(draft[:longest] if sampled else [])
        return drafts
