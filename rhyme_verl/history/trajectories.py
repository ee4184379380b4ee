"""Recognises the requests of one answer: a later turn or a resumed request comes as a new, longer prompt.

verl gives every call a new request id, so an answer is recognised by its tokens: a prompt that begins with an earlier
prompt and everything generated for it continues that answer.
"""

from __future__ import annotations

import secrets
from collections import Counter, OrderedDict
from dataclasses import dataclass

import numpy as np

from rhyme_verl._core import prompt_key
from rhyme_verl.request_id import SAMPLE_BITS

MAX_ROOTS = 8192  # limit on the root prompts whose answers can be continued
MAX_OPEN = 1024  # limit on the answers per root prompt that can be continued

_FACTOR = 0x9E3779B97F4A7C15  # odd, so that its powers modulo 2^64 never vanish


@dataclass(slots=True, eq=False)
class ServedTrajectory:
    """A root prompt (an answer's first prompt) and everything that has followed it.

    Attributes:
        prompt_key: key of the root prompt.
        answer_id: unique per answer.
        root_len: number of tokens in the root prompt.
        context_len: number of tokens in the root prompt and everything that has followed it.
        context_hash: hash of these tokens.
    """

    prompt_key: int
    answer_id: int
    root_len: int
    context_len: int = 0
    context_hash: int = 0


class ServedTrajectories:
    """The answers of one server that can be continued. The least recently used root prompts are dropped first."""

    def __init__(self) -> None:
        self._roots: OrderedDict[tuple[int, int], list[ServedTrajectory]] = OrderedDict()  # by root length and hash
        self._num_roots_of_len: Counter[int] = Counter()
        self._hashes = PrefixHashes()

    def begin(self, prompt: np.ndarray, step: int = 0) -> ServedTrajectory:
        """Return the answer that a request with this prompt (int32 [tokens]) continues, or a new one.

        Args:
            step: version of the weights; new answers to a prompt under one version count as one rollout.
        """
        hashes = self._hashes.of(prompt)
        root_lens = np.fromiter(self._num_roots_of_len, np.int64, len(self._num_roots_of_len))
        root_lens = root_lens[root_lens < len(prompt)]
        found: ServedTrajectory | None = None
        siblings: list[ServedTrajectory] = []
        for root in zip(root_lens.tolist(), hashes[root_lens].tolist(), strict=True):
            for trajectory in self._roots.get(root, ()):
                context_len = trajectory.context_len
                if context_len > len(prompt) or trajectory.context_hash != int(hashes[context_len]):
                    continue
                if found is None or context_len > found.context_len:
                    found, siblings = trajectory, self._roots[root]
        if found is None:
            answer_id = step % (1 << SAMPLE_BITS) << SAMPLE_BITS | secrets.randbits(SAMPLE_BITS)
            return ServedTrajectory(prompt_key(prompt), answer_id, len(prompt))
        siblings.remove(found)
        return found

    def end(self, trajectory: ServedTrajectory, context: np.ndarray) -> None:
        """Record `context` (int32 [tokens], root prompt included) as what a later request of the answer begins with."""
        hashes = self._hashes.of(context)
        trajectory.context_len, trajectory.context_hash = len(context), int(hashes[-1])
        root = (trajectory.root_len, int(hashes[trajectory.root_len]))
        if root not in self._roots:
            self._roots[root] = []
            self._num_roots_of_len[trajectory.root_len] += 1
        self._roots.move_to_end(root)
        siblings = self._roots[root]
        siblings.append(trajectory)
        del siblings[:-MAX_OPEN]
        if len(self._roots) > MAX_ROOTS:
            (root_len, _), _ = self._roots.popitem(last=False)
            self._num_roots_of_len[root_len] -= 1
            if not self._num_roots_of_len[root_len]:
                del self._num_roots_of_len[root_len]


class PrefixHashes:
    """Computes the hashes of all prefixes of a token sequence at once."""

    def __init__(self) -> None:
        self._powers = np.ones(1, dtype=np.uint64)

    def of(self, tokens: np.ndarray) -> np.ndarray:
        """Return uint64 [tokens + 1], in which entry k is the hash of the first k tokens (int32 [tokens])."""
        while len(self._powers) < len(tokens):
            step = np.uint64(pow(_FACTOR, len(self._powers), 1 << 64))
            self._powers = np.concatenate([self._powers, self._powers * step])
        mixed = (tokens.astype(np.uint64) + np.uint64(1)) * np.uint64(0xD6E8FEB86659FD93)
        mixed ^= mixed >> np.uint64(32)
        hashes = np.zeros(len(tokens) + 1, dtype=np.uint64)
        np.cumsum(mixed * self._powers[: len(tokens)], out=hashes[1:])
        return hashes
