"""Whose token ids these are: what keeps answers of one tokenizer from being drafted for a model with another."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

FINGERPRINT_CHARACTERS = 16


@dataclass(frozen=True)
class Vocabulary:
    """The token ids of a model.

    Attributes:
        size: ids the model takes, from 0 on; often more than its tokenizer has.
        fingerprint: of the tokenizer's tokens and their ids, in hex.
    """

    size: int
    fingerprint: str

    def __str__(self) -> str:
        return f"vocabulary of {self.size} ids, tokenizer {self.fingerprint}"


def vocabulary_of(tokenizer: Any, hf_config: Any) -> Vocabulary:
    """Return the vocabulary of a model, given its tokenizer and config of Hugging Face's classes."""
    digest = hashlib.sha256()
    for token, token_id in sorted(tokenizer.get_vocab().items()):
        digest.update(f"{token}\0{token_id}\0".encode("utf-8", "surrogatepass"))
    return Vocabulary(hf_config.get_text_config().vocab_size, digest.hexdigest()[:FINGERPRINT_CHARACTERS])
