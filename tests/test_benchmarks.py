"""The replay that benchmarks compare drafters with, on traces small enough to count by hand."""

import numpy as np
import pytest
from rhyme_verl._core import prompt_key

from benchmarks.drafter_replay import Answer, Replay, TraceStep, load_trace, replay
from benchmarks.drafters import RhymeDrafter, group_by_prompt
from benchmarks.oracle import Oracle
from benchmarks.step_cost import StepCostCurve
from benchmarks.synthetic import END_OF_TEXT, SyntheticTrace
from rhyme_verl.trace import TraceWriter, Trajectory

PROMPT = np.array([90, 91], np.int32)


def answer(tokens, sample=0):
    return Answer(
        prompt_key=prompt_key(PROMPT),
        sample=sample,
        prompt=PROMPT,
        tokens=np.array(tokens, np.int32),
        reward=1.0,
    )


def rid(sample):
    return f"1-{prompt_key(PROMPT):x}-{sample}"


def step(*answers, number=1):
    return TraceStep(step=number, epoch=number, answers=list(answers))


class Script:
    """Drafts what it is told to by (request id, answer tokens so far), and notes every batch it was shown."""

    def __init__(self, drafts=()):
        self.drafts = dict(drafts)
        self.calls = []
        self.finished = []

    def propose(self, batch, sampled, now):
        rows = [
            batch.token_ids_cpu[row, : batch.num_tokens_no_spec[row]].tolist() for row in range(len(batch.requests))
        ]
        self.calls.append((list(batch.req_ids), rows, [list(tokens) for tokens in sampled], now))
        return [self.drafts.get((r.request_id, r.position), []) for r in batch.requests]

    def finish_step(self, step):
        self.finished.append(step.step)


def test_accepted_tokens_are_the_common_prefix_of_draft_and_answer():
    script = Script({(rid(0), 1): [2, 3, 9, 9], (rid(0), 4): [9], (rid(0), 5): [6, 7, 8, 8, 8]})
    totals = replay([step(answer([1, 2, 3, 4, 5, 6, 7, 8]))], script, concurrency=4)[1]
    # Token 1 comes with the admission; 2 3 are accepted, 4 is free; 5 is free; 6 7 8 are accepted and end the answer.
    assert [sampled for _, _, [sampled], _ in script.calls] == [[1], [2, 3, 4], [5], [6, 7, 8]]
    assert (totals.verifies, totals.drafts, totals.drafted, totals.accepted) == (3, 3, 10, 5)
    assert (totals.requests, totals.tokens, totals.engine_steps) == (1, 8, 4)
    summary = totals.summary()
    assert summary["accepted_per_verify"] == 5 / 3
    assert summary["tokens_per_step"] == 7 / 3
    assert summary["acceptance_rate"] == 0.5
    assert summary["proposed_per_accepted"] == 2.0
    assert script.finished == [1]


def test_concurrency_bounds_the_rows_and_finished_rows_go_to_waiting_requests():
    script = Script()
    texts = ([1, 2], [3, 4, 5, 6], [7, 8, 9], [10])
    answers = [answer(tokens, sample) for sample, tokens in enumerate(texts)]
    replay([step(*answers)], script, concurrency=2)
    ids = [[request_id[-1] for request_id in rows] for rows, _, _, _ in script.calls]
    assert ids == [["0", "1"], ["0", "1"], ["2", "1"], ["2", "1"], ["2", "3"]]
    # A row holds the prompt and exactly what its request has got, whoever had the row before.
    assert script.calls[2][1] == [[90, 91, 7], [90, 91, 3, 4, 5]]
    assert script.calls[4][1] == [[90, 91, 7, 8, 9], [90, 91, 10]]


def test_the_last_row_moves_into_a_gap_and_keeps_its_draft():
    script = Script({(rid(1), 2): [5, 6]})
    replay([step(answer([1, 2], sample=0), answer([3, 4, 5, 6, 7], sample=1))], script, concurrency=2)
    assert script.calls[2] == ([rid(1)], [[90, 91, 3, 4, 5, 6, 7]], [[5, 6, 7]], script.calls[2][3])
    assert len(script.calls) == 3


def test_modelled_time_is_what_the_clock_shows():
    script = Script({(rid(0), 1): [2, 9]})
    engine = Replay(script, concurrency=1, width=16, step_cost=lambda rows, drafted: 10.0 * rows + drafted)
    totals = engine.run_step(step(answer([1, 2, 3, 4])))
    assert totals.model_seconds == 10 + 12 + 10
    clock = [now for _, _, _, now in script.calls]
    assert [round(now) for now in clock] == [10, 22, 32]
    assert totals.summary()["modelled_tokens_per_s"] == pytest.approx(4 / 32, rel=1e-3)


def test_history_is_given_after_the_step():
    steps = [step(answer([1, 2, 3, 4, 5, 6, 0]), number=1), step(answer([1, 2, 3, 4, 5, 6, 0]), number=2)]
    drafter = RhymeDrafter(8, 64, policy="fixed", min_acceptance=0.0)
    by_epoch = replay(steps, drafter, concurrency=1)
    assert by_epoch[1].accepted == 0
    assert by_epoch[2].accepted == 6  # everything after the first token
    assert drafter.index.stats().num_answers == 2


