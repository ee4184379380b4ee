"""Recognises the requests of one answer: a later turn or a resumed request comes as a new, longer prompt.

verl gives every call a new request id, so an answer is recognised by its tokens: a prompt that begins with an earlier
prompt and everything generated for it continues that answer.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

from rhyme_verl._core import prompt_key
from rhyme_verl.request_id import SAMPLE_BITS

MAX_CONTEXTS = 65536  # limit on the contexts that can be continued
MAX_ALIKE = 64  # limit on the answers with the same context

_FACTOR = 0x9E3779B97F4A7C15  # odd, so that its powers modulo 2^64 never vanish


@dataclass(slots=True, eq=False)
class ServedTrajectory:
    """An answer to a root prompt (its first prompt, of `root_len` tokens); `answer_id` is unique per answer."""

    prompt_key: int
    answer_id: int
    root_len: int
    is_tagged: bool = False  # known by its tag instead of its tokens


class ServedTrajectories:
    """The answers of one server that can be continued. Those whose latest request is longest ago are dropped first."""

    def __init__(self) -> None:
        self._open: OrderedDict[int, list[ServedTrajectory]] = OrderedDict()  # by the hash of their context

    def begin(self, prompt: np.ndarray, step: int = 0) -> ServedTrajectory:
        """Return the answer that a request with this prompt (int32 [tokens]) continues, or a new one.

        New answers to a prompt under one version of the weights (`step`) count as one rollout.
        """
        for context in reversed(prefix_hashes(prompt).tolist()):
            if context in self._open:
                found = self._open[context].pop()
                if not self._open[context]:
                    del self._open[context]
                return found
        answer_id = step % (1 << SAMPLE_BITS) << SAMPLE_BITS | secrets.randbits(SAMPLE_BITS)
        return ServedTrajectory(prompt_key(prompt), answer_id, len(prompt))

    def end(self, trajectory: ServedTrajectory, context: np.ndarray) -> None:
        """Record `context` (int32 [tokens], root prompt included) as what a later request of the answer begins with."""
        key = int(prefix_hashes(context)[-1])
        alike = self._open.setdefault(key, [])
        alike.append(trajectory)
        del alike[:-MAX_ALIKE]
        self._open.move_to_end(key)
        if len(self._open) > MAX_CONTEXTS:
            self._open.popitem(last=False)


def prefix_hashes(tokens: np.ndarray) -> np.ndarray:
    """Return uint64 [tokens + 1], in which entry k is the hash of the first k tokens (int32 [tokens])."""
    mixed = (tokens.astype(np.uint64) + np.uint64(1)) * np.uint64(0xD6E8FEB86659FD93)
    mixed ^= mixed >> np.uint64(32)
    powers = np.cumprod(np.full(len(tokens), _FACTOR, dtype=np.uint64))
    return np.concatenate([np.zeros(1, dtype=np.uint64), np.cumsum(mixed * powers)])
