"""One shard of the history: answers and rewards per prompt, within hard bounds on age and memory.

Plain Python without Ray, threads or wall-clock time; `actors` runs it and `snapshot` writes it to disk.
"""

from __future__ import annotations

import math
import sys
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from rhyme_verl.history.answers import Answer, AnswerBatch

ANSWER_OVERHEAD_BYTES = 320  # size of an Answer without its tokens, and of its table entries
PROMPT_OVERHEAD_BYTES = 800  # size of a prompt's tables
PAST_ROLLOUTS = 2  # rollouts before the window of a prompt whose late answers are recognised as such
ADMITTED = 8  # of so many new prompts, one is kept where the budget is less than one answer per prompt
MAX_WAITING_REWARDS = 65536  # limit on the rewards whose answers have not arrived yet


@dataclass(slots=True)
class _Prompt:
    version: int = 0
    answers: dict[int, Answer] = field(default_factory=dict)  # by id, in order of first arrival
    rollouts: dict[int, int] = field(default_factory=dict)  # ascending `Answer.rollout` of the latest, by `rollout_id`


class StoreCounters(NamedTuple):
    """What a shard holds (bytes as counted against the budget) and what it has dropped."""

    prompts: int
    answers: int
    tokens: int
    bytes: int
    evicted_tokens: int