def test_oracle_copies_the_longest_run_of_earlier_answers():
    first = [1, 2, 3, 4, 5, 6]
    second = [9, 3, 4, 5, 7, 1, 2, 8]
    steps = [step(answer(first), number=1), step(answer(second), number=2)]
    script = replay(steps, Oracle(steps, 16, live=False), concurrency=1)
    assert script[1].accepted == 0
    # 9 | 3 4 5 + 7 | 1 2 + 8
    assert (script[2].verifies, script[2].drafted, script[2].accepted) == (2, 5, 5)
    capped = replay(steps, Oracle(steps, 2, live=False), concurrency=1)
    # 9 | 3 4 + 5 | + 7 | 1 2 + 8
    assert (capped[2].verifies, capped[2].accepted) == (3, 4)


def test_live_oracle_also_copies_from_prompt_siblings_and_its_own_text():
    answers = [answer([1, 2, 3, 4, 5, 5], sample=0), answer([90, 91, 4, 1, 2, 3], sample=1)]
    both = [step(*answers)]
    assert replay(both, Oracle(both, 16, live=False), concurrency=2)[1].accepted == 0
    alone = replay(both, Oracle(both, 16, live=True), concurrency=1)[1]
    # The first: 1 | 2 | 3 | 4 | 5 | 5 copied from itself, which ends it. The second: 90 | 91 (prompt) + 4 | 1 2 3.
    assert (alone.verifies, alone.accepted) == (5 + 2, 1 + 4)
    together = replay(both, Oracle(both, 16, live=True), concurrency=2)[1]
    # Side by side: when the second is at 4, the first has written 1 2 only: 90 | 91 + 4 | 1 2 + 3. That ends it, and
    # the first is 1 | 2 | 3 | 4 + 5 | 5.
    assert (together.verifies, together.accepted) == (4 + 2, 2 + 3)


def test_oracle_is_never_worse_than_a_drafter():
    steps = SyntheticTrace(edit_rate=0.1, num_prompts=1, min_tokens=300, max_tokens=600, num_epochs=2).steps()
    drafted = replay(steps, RhymeDrafter(16, 2048, policy="fixed"), concurrency=8)[2]
    best = replay(steps, Oracle(steps, 16, live=True), concurrency=8)[2]
    assert 0 < drafted.accepted
    assert best.verifies < drafted.verifies


@pytest.mark.parametrize("rate", [0.01, 0.1])
def test_synthetic_answers_have_the_edit_rate(rate):
    first, second = SyntheticTrace(edit_rate=rate, num_prompts=1, num_epochs=2, max_tokens=4097).steps()
    earlier = [set(_runs(a.tokens)) for a in first.answers]
    for later in second.answers:
        assert later.tokens[-1] == END_OF_TEXT
        runs = _runs(later.tokens)
        kept = max(sum(run in known for run in runs) for known in earlier) / len(runs)
        # A run of 8 tokens survives if none of its tokens is edited and nothing is inserted within it.
        assert kept == pytest.approx((1 - rate) ** 8, abs=0.05)


def _runs(tokens):
    return [tuple(tokens[i : i + 8].tolist()) for i in range(len(tokens) - 8)]


def test_step_cost_is_interpolated_between_measured_points():
    def one(*values):
        return [{"median": value} for value in values]

    result = {"rows": [1, 4], "draft_tokens": [1, 3], "plain_ms": one(1, 2), "undrafted_ms": one(1, 3)}
    curve = StepCostCurve(result | {"drafted_ms": [one(2, 4), one(4, 8)]})
    points = ((1, 0), (2, 0), (1, 1), (1, 2), (1, 5), (4, 12), (4, 1))
    milliseconds = [1e3 * curve(rows, drafted) for rows, drafted in points]
    assert milliseconds == pytest.approx([1, 2, 2, 3, 6, 8, 3])  # the last: not below an undrafted step
    assert 1e3 * curve.plain(2) == pytest.approx(1.5)


def test_a_recorded_trace_becomes_steps(tmp_path):
    writer = TraceWriter(tmp_path, "test")
    for number, sample, tokens, validate in ((2, 1, [5], 0), (1, 0, [1, 2], 0), (2, 0, [3], 0), (2, 2, [4], 1)):
        row = {"step": number, "epoch": number, "sample": sample, "tokens": tokens, "validate": bool(validate)}
        writer.add(Trajectory(prompt_key=7, prompt=[90], reward=None, **row))
    writer.flush()
    steps = load_trace(tmp_path)
    assert [(s.step, s.epoch, [a.tokens.tolist() for a in s.answers]) for s in steps] == [
        (1, 1, [[1, 2]]),
        (2, 2, [[3], [5]]),
    ]
    assert np.isnan(steps[0].answers[0].reward)
    assert list(group_by_prompt(steps[1])) == [7]
    assert [s.step for s in load_trace(tmp_path, max_epoch=1)] == [1]
