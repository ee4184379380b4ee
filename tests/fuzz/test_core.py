"""The compiled core under any sequence of answers, requests, engine steps and wrong calls: its bounds always hold."""

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis import target
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rhyme_verl.config import RhymeConfig, SpecConfig
from rhyme_verl.histospec.from_config import make_drafter
from tests.fuzz.fuzzing import fuzzed
from tests.helpers.core import new_index, remember, tokens

VOCABULARY = 40
LARGEST = 2**31 - 1
FOREIGN = (VOCABULARY, 2**24 - 1, 2**24, LARGEST)  # ids that texts may have and drafts may not
PROMPTS = ([], [1], [1, 2, 3], [LARGEST] * 9, list(range(30)))
TRUTHS = np.random.default_rng(0).integers(0, VOCABULARY, (len(PROMPTS), 300)).tolist()  # what answers resemble
MAX_OPEN = 10
CROWD = 520  # a group of siblings holds 511 texts

prompts = st.sampled_from(range(len(PROMPTS)))
any_token = st.sampled_from((0, VOCABULARY - 1, *FOREIGN))
edits = st.dictionaries(st.integers(0, 299), any_token, max_size=3)
steps = st.integers(0, 4) | st.sampled_from((-(2**63), 2**63 - 1))
ids = st.integers(0, 5) | st.just(2**64 - 1)
off = st.sets(st.sampled_from(("siblings", "common", "rejoin")))

ROW = np.zeros((1, 4), np.int32)
TWO = np.zeros(2, np.int64), np.zeros(2, np.uint64)
REFUSED = (  # wrong calls, given the slot and the context of an open request, or those of none
    lambda index, one, slot, past: one.open(tokens([1, -1])),
    lambda index, one, slot, past: one.close(-1),
    lambda index, one, slot, past: one.close(LARGEST),
    lambda index, one, slot, past: one.draft(tokens([[*past, -1]]), tokens([len(past) + 1]), tokens([slot]), 9, 0),
    lambda index, one, slot, past: one.draft(np.tile(ROW, (2, 1)), tokens([0, 0]), tokens([slot, slot]), 9, 0),
    lambda index, one, slot, past: one.draft(ROW, tokens([5]), tokens([-1]), 9, 0),
    lambda index, one, slot, past: one.draft(ROW, tokens([-1]), tokens([-1]), 9, 0),
    lambda index, one, slot, past: one.draft(ROW, tokens([4, 4]), tokens([-1, -1]), 9, 0),
    lambda index, one, slot, past: one.draft(ROW[0], tokens([4]), tokens([-1]), 9, 0),
    lambda index, one, slot, past: one.set_context(slot, tokens([*past, -1]), tokens([])),
    lambda index, one, slot, past: one.set_context(-1, tokens([1]), tokens([])),
    lambda index, one, slot, past: one.consider(tokens([slot]), ROW[0], tokens([1]), 0.0, 9, 0),
    lambda index, one, slot, past: one.consider(tokens([slot]), ROW, tokens([]), 0.0, 9, 0),
    lambda index, one, slot, past: one.consider(tokens([LARGEST]), ROW, tokens([1]), 0.0, 9, 0),
    lambda index, one, slot, past: index.update(0, tokens([1, 2]), tokens([LARGEST, LARGEST]), *TWO),
    lambda index, one, slot, past: index.update(0, tokens([1, 2]), tokens([-1, 3]), *TWO),
    lambda index, one, slot, past: index.update(0, tokens([1, -1]), tokens([1, 1]), *TWO),
    lambda index, one, slot, past: index.update(0, tokens([1]), tokens([1]), *TWO),
)


@dataclass
class Request:
    """A running request; `most` bounds the length of its context, and `draft` is what is verified next."""

    prompt: int
    context: list
    most: int
    draft: list = field(default_factory=list)

    def advance(self, said):
        """Take in what the model says, up to the first draft token that differs; it says `said`, or else the truth."""
        for drafted in [*self.draft, None]:
            place = len(self.context) - len(PROMPTS[self.prompt])
            self.context.append(TRUTHS[self.prompt][place % 300] if said is None else said)
            if self.context[-1] != drafted:
                return


