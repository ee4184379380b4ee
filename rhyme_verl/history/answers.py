"""A prompt's answers as flat arrays: the format in which they travel from the store to an engine's index."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rhyme_verl.request_id import SAMPLE_BITS

UNKNOWN_REWARD = float("nan")
NewAnswer = tuple[int, int, int, bytes]  # to the store: prompt key, answer id, step, int32 tokens so far
NewReward = tuple[int, int, float]  # prompt key, answer id, reward; it may arrive before or after the answer


@dataclass(slots=True)
class Answer:
    """One remembered answer.

    `answer_id` identifies it among those to its prompt; a later turn or a resumption has the same id and more tokens.
    The answers of one rollout share all but the lowest SAMPLE_BITS bits.
    """

    answer_id: int
    step: int  # version of the weights that finished it
    tokens: bytes  # int32 token ids of everything after the root prompt (an array takes 100 bytes more)
    reward: float = UNKNOWN_REWARD
    version: int = 0  # the store's clock at the answer's last change
    rollout: int = 0  # ascending number of the answer's rollout among those of the prompt

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) // 4

    @property
    def rollout_id(self) -> int:
        return self.answer_id >> SAMPLE_BITS


@dataclass(frozen=True)
class AnswerBatch:
    """Answers of one prompt, oldest first."""

    prompt_key: int
    version: int  # the `since_version` with which the store returns only answers newer than this batch
    tokens: np.ndarray  # int32 [total], the concatenated token ids of the answers
    lengths: np.ndarray  # int32 [answers]
    rollouts: np.ndarray  # int64 [answers], `Answer.rollout`
    ids: np.ndarray  # uint64 [answers]

    @classmethod
    def of(cls, prompt_key: int, version: int, answers: Sequence[Answer]) -> AnswerBatch:
        return cls(
            prompt_key=prompt_key,
            version=version,
            tokens=np.frombuffer(b"".join(answer.tokens for answer in answers), dtype=np.int32),
            lengths=np.array([answer.num_tokens for answer in answers], dtype=np.int32),
            rollouts=np.array([answer.rollout for answer in answers], dtype=np.int64),
            ids=np.array([answer.answer_id for answer in answers], dtype=np.uint64),
        )

    def __len__(self) -> int:
        return len(self.ids)
