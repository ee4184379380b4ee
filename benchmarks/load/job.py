"""The job whose load is driven: replicas of a 7B policy, and what they ask of the control plane."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rhyme_verl.histopipe.messages import Group
from rhyme_verl.sim.step_times import PublishedStepTime

MEAN_TOKENS, MAX_TOKENS, SIGMA = 1000, 4096, 0.8  # of an answer; lengths are lognormal
LANES = 64
SAMPLES = 8
WAVES = 2  # answers per lane and step
REPLICAS_PER_WORKER = 16
PROMPT_TOKENS = 16  # the store sees a hash of the prompt only
CONTEXT = 1000.0
VOCABULARY = 150_000


@dataclass(frozen=True, kw_only=True)
class LoadedJob:
    """A job with full lanes.

    Attributes:
        lane_tokens_per_s: tokens per second of one of a replica's lanes when all are full (published A100 step times of
            Qwen2.5-7B without drafts).
    """

    replicas: int
    waves: int = WAVES
    mean_tokens: int = MEAN_TOKENS
    lane_tokens_per_s: float = 1.0 / PublishedStepTime().seconds(LANES, LANES, CONTEXT)

    @property
    def prompts(self) -> int:
        """Number of prompts per step."""
        return max(1, self.replicas * LANES * self.waves // SAMPLES)

    @property
    def workers(self) -> int:
        return max(2, self.replicas // REPLICAS_PER_WORKER)

    @property
    def answers_per_s(self) -> float:
        """Number of answers that end per second while all lanes are full."""
        return self.replicas * LANES * self.lane_tokens_per_s / self.mean_tokens

    def lengths(self, rng: np.random.Generator, size: int | tuple[int, ...]) -> np.ndarray:
        """Draw lengths of answers in tokens, int64 of this shape."""
        median = self.mean_tokens * np.exp(-(SIGMA**2) / 2)
        most = MAX_TOKENS * self.mean_tokens // MEAN_TOKENS
        return rng.lognormal(np.log(median), SIGMA, size).clip(1, most).astype(np.int64)

    def groups(self, worker: int, step: int) -> list[Group]:
        """Return the groups of a step that a worker generates."""
        return [Group(f"{step}-{one}", one, SAMPLES, step) for one in range(worker, self.prompts, self.workers)]


def prompt_of(number: int) -> np.ndarray:
    """Return the token ids of a prompt, int32 [tokens]."""
    return np.random.default_rng(number).integers(0, VOCABULARY, PROMPT_TOKENS).astype(np.int32)
