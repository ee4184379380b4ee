"""Identifies a model's token ids, so that answers of one tokenizer are never drafted for a model with another."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

FINGERPRINT_CHARACTERS = 16


@dataclass(frozen=True)
class Vocabulary:
    """The token ids of a model."""

    size: int  # number of token ids that the model accepts; often more than its tokenizer has
    fingerprint: str  # hash of the tokenizer's tokens and their ids, in hex

    def __str__(self) -> str:
        return f"vocabulary of {self.size} ids, tokenizer {self.fingerprint}"


def vocabulary_of(tokenizer: Any, hf_config: Any) -> Vocabulary:
    """Return the vocabulary of a model from its Hugging Face tokenizer and config."""
    digest = hashlib.sha256()
    for token, token_id in sorted(tokenizer.get_vocab().items()):
        digest.update(f"{token}\0{token_id}\0".encode("utf-8", "surrogatepass"))
    return Vocabulary(hf_config.get_text_config().vocab_size, digest.hexdigest()[:FINGERPRINT_CHARACTERS])