@fuzzed(80)
class Core(RuleBasedStateMachine):
    drafter = None

    @initialize(
        window_epochs=st.sampled_from((1, 3)),
        max_tokens=st.sampled_from((1, 64, 4096)),
        max_bytes=st.sampled_from((1, 20_000, 2**30)),
        policy=st.sampled_from(("fixed", "cost_aware")),
        max_draft=st.sampled_from((1, 4, 24, 127)),
        min_acceptance=st.sampled_from((0.0, 0.05, 0.5, 1.0)),
        num_threads=st.sampled_from((1, 3)),
        max_live_tokens=st.sampled_from((0, 50, 2**22)),
        off=off,
    )
    def start(
        self, window_epochs, max_tokens, max_bytes, policy, max_draft, min_acceptance, num_threads, max_live_tokens, off
    ):
        self.max_tokens, self.max_bytes, self.max_draft = max_tokens, max_bytes, max_draft
        self.index = new_index(window_epochs=window_epochs, max_tokens_per_prompt=max_tokens, max_bytes=max_bytes)
        spec = SpecConfig(
            policy=policy, max_draft_tokens=max_draft, min_acceptance=min_acceptance, num_threads=num_threads
        )
        self.drafter = make_drafter(
            self.index,
            RhymeConfig(spec=spec),
            vocab_size=VOCABULARY,
            max_live_tokens=max_live_tokens,
            **dict.fromkeys(off, False),
        )
        self.requests, self.now, self.was_crowded = {}, 0.0, False
        self.counted = self.counters()

    def counters(self):
        drafted, history = self.drafter.stats(), self.index.stats()
        return [
            history.num_evicted_tokens,
            drafted.num_steps,
            drafted.num_generated_tokens,
            drafted.num_drafts,
            drafted.num_draft_tokens,
            drafted.num_accepted_tokens,
            *drafted.draft_tokens_by_place,
            *drafted.accepted_tokens_by_place,
            *drafted.tokens_by_prediction,
            *drafted.accepted_by_prediction,
        ]

    @rule(prompt=prompts, answers=st.lists(st.tuples(st.integers(0, 300), edits, steps, ids), max_size=4))
    def ingest(self, prompt, answers):
        """File answers, and with a small `max_bytes` evict others."""
        texts = [
            [changed.get(place, token) for place, token in enumerate(TRUTHS[prompt][:length])]
            for length, changed, _, _ in answers
        ]
        versions, names = [step for _, _, step, _ in answers], [name for _, _, _, name in answers]
        remember(self.index, PROMPTS[prompt], texts, versions, names)

    @precondition(lambda self: len(self.requests) < MAX_OPEN)
    @rule(
        prompt=prompts,
        ahead=st.sampled_from((0, 3, 20)),
        max_new=st.sampled_from((0, 1, 5, LARGEST)),
        told=st.sampled_from((0, 1, LARGEST)) | st.none(),
    )
    def open(self, prompt, ahead, max_new, told):
        context = PROMPTS[prompt] + TRUTHS[prompt][:ahead]
        slot = self.drafter.open(tokens(context), max_new, len(PROMPTS[prompt]) if told is None else told)
        assert slot not in self.requests
        self.requests[slot] = Request(prompt, context, len(context) + max_new)

    @precondition(lambda self: self.requests)
    @rule(which=st.integers(0, MAX_OPEN - 1))
    def close(self, which):
        slot = list(self.requests)[which % len(self.requests)]
        self.drafter.close(slot)
        del self.requests[slot]

    @precondition(lambda self: self.requests)
    @rule(
        said=st.none() | any_token,
        skipped=st.none() | st.integers(0, MAX_OPEN - 1),
        lost=st.sampled_from((0, 0, 0, 3)),
        model_len=st.sampled_from((1, 40, 4096, LARGEST)),
        max_step=st.sampled_from((0, 1, 6, 20, 100, LARGEST)),
        max_sampled=st.sampled_from((0, 1, 6, 100, LARGEST)),
        seconds=st.sampled_from((0.0, 0.001, 0.01, 5.0, -1.0)),
    )
    def draft(self, said, skipped, lost, model_len, max_step, max_sampled, seconds):
        """An engine step; contexts may lose their last tokens, and a row may be left out."""
        self.now += seconds
        slots = [-1 if row == skipped else slot for row, slot in enumerate(self.requests)]
        requests = list(self.requests.values())
        for request, slot in zip(requests, slots, strict=True):
            if slot >= 0:
                request.advance(said)
                del request.context[max(0, len(request.context) - lost) :]
        lengths = [len(request.context) for request in requests]
        rows = np.zeros((len(requests), max(1, *lengths)), np.int32)
        for row, request in zip(rows, requests, strict=True):
            row[: len(request.context)] = request.context
        bounds = {"max_step_tokens": max_step, "max_sampled_rows": max_sampled}
        drafts = self.drafter.draft(rows, tokens(lengths), tokens(slots), model_len, self.now, **bounds)
        for request, slot, draft in zip(requests, slots, drafts, strict=True):
            request.draft = draft
            left = min(model_len, request.most) - len(request.context) - 1
            assert len(draft) <= (0 if slot < 0 else max(0, min(self.max_draft, left)))
            assert all(0 <= token < VOCABULARY for token in draft)
        longest = max(map(len, drafts))
        if longest:
            assert len(drafts) + sum(map(len, drafts)) <= max_step
            assert not max_sampled or len(drafts) * (1 + longest) <= max_sampled

    @precondition(lambda self: self.requests)
    @rule(
        said=st.none() | any_token,
        leaves=st.none() | st.integers(0, MAX_OPEN - 1),
        way=st.sampled_from(("draft", "draft and learn", "consider")),
        max_step=st.sampled_from((0, 6, 20, LARGEST)),
        max_sampled=st.sampled_from((0, 6, 100)),
        room=st.sampled_from((0, 2, 200)),
        joining=st.sampled_from((0, 1, 5, 1000)),
        seconds=st.sampled_from((0.0, 0.01, 5.0)),
    )
    def draft_with_kept_contexts(self, said, leaves, way, max_step, max_sampled, room, joining, seconds):
        """An engine step of the asynchronous kind."""
        self.now += seconds
        requests, slots = list(self.requests.values()), tokens(list(self.requests))
        sampled = np.full((len(requests), 1 + self.max_draft), -1, np.int32)
        before = [len(request.context) for request in requests]
        for row, (slot, request) in enumerate(self.requests.items()):
            self.drafter.set_context(slot, tokens(request.context), tokens([3]))
            request.advance(said)
            new = request.context[before[row] :]
            sampled[row, : len(new)] = new
        rooms = tokens([-1 if row == leaves else room for row in range(len(requests))])
        num_rows = int((rooms >= 0).sum()) + joining
        bounds = {"max_step_tokens": max_step, "max_sampled_rows": max_sampled, "num_rows": num_rows}
        drafts, lengths = np.full((len(requests), self.max_draft), -1, np.int32), np.zeros(len(requests), np.int32)
        if way == "consider":
            self.drafter.consider(slots, sampled, rooms, self.now, **bounds)
        else:
            expected = tokens(before)
            self.drafter.draft_first(slots, sampled, rooms, expected, drafts, lengths, self.now, **bounds)
        if way == "draft and learn":
            self.drafter.learn(slots)
        for row, request in enumerate(requests):
            request.draft = drafts[row, : lengths[row]].tolist()
            assert len(request.draft) <= max(0, min(rooms[row], request.most - len(request.context) - 1))
            assert all(0 <= token < VOCABULARY for token in request.draft)
            assert not request.draft or 3 not in request.context[before[row] :], "it has ended"
        if lengths.any():
            assert num_rows + lengths.sum() <= max_step
            assert not max_sampled or num_rows * (1 + lengths.max()) <= max_sampled

    @precondition(lambda self: not self.was_crowded)
    @rule(prompt=prompts)
    def crowd(self, prompt):
        """More siblings than a group holds, in a batch that several threads share."""
        self.was_crowded = True
        first = len(PROMPTS[prompt])
        context = tokens([PROMPTS[prompt] + TRUTHS[prompt][:10]])
        slots = tokens([self.drafter.open(context[0, :first]) for _ in range(CROWD)])
        for length in range(first + 1, first + 10, 4):
            lengths = np.full(CROWD, length, np.int32)
            drafts = self.drafter.draft(np.repeat(context, CROWD, axis=0), lengths, slots, LARGEST, self.now)
            assert max(map(len, drafts)) <= self.max_draft
        for slot in slots.tolist():
            self.drafter.close(slot)

    @rule(call=st.sampled_from(REFUSED))
    def refuse(self, call):
        """A wrong call raises and changes nothing."""
        slot, request = next(iter(self.requests.items()), (LARGEST, Request(0, [], 0)))
        before = self.counters()
        with pytest.raises(ValueError):
            call(self.index, self.drafter, slot, request.context)
        assert self.counters() == before

    @invariant()
    def all_bounds_hold(self):
        stats, drafted = self.index.stats(), self.drafter.stats()
        assert stats.num_bytes <= self.max_bytes or stats.num_prompts == 1, "one prompt is never evicted"
        assert stats.num_tokens <= self.max_tokens * stats.num_prompts
        assert drafted.num_accepted_tokens <= drafted.num_draft_tokens
        counters = self.counters()
        assert all(before <= now for before, now in zip(self.counted, counters, strict=True))
        self.counted = counters
        assert self.index.check_integrity() == self.drafter.check_integrity() == ""

    def teardown(self):
        if self.drafter is None:
            return
        for slot in self.requests:
            self.drafter.close(slot)
        assert self.drafter.check_integrity() == ""
        target(float(self.drafter.stats().num_accepted_tokens), label="accepted tokens")
        target(float(self.index.stats().num_evicted_tokens), label="evicted tokens")
        self.drafter = None  # takes 20 MB, and the machine is part of a cycle


TestCore = Core.TestCase
