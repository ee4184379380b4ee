"""Fills a shard of the history."""

import numpy as np

from rhyme_verl.history.answers import Answer


def add(shard, prompt_key, answer_id, step, tokens):
    """Add an answer with these token ids to a `HistoryShard`."""
    shard.add(prompt_key, Answer(answer_id, step, np.asarray(tokens, dtype=np.int32).tobytes()))
