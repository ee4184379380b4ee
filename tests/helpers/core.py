"""Small helpers over the compiled core, shared by its tests."""

import itertools

import numpy as np
from rhyme_verl._core import HistoryIndex, prompt_key

from rhyme_verl.config import HistoryConfig, RhymeConfig, SpecConfig
from rhyme_verl.histospec.from_config import MAX_LIVE_TOKENS, make_drafter

_new_id = itertools.count(1_000_000)


def tokens(values):
    return np.array(values, np.int32)


def new_index(**limits):
    """An empty index with the shipped limits, except for those that are given."""
    shipped = HistoryConfig()
    defaults = {
        "window_epochs": shipped.window_epochs,
        "max_tokens_per_prompt": shipped.max_tokens_per_prompt,
        "max_bytes": int(shipped.replica_budget_gib * 2**30),
    }
    return HistoryIndex(**defaults | limits)


def remember(index, prompt, answers, steps=0, ids=None):
    """Update a prompt's history with lists of token ids; steps: one for all, or one per answer."""
    count = len(answers)
    if ids is None:
        ids = [next(_new_id) for _ in answers]
    index.update(
        prompt_key(tokens(prompt)),
        tokens([token for answer in answers for token in answer]),
        tokens([len(answer) for answer in answers]),
        np.broadcast_to(np.asarray(steps, np.int64), count),
        np.asarray(ids, np.uint64),
    )


def drafter(index, max_live_tokens=MAX_LIVE_TOKENS, off=(), **spec):
    """A drafter with the shipped settings, except for those of `spec`, and without the parts that are `off`."""
    config = RhymeConfig(spec=SpecConfig(**{"policy": "fixed"} | spec))
    return make_drafter(index, config, max_live_tokens=max_live_tokens, **dict.fromkeys(off, False))


class Batch:
    """Plays vLLM's part for a model that is going to say `truths`, a row per request."""

    def __init__(self, one, prompts, truths, model_len=4096):
        self.drafter, self.model_len = one, model_len
        self.truths = [tokens([*prompt, *truth]) for prompt, truth in zip(prompts, truths, strict=True)]
        self.slots = tokens([one.open(tokens(prompt)) for prompt in prompts])
        self.lengths = tokens([len(prompt) + 1 for prompt in prompts])
        self.rows = np.full((len(prompts), model_len), 7, np.int32)
        for row, truth in enumerate(self.truths):
            self.rows[row, : len(truth)] = truth

    def step(self, now=0.0):
        """One engine step; returns the drafts it verified."""
        drafts = self.drafter.draft(self.rows, self.lengths, self.slots, self.model_len, now)
        for row, draft in enumerate(drafts):
            rest = self.truths[row][self.lengths[row] :]
            accepted = 0
            while accepted < min(len(draft), len(rest) - 1) and draft[accepted] == rest[accepted]:
                accepted += 1
            self.lengths[row] = min(self.lengths[row] + accepted + 1, len(self.truths[row]))
        return drafts

    @property
    def done(self):
        return all(length == len(truth) for length, truth in zip(self.lengths, self.truths, strict=True))

    def run(self):
        """Step to the end, as vLLM calls once more before it notices the end; returns all drafts by step."""
        steps = []
        while not self.done:
            steps.append(self.step())
        self.step()
        for slot in self.slots:
            self.drafter.close(slot)
        return steps