class HistoryShard:
    """Keeps the answers of at most `window_epochs` rollouts per prompt, and at most `budget_bytes` in total.

    A rollout is known by its answers' ids, and is as new as the first of them to arrive. A logical clock numbers all
    changes, so that `changes` can return what is newer than a given version.

    Beyond the budget, the prompt with the most answers loses its oldest one. Prompts return once per epoch: if whole
    prompts were dropped, oldest first, a history that does not hold an epoch would drop each prompt before it returns.
    Where one answer of each prompt is too much, most new prompts are therefore not kept (bimodal insertion: Qureshi and
    others, Adaptive Insertion Policies for High Performance Caching, 2007).

    `first_version`: start of the clock; a shard that replaces another one must start above the other's clock.
    `max_prompt_tokens`: number of a prompt's newest tokens that engines keep, and `changes` returns.
    """

    def __init__(
        self, window_epochs: int, budget_bytes: int, first_version: int = 0, max_prompt_tokens: int = sys.maxsize
    ) -> None:
        self._window_epochs = window_epochs
        self._budget_bytes = budget_bytes
        self._max_prompt_tokens = max_prompt_tokens
        self._clock = first_version
        self._prompts: dict[int, _Prompt] = {}
        self._prompts_by_count: dict[int, OrderedDict[int, None]] = {}  # keys by number of answers; last changed last
        self._largest_count = 0  # an upper bound
        self._waiting_rewards: OrderedDict[tuple[int, int], float] = OrderedDict()
        self._num_answers = 0
        self._num_tokens = 0
        self._evicted_tokens = 0

    def add(self, prompt_key: int, answer: Answer) -> None:
        """Store an answer. It replaces an answer with the same id, unless that one begins with it, or is longer and not
        of earlier weights.
        """
        prompt = self._prompts.setdefault(prompt_key, _Prompt())
        before = len(prompt.answers)
        replaced = prompt.answers.get(answer.answer_id)
        if replaced is not None:
            is_shorter = answer.num_tokens < replaced.num_tokens
            if replaced.tokens.startswith(answer.tokens) or (is_shorter and answer.step <= replaced.step):
                return  # what is known, an early part that comes late, or what a loop has left of the answer's text
            self._num_tokens -= replaced.num_tokens
            self._num_answers -= 1
            if math.isnan(answer.reward) and answer.tokens.startswith(replaced.tokens):
                answer.reward = replaced.reward
        prompt.answers[answer.answer_id] = answer
        latest = next(reversed(prompt.rollouts.values()), answer.step - 1)
        answer.rollout = prompt.rollouts.setdefault(answer.rollout_id, max(answer.step, latest + 1))
        self._num_answers += 1
        self._num_tokens += answer.num_tokens
        answer.reward = self._waiting_rewards.pop((prompt_key, answer.answer_id), answer.reward)
        self._clock += 1
        answer.version = prompt.version = self._clock
        self._keep_window(prompt)
        self._count(prompt_key, before)
        self._keep_budget()

    def set_reward(self, prompt_key: int, answer_id: int, reward: float) -> None:
        """Set the reward of an answer. If the answer has not arrived yet, a bounded buffer holds the reward for it."""
        prompt = self._prompts.get(prompt_key)
        answer = None if prompt is None else prompt.answers.get(answer_id)
        if answer is not None:
            answer.reward = reward
            return
        self._waiting_rewards[(prompt_key, answer_id)] = reward
        if len(self._waiting_rewards) > MAX_WAITING_REWARDS:
            self._waiting_rewards.popitem(last=False)

    def changes(self, prompt_key: int, since_version: int) -> AnswerBatch | None:
        """Return the prompt's answers that were added or changed after `since_version`; None if there are none."""
        prompt = self._prompts.get(prompt_key)
        if since_version > self._clock:  # from a shard that this one replaced, although its clock was ahead
            since_version = -1
        if prompt is None or prompt.version <= since_version:
            return None
        newer = [answer for answer in prompt.answers.values() if answer.version > since_version]
        newer.sort(key=lambda answer: answer.rollout)
        first, room = len(newer), self._max_prompt_tokens
        while first and (room := room - min(newer[first - 1].num_tokens, self._max_prompt_tokens)) >= 0:
            first -= 1
        return AnswerBatch.of(prompt_key, prompt.version, newer[first:]) if newer else None

    def answers(self) -> Iterator[tuple[int, Answer]]:
        """Iterate over all answers with their prompt keys, in order of arrival of the prompts, then of the answers."""
        return ((key, answer) for key, prompt in self._prompts.items() for answer in prompt.answers.values())

    def counters(self) -> StoreCounters:
        num_bytes = self._num_bytes()
        return StoreCounters(len(self._prompts), self._num_answers, self._num_tokens, num_bytes, self._evicted_tokens)

    def check_integrity(self) -> None:
        """Assert that the tables are consistent."""
        answers = list(self.answers())
        assert self._num_answers == len(answers)
        assert self._num_tokens == sum(answer.num_tokens for _, answer in answers)
        counts = {key: count for count, keys in self._prompts_by_count.items() for key in keys}
        assert counts == {key: len(prompt.answers) for key, prompt in self._prompts.items()}
        assert all(self._prompts_by_count.values())
        assert self._largest_count >= max(counts.values(), default=0)
        assert all(prompt.answers for prompt in self._prompts.values())
        assert self._num_bytes() <= self._budget_bytes

    def _num_bytes(self) -> int:
        overhead = self._num_answers * ANSWER_OVERHEAD_BYTES + len(self._prompts) * PROMPT_OVERHEAD_BYTES
        return 4 * self._num_tokens + overhead

    def _count(self, prompt_key: int, before: int) -> None:
        """Enter a prompt, which had `before` answers, under the number that it has now."""
        if before:
            keys = self._prompts_by_count[before]
            del keys[prompt_key]
            if not keys:
                del self._prompts_by_count[before]
        now = len(self._prompts[prompt_key].answers)
        if now:
            self._prompts_by_count.setdefault(now, OrderedDict())[prompt_key] = None
            self._largest_count = max(self._largest_count, now)
        else:
            del self._prompts[prompt_key]

    def _keep_window(self, prompt: _Prompt) -> None:
        oldest = list(prompt.rollouts.values())[-self._window_epochs :][0]
        for answer in [one for one in prompt.answers.values() if one.rollout < oldest]:
            self._drop(prompt, answer)
        while len(prompt.rollouts) > self._window_epochs + PAST_ROLLOUTS:
            del prompt.rollouts[next(iter(prompt.rollouts))]

    def _keep_budget(self) -> None:
        while self._num_bytes() > self._budget_bytes and self._num_answers:
            while self._largest_count not in self._prompts_by_count:
                self._largest_count -= 1
            keys = self._prompts_by_count[self._largest_count]
            if self._largest_count > 1 or self._is_admitted(next(reversed(keys))):
                key = next(iter(keys))
            else:
                key = next(reversed(keys))
            prompt = self._prompts[key]
            oldest = min(prompt.answers.values(), key=lambda answer: answer.rollout)
            self._evicted_tokens += oldest.num_tokens
            self._drop(prompt, oldest)
            self._count(key, len(prompt.answers) + 1)

    def _is_admitted(self, key: int) -> bool:
        """Return whether a prompt with one answer takes an older prompt's place: one rollout in ADMITTED does."""
        (answer,) = self._prompts[key].answers.values()
        return hash((key, answer.rollout_id)) % ADMITTED == 0

    def _drop(self, prompt: _Prompt, answer: Answer) -> None:
        del prompt.answers[answer.answer_id]
        self._num_answers -= 1
        self._num_tokens -= answer.num_tokens
