"""Upper bounds for drafters: drafters that know the recorded answer.

`Oracle` is the best drafter that copies earlier text. At each position it proposes the longest run of the answer's own
future, up to the draft length, that occurs anywhere in the text it may copy from. With `live=False` that text is all
earlier answers to the prompt, however old. With `live=True` it is also the prompt, the request's own tokens so far and
those of its siblings in the step.

`GreedyDrafter` is a draft model that agrees with the sampling policy everywhere: it always drafts the policy's most
probable tokens. Its accepted tokens, the greedy ceiling, follow from the trace's greedy bits: a run of most probable
tokens in the answer is accepted up to the draft length.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from benchmarks.drafting.replay import Answer, Batch, Request, TraceStep

REJECTED = -1  # a token id that no answer contains
_NEVER = 0  # id of a run that does not exist, for lookups
_IGNORED = 1  # the same, for marking


class Oracle:
    """Clairvoyant drafter for a whole trace, which must be replayed in order."""

    def __init__(self, steps: Sequence[TraceStep], max_draft_tokens: int, live: bool) -> None:
        self._max_draft_tokens = max_draft_tokens
        self._live = live
        self._step_of = {id(answer): step for step in steps for answer in step.answers}
        self._history: dict[int, list[np.ndarray]] = {}
        self._groups: dict[int, _Group] = {}
        self._known: dict[str, int] = {}  # number of marked answer tokens, by request

    def propose(self, batch: Batch, sampled: list[list[int]], now: float) -> list[list[int]]:
        for request in batch.requests if self._live else ():
            known = self._known.get(request.request_id, 0)
            self._group_of(request.answer).mark(request.answer, known, request.position)
            self._known[request.request_id] = request.position
        drafts = []
        for request in batch.requests:
            length = 0
            if not request.is_finished:
                length = self._group_of(request.answer).longest_copy(request.answer, request.position)
            drafts.append(request.tokens[request.position : request.position + length])
        return drafts

    def finish_step(self, step: TraceStep) -> None:
        self._groups.clear()
        self._known.clear()
        for answer in step.answers:
            self._history.setdefault(answer.prompt_key, []).append(answer.tokens)

    def _group_of(self, answer: Answer) -> _Group:
        if answer.prompt_key not in self._groups:
            siblings = [a for a in self._step_of[id(answer)].answers if a.prompt_key == answer.prompt_key]
            history = list(self._history.get(answer.prompt_key, []))
            if self._live:
                history.append(answer.prompt)
            self._groups[answer.prompt_key] = _Group(history, siblings, self._max_draft_tokens)
        return self._groups[answer.prompt_key]


class GreedyDrafter:
    """Drafts the sampling policy's most probable tokens, always up to the full draft length.

    Where the answer is not the most probable token, and after it, a placeholder is drafted, which is rejected as well.
    """

    def __init__(self, max_draft_tokens: int) -> None:
        self._max_draft_tokens = max_draft_tokens

    def propose(self, batch: Batch, sampled: list[list[int]], now: float) -> list[list[int]]:
        return [[] if request.is_finished else self._draft(request) for request in batch.requests]

    def finish_step(self, step: TraceStep) -> None:
        """Do nothing: there is no history."""

    def _draft(self, request: Request) -> list[int]:
        assert request.answer.greedy is not None, "the trace has no greedy bits"
        start, longest = request.position, self._max_draft_tokens
        ahead = request.answer.greedy[start : start + longest]
        length = len(ahead) if ahead.all() else int(ahead.argmin())
        return request.tokens[start : start + length] + [REJECTED] * (longest - length)


def greedy_ceiling(steps: Iterable[TraceStep], max_draft_tokens: int = 24) -> float | None:
    """Return a GreedyDrafter's accepted tokens per verification without a replay, or None without greedy bits."""
    accepted = verifies = 0
    for step in steps:
        for answer in step.answers:
            if answer.greedy is None:
                return None
            count = len(answer.greedy)
            others = np.append(np.flatnonzero(~answer.greedy), count)  # ends of the runs of greedy tokens
            places = np.arange(count)
            runs = np.minimum(others[np.searchsorted(others, places)] - places, max_draft_tokens).tolist()
            position = 1  # the prefill yields the first token
            while position < count:
                accepted += runs[position]
                verifies += 1
                position += runs[position] + 1
    return accepted / verifies if verifies else 0.0


class _Group:
    """The runs of 1 to `longest` tokens in a prompt's answers of one step, and which of them may be copied so far.

    Equal runs have the same id, which comes from ranking all runs of the history and of the step's answers together.
    """

    def __init__(self, history: list[np.ndarray], answers: list[Answer], longest: int) -> None:
        texts = [*history, *(answer.tokens for answer in answers)]
        text = np.concatenate([np.append(t, np.int32(-1)) for t in texts]).astype(np.int64)
        history_end = sum(len(t) + 1 for t in history)
        length = len(text)
        starting = np.full((length, longest), _NEVER, dtype=np.int32)
        ending = np.full((length + 1, longest), _IGNORED, dtype=np.int32)
        ids = np.zeros(length, dtype=np.int64)
        inside = np.ones(length, dtype=bool)  # the run that starts here lies within one text
        next_id = 2
        for run in range(1, longest + 1):
            last = np.arange(length) + run - 1
            inside &= (last < length) & (text[np.minimum(last, length - 1)] >= 0)
            starts = np.flatnonzero(inside)
            if len(starts) == 0:
                break
            pairs = (ids[starts] << 32) | text[starts + run - 1]
            distinct, inverse = np.unique(pairs, return_inverse=True)
            ids[starts] = inverse
            starting[starts, run - 1] = ending[starts + run, run - 1] = inverse + next_id
            next_id += len(distinct)
        self._may_copy = np.zeros(next_id, dtype=bool)
        self._may_copy[ending[: history_end + 1]] = True
        self._starting, self._ending = starting, ending
        self._begins = {}
        begin = history_end
        for answer in answers:
            self._begins[id(answer)] = begin
            begin += len(answer.tokens) + 1

    def mark(self, answer: Answer, known: int, position: int) -> None:
        """Allow copies of the runs that end in the answer's tokens [known, position)."""
        begin = self._begins[id(answer)]
        self._may_copy[self._ending[begin + known + 1 : begin + position + 1]] = True

    def longest_copy(self, answer: Answer, position: int) -> int:
        """Return how many tokens from `position` on can be copied."""
        can = self._may_copy[self._starting[self._begins[id(answer)] + position]]
        return len(can) if can.all() else int(can.argmin())
