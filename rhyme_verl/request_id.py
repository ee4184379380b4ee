"""Request ids that carry the identity of an answer from the agent loop to the engine and the history.

verl makes a new request id for every call; rhyme's client appends a `RequestTag` to it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

AnswerId = tuple[str, int]  # uid of the group, sample

SEPARATOR = "|"
MAX_DIGITS = 9  # of a number in a tag, so that it fits into an int32
SAMPLE_BITS = 32  # lower bits of an answer's key; the upper ones identify its rollout


@dataclass(frozen=True, slots=True)
class RequestTag:
    """The data that a request id carries.

    Attributes:
        answer: identifies the answer that the request continues.
        prompt_tokens: length of the answer's first prompt, after which this request's prompt holds the answer so far;
            0 if this request's prompt does not begin with it.
    """

    answer: AnswerId
    prompt_tokens: int

    @property
    def answer_key(self) -> int:
        """Return the uint64 that identifies the answer among all answers to its prompt."""
        uid, sample = self.answer
        rollout = int.from_bytes(hashlib.blake2b(uid.encode(), digest_size=4).digest(), "little")
        return rollout << SAMPLE_BITS | sample

    def append_to(self, request_id: Any) -> str:
        """Return `request_id`, which verl lets an agent loop choose, with this tag appended."""
        uid, sample = self.answer
        return SEPARATOR.join((str(request_id).replace(SEPARATOR, "-"), str(sample), str(self.prompt_tokens), uid))


def tag_of(request_id: str | None) -> RequestTag | None:
    """Return the tag of a request id, or None for a request of another client."""
    parts = (request_id or "").split(SEPARATOR, 3)
    if len(parts) != 4 or not all(part.isdecimal() and len(part) <= MAX_DIGITS for part in parts[1:3]):
        return None
    sample, prompt_tokens = map(int, parts[1:3])
    return RequestTag((parts[3], sample), prompt_tokens)
