"""Synthetic traces with a known edit rate: long answers that change from epoch to epoch like those of a trained policy.

Text consists of phrases from one bank, drawn from a Zipf distribution, of single tokens, and of passages copied from
a little earlier, so that n-grams repeat within and across answers as in written reasoning. Every prompt has a few base
solutions. A sample of the first epoch is an edited base; a sample of a later epoch is an edited answer of the previous
epoch. An edit replaces, inserts or deletes a token with equal probability.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from rhyme_verl._core import prompt_key

from benchmarks.drafting.replay import Answer, TraceStep

END_OF_TEXT = 0
PHRASES = 4000
COPY_SHARE = 0.05  # share of passages that copy 8 to 64 of the last 1024 tokens
SINGLE_SHARE = 0.35  # share of passages that are one token
PROMPT_TOKENS = 200


@dataclass(frozen=True, kw_only=True)
class SyntheticTrace:
    """A trace to generate. `edit_rate`: edits per token between epochs, and between a base solution and its samples."""

    edit_rate: float
    num_prompts: int = 2
    num_samples: int = 8
    num_bases: int = 3
    num_epochs: int = 3
    min_tokens: int = 4096  # lengths of answers are log-uniform between these
    max_tokens: int = 32768
    vocabulary: int = 32000
    seed: int = 0

    def steps(self) -> list[TraceStep]:
        """Return one step per epoch, with all prompts in it."""
        rng = np.random.default_rng([self.seed, round(self.edit_rate * 1e6)])
        writer = _Writer(rng, self.vocabulary)
        groups = []
        for _ in range(self.num_prompts):
            prompt = writer.text(PROMPT_TOKENS)
            low, high = np.log(self.min_tokens), np.log(self.max_tokens)
            bases = [writer.text(int(np.exp(rng.uniform(low, high)))) for _ in range(self.num_bases)]
            groups.append((prompt, [(base, float(rng.random() < 0.5)) for base in bases]))
        steps = []
        for epoch in range(1, self.num_epochs + 1):
            answers = []
            for index, (prompt, earlier) in enumerate(groups):
                picks = rng.integers(len(earlier), size=self.num_samples)
                written = [(writer.edited(earlier[pick][0], self.edit_rate), earlier[pick][1]) for pick in picks]
                groups[index] = (prompt, written)
                answers += [
                    Answer(
                        prompt_key=prompt_key(prompt),
                        sample=sample,
                        prompt=prompt,
                        tokens=np.append(tokens, np.int32(END_OF_TEXT)),
                        reward=reward,
                    )
                    for sample, (tokens, reward) in enumerate(written)
                ]
            steps.append(TraceStep(step=epoch, epoch=epoch, answers=answers))
        return steps


class _Writer:
    """Generates and edits text from one vocabulary and phrase bank. Token ids are 1 to vocabulary - 1."""

    def __init__(self, rng: np.random.Generator, vocabulary: int) -> None:
        self._rng = rng
        self._token_shares = _zipf(vocabulary - 1)
        self._phrases = [self._tokens(int(length)) for length in rng.integers(2, 13, size=PHRASES)]
        self._phrase_shares = _zipf(PHRASES)

    def text(self, num_tokens: int) -> np.ndarray:
        """Return `num_tokens` new tokens, int32."""
        num_passages = num_tokens  # more than enough, because a passage has at least one token
        kinds = self._rng.random(num_passages)
        phrases = self._rng.choice(PHRASES, size=num_passages, p=self._phrase_shares)
        singles = self._tokens(num_passages)
        result = np.zeros(num_tokens + 64, dtype=np.int32)
        count = 0
        for kind, phrase, single in zip(kinds, phrases, singles, strict=True):
            if count >= num_tokens:
                break
            if kind < COPY_SHARE and count > 64:
                length = int(self._rng.integers(8, 65))
                start = int(self._rng.integers(max(0, count - 1024), count - length + 1))
                passage = result[start : start + length]
            elif kind < COPY_SHARE + SINGLE_SHARE:
                passage = np.array([single], np.int32)
            else:
                passage = self._phrases[phrase]
            result[count : count + len(passage)] = passage
            count += len(passage)
        return result[:num_tokens].copy()

    def edited(self, tokens: np.ndarray, rate: float) -> np.ndarray:
        """Return `tokens` with `rate` edits per token: replacements, insertions and deletions in equal parts."""
        draw = self._rng.random(len(tokens))
        new = self._tokens(len(tokens))
        replaced = draw < rate / 3
        inserted = (draw >= rate / 3) & (draw < 2 * rate / 3)  # before the token
        deleted = (draw >= 2 * rate / 3) & (draw < rate)
        pairs = np.stack([new, np.where(replaced, new, tokens)], axis=1)
        keep = np.stack([inserted, ~deleted], axis=1)
        return pairs[keep]

    def _tokens(self, count: int) -> np.ndarray:
        shares = self._token_shares
        return (self._rng.choice(len(shares), size=count, p=shares) + 1).astype(np.int32)


def _zipf(count: int) -> np.ndarray:
    weights = 1.0 / np.arange(1, count + 1)
    return weights / weights.sum()
