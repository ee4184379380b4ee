"""The replay that benchmarks compare drafters with, on traces small enough to count by hand."""

import hashlib
import itertools

import numpy as np
import pyarrow as pa
import pytest
import typer
from rhyme_verl._core import prompt_key

from benchmarks.drafting import bench as drafter
from benchmarks.drafting.drafters import RhymeDrafter, WindowDrafter, group_by_prompt
from benchmarks.drafting.oracle import GreedyDrafter, Oracle, greedy_ceiling
from benchmarks.drafting.replay import Answer, Replay, TraceStep, load_trace, named_traces, replay
from benchmarks.drafting.reward_weights import RewardedDrafter
from benchmarks.drafting.synthetic import END_OF_TEXT, SyntheticTrace
from benchmarks.drafting.trace_facts import bars_of, facts_of, facts_of_trace, trace_lines
from rhyme_verl.telemetry.trace import read_trace, write_trace
from tests.helpers.traces import write_trajectories

PROMPT = np.array([90, 91], np.int32)


def answer(tokens, sample=0, greedy=None, reward=1.0):
    return Answer(
        prompt_key=prompt_key(PROMPT),
        sample=sample,
        prompt=PROMPT,
        tokens=np.array(tokens, np.int32),
        reward=reward,
        greedy=None if greedy is None else np.array(greedy, bool),
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
    asked = []

    def step_cost(rows, num_tokens, context, drafted, longest):
        asked.append((rows, num_tokens, context, drafted, longest))
        return 10.0 * rows + (num_tokens - rows)

    engine = Replay(script, concurrency=1, width=16, step_cost=step_cost)
    totals = engine.run_step(step(answer([1, 2, 3, 4])))
    assert totals.model_seconds == 10 + 12 + 10
    # The prompt's 2 tokens are context, not prefilled.
    assert asked == [(1, 1, 2.0, 0, 0), (1, 3, 3.0, 2, 2), (1, 1, 5.0, 0, 0)]
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


def test_greedy_drafter_gets_runs_of_most_probable_tokens_accepted():
    bits = [0, 1, 1, 0, 1, 1, 1, 1, 0, 1]
    steps = [step(answer(range(1, 11), greedy=bits))]
    # By place in the answer, the first with the admission: 0 | 1 2 + 3 | 4 5 6 + 7 | + 8 | 9, which ends it.
    short = replay(steps, GreedyDrafter(3), concurrency=1)[1]
    assert (short.verifies, short.drafted, short.accepted) == (4, 4 * 3, 2 + 3 + 0 + 1)
    assert greedy_ceiling(steps, 3) == 6 / 4
    # 0 | 1 2 + 3 | 4 5 6 7 + 8 | 9
    full = replay(steps, GreedyDrafter(24), concurrency=1)[1]
    assert (full.verifies, full.drafted, full.accepted) == (3, 3 * 24, 2 + 4 + 1)
    assert greedy_ceiling(steps) == 7 / 3


def test_greedy_ceiling_is_what_the_replayed_drafter_gets():
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 200, size=20).tolist()
    answers = [answer(range(n), sample, rng.random(n) < 0.9) for sample, n in enumerate(lengths)]
    steps = [step(*answers[:12], number=1), step(*answers[12:], number=2)]
    for longest in (1, 5, 24):
        first, second = replay(steps, GreedyDrafter(longest), concurrency=4).values()
        assert greedy_ceiling(steps, longest) == (first + second).summary()["accepted_per_verify"]
    assert greedy_ceiling([*steps, step(answer([1, 2]))]) is None


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


def test_a_recorded_trace_becomes_steps(tmp_path):
    rows = []
    for number, sample, tokens, validate in ((2, 1, [5], 0), (1, 0, [1, 2], 0), (2, 0, [3], 0), (2, 2, [4], 1)):
        row = {"step": number, "epoch": number, "sample": sample, "tokens": tokens, "validate": bool(validate)}
        rows.append({**row, "prompt_key": 7, "prompt": [90], "reward": None})
    write_trajectories(tmp_path / "part.parquet", rows)
    steps = load_trace(tmp_path)
    assert [(s.step, s.epoch, [a.tokens.tolist() for a in s.answers]) for s in steps] == [
        (1, 1, [[1, 2]]),
        (2, 2, [[3], [5]]),
    ]
    assert np.isnan(steps[0].answers[0].reward)
    assert list(group_by_prompt(steps[1])) == [7]
    assert steps[0].answers[0].greedy is None
    assert [s.step for s in load_trace(tmp_path, max_epoch=1)] == [1]
    with pytest.raises(ValueError, match=f"{tmp_path}: no rollouts for training up to epoch -1$"):
        load_trace(tmp_path, max_epoch=-1)


def recorded(path, rows):
    """Write a trace of (epoch, prompt_key, sample, tokens, reward, greedy) and return where."""
    trajectories = []
    for epoch, key, sample, tokens, reward, _ in rows:
        one = {"step": epoch, "epoch": epoch, "prompt_key": key, "sample": sample, "validate": False}
        trajectories.append({**one, "prompt": [90], "tokens": tokens, "reward": reward})
    write_trajectories(path, trajectories)
    table = read_trace(path)
    bits = [None if bits is None else list(map(bool, bits)) for *_, bits in sorted(rows, key=lambda row: row[:3])]
    greedy = pa.array(bits, table.schema.field("greedy").type)
    write_trace(path, table.set_column(table.schema.get_field_index("greedy"), "greedy", greedy))
    return path


def test_facts_of_a_trace_are_of_the_whole_and_by_epoch(tmp_path):
    rows = [
        (1, 7, 0, [1, 2], 0.0, [0, 1]),
        (1, 7, 1, [1, 2], 1.0, [0, 1]),
        (1, 8, 0, [3, 4, 5, 6], 0.0, [0, 0, 0, 0]),
        (1, 8, 1, [3], None, [1]),
        (2, 7, 0, [1, 2, 3], 1.0, [1, 1, 1]),
    ]
    path = recorded(tmp_path / "small.parquet", rows)
    assert [one.greedy.tolist() for one in load_trace(path)[0].answers][0] == [False, True]
    facts = facts_of_trace(path)
    first, second = facts["by_epoch"]["1"], facts["by_epoch"]["2"]
    assert facts["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert (facts["answers"], facts["tokens"], facts["length_p50"], facts["length_max"]) == (5, 12, 2.0, 4)
    assert (first["reward"], second["reward"], facts["reward"]) == (pytest.approx(1 / 3), 1.0, 0.5)
    assert (first["distinct_siblings"], second["distinct_siblings"]) == ((1 / 2 + 2 / 2) / 2, 1.0)
    assert facts["distinct_siblings"] == pytest.approx((1 / 2 + 1 + 1) / 3)
    # Verified: twice a token that is accepted, three times one that is not; then two in one go.
    assert (first["greedy_ceiling"], second["greedy_ceiling"], facts["greedy_ceiling"]) == (2 / 5, 2.0, 4 / 6)
    (line,) = trace_lines({"small": facts})[2:]
    assert line == "| `small` | 2 | 5 | 12 | 2 | 4 | 4 | 2.0 | 0.500 | 83.3% | 0.67 |"


def test_traces_are_held_against_their_bars():
    def facts(greedy=None, **changed):
        steps = [step(answer([1, 2], greedy=greedy, reward=number / 10), number=number) for number in (1, 2)]
        by_epoch = {str(one.epoch): facts_of([one]) for one in steps}
        return facts_of(steps) | {"by_epoch": by_epoch} | changed

    held = bars_of({"longtail": facts(p99_by_p50=8.5), "gsm8k": facts([0, 1]), "gsm8k-noisy": facts(greedy_ceiling=2)})
    assert {name: (pytest.approx(one["measured"]), one["holds"]) for name, one in held.items()} == {
        "longtail: p99 / median length": (8.5, True),
        "longtail: mean reward, last epoch - first": (0.1, True),
        "gsm8k: greedy ceiling": (1.0, False),
        "gsm8k: distinct siblings, least epoch": (1.0, True),
        "gsm8k-noisy: greedy ceiling": (2.0, True),
    }
    assert bars_of({"quickstart": facts()}) == {}
    with pytest.raises(ValueError, match="gsm8k: its greedy_ceiling cannot be checked"):
        bars_of({"gsm8k": facts()})


def test_traces_have_names_of_their_own(tmp_path):
    assert "quickstart" in named_traces([])
    assert named_traces([tmp_path / "one.parquet", tmp_path / "two"]) == {
        "one": tmp_path / "one.parquet",
        "two": tmp_path / "two",
    }
    with pytest.raises(ValueError, match="b/one.parquet: named like .*a/one.parquet"):
        named_traces([tmp_path / "a/one.parquet", tmp_path / "b/one.parquet"])


@pytest.fixture
def no_peers(monkeypatch):
    """The drafter benchmark where its peers are not installed: rhyme of a higher floor in their place."""

    def stand_in(max_draft_tokens, width, *_, **__):
        return RhymeDrafter(max_draft_tokens, width, policy="fixed", min_acceptance=0.5)

    monkeypatch.setattr(drafter, "ArcticDrafter", stand_in)
    monkeypatch.setattr(drafter, "NgramDrafter", stand_in)


def test_everything_is_replayed_at_one_concurrency_and_the_essential_at_others(no_peers):
    bits = [0, 1, 1, 1, 1, 1]
    steps = [step(answer([1, 2, 3, 4, 5, n], greedy=bits), number=n) for n in (1, 2, 3)]
    bench = drafter.DrafterBench(24, lambda rows, num_tokens, *_: 0.01 + 0.001 * num_tokens, repeats=2)
    rows = bench.compare("made up", steps, (1, 4, 16), preload_epochs=0)
    assert {name for name in rows if "1" in rows[name]} == {*drafter.ESSENTIAL, drafter.ARCTIC_TUNED}
    # An answer without siblings has nothing to draft from but what is remembered.
    accepted = {name: row["16"]["accepted_per_verify"] for name, row in rows.items()}
    assert accepted["rhyme fixed, siblings only"] == 0.0 < accepted["rhyme fixed, no history"]
    assert drafter.KNOWN_COST in rows
    # The epochs that count: all five tokens after the first are the policy's most probable, four can be copied.
    assert rows["greedy"]["16"]["share_of_ceiling"] == 1.0
    assert rows["rhyme fixed"]["16"]["share_of_oracle"] == rows["rhyme fixed"]["16"]["accepted_per_verify"] / 4
    assert rows["oracle live"]["16"]["share_of_ceiling"] == 4 / 5
    assert rows["rhyme"]["1"]["share_of_oracle"] is None
    # What the bars compare is replayed again: rhyme and tuned Arctic.
    repeats = {name: len(row["4"]["modelled_tokens_per_s_runs"]) for name, row in rows.items() if "4" in row}
    assert (repeats["none"], repeats["arctic-24"], repeats["rhyme"], repeats[drafter.ARCTIC_TUNED]) == (1, 1, 2, 2)
    # Two answers of six steps each, without prefill and drafts.
    assert rows["none"]["16"]["modelled_tokens_per_s"] == pytest.approx(1 / 0.011)
    assert rows["none"]["16"]["accepted_per_verify"] == 0.0


def test_the_peer_is_tuned_one_setting_after_the_other(monkeypatch):
    def play(self, steps, make, concurrency, preload_epochs):
        settings = make(steps, 100)  # as the drafter's stand-in returns them
        worth = {4: 3.0, 8: 2.0}.get(settings["num_speculative_tokens"], 1.0) + settings["max_tree_depth"] / 64
        return {"modelled_tokens_per_s": worth + (settings["min_token_prob"] == 0.3)}

    monkeypatch.setattr(drafter.DrafterBench, "play", play)
    monkeypatch.setattr(drafter, "ArcticDrafter", lambda max_draft_tokens, width, **settings: settings)
    bench = drafter.DrafterBench(24, lambda rows, num_tokens, *_: 0.01, repeats=1)
    assert bench.tune([], 4, {"max_tree_depth": 64, "num_speculative_tokens": 16}) == {
        "num_speculative_tokens": 4, "max_spec_factor": 1.0, "min_token_prob": 0.3, "max_tree_depth": 64
    }  # fmt: skip


def test_an_interrupted_benchmark_goes_on_at_the_same_clean_commit(tmp_path):
    for name, times in (("abc", [1, 1]), ("abc-dirty", [1, 2])):
        counts = itertools.count(1)
        for expected in times:
            parts = drafter.Parts(tmp_path / name)
            assert parts.once("part", lambda counts=counts: {"number": next(counts)}) == {"number": expected}
    by_rows = [{"a": {"1": {}}, "b": {"1": {}}}, {"a": {"4": {}}}]
    assert drafter.joined_rows(by_rows) == {"a": {"1": {}, "4": {}}, "b": {"1": {}}}


def test_steps_of_an_epoch_are_joined_until_they_fill_the_rows():
    steps = [TraceStep(step=n, epoch=1 + n // 5, answers=[answer([1, n])]) for n in range(10)]
    joined = drafter.joined_steps(steps, 2)
    assert [len(one.answers) for one in joined] == [2, 2, 1, 2, 2, 1]
    assert [one.epoch for one in joined] == [1, 1, 1, 2, 2, 2]
    assert drafter.joined_steps(steps, 1) == steps


def test_without_greedy_bits_there_is_no_ceiling(no_peers):
    steps = [step(answer([1, 2, 3, 4, 5, n]), number=n) for n in (1, 2)]
    bench = drafter.DrafterBench(24, lambda rows, num_tokens, *_: 0.01, repeats=1)
    rows = bench.compare("made up", steps, (16,), preload_epochs=0)
    assert "greedy" not in rows
    assert rows["rhyme"]["16"]["share_of_ceiling"] is None


def test_bars_of_every_trace_have_its_name():
    def rows(ours, peers):
        matched = {"accepted_per_verify": ours, "ratio_to_peer": ours / peers, "drafted": 5, "budget": 5}
        result = {
            name: {at: {"modelled_tokens_per_s": speed} for at in ("4", "16")}
            for name, speed in (("rhyme", ours), ("arctic-24", peers), ("arctic-64", peers / 2), ("none", 1.0))
        }
        sure = [{"tokens": 400, "predicted": 0.5, "observed": 0.5 + ours / 50}]
        return result | {drafter.BEST_BUDGET: {"16": matched}, "rhyme fixed": {"16": {"calibration": sure}}}

    speed = {
        "draft_us": {"rhyme": {256: {"median": 3.0}}, "arctic-24": {256: {"median": 2.0}}},
        "ingest_tokens_per_s": {"rhyme": {"median": 6e6}},
        "memory": {"rhyme": {"rss_bytes_per_token": 12.0, "own_bytes_per_token": 13.0}},
    }
    synthetic = {"3%": rows(2.0, 1.0), "10%": rows(1.0, 1.0)}
    traces = {"one": rows(5.0, 2.0), "longtail": rows(0.9, 1.0)}
    bars = drafter.all_bars(traces, synthetic, speed, {})
    assert {name: one["holds"] for name, one in bars.items() if name.startswith(("one", "longtail"))} == {
        "one: accepted per verify / Arctic's best, no more drafted": True,
        "one: calibration, worst bin beyond its tolerance": False,
        "one: modelled tokens/s / Arctic's best at 4": True,
        "one: modelled tokens/s / Arctic's best at 16": True,
        "one: modelled tokens/s / undrafted at 4": True,
        "one: modelled tokens/s / undrafted at 16": True,
        "longtail: accepted per verify / Arctic's best, no more drafted": False,
        "longtail: calibration, worst bin beyond its tolerance": True,
        "longtail: modelled tokens/s / Arctic's best at 4": False,
        "longtail: modelled tokens/s / Arctic's best at 16": False,
        "longtail: modelled tokens/s / undrafted at 4": False,
        "longtail: modelled tokens/s / undrafted at 16": False,
    }
    assert bars["us per request and step / Arctic's at batch 256"]["measured"] == 1.5
    assert len(bars) == 12 + 2 + 3


def test_a_window_grows_with_whole_drafts_and_shrinks_with_early_rejections():
    first, second = list(range(10, 80)), [*range(10, 35), 99, 98, 97, 96, *range(39, 80)]
    steps = [step(answer(text), number=n) for n, text in enumerate((first, second), 1)]
    drafter = WindowDrafter(24, 256, policy="fixed", min_acceptance=0.0, switches=("siblings", "common"))
    lengths = []

    class Watched:
        def propose(self, batch, sampled, now):
            drafts = drafter.propose(batch, sampled, now)
            lengths.append(len(drafts[0]))
            return drafts

        def finish_step(self, step):
            drafter.finish_step(step)
            if step.epoch == 1:
                lengths.clear()

    replay(steps, Watched(), concurrency=1)
    assert lengths[:3] == [8, 10, 12]
    assert lengths[3] <= 6, "less than half of 12 tokens were accepted"


def test_rewarded_answers_weigh_twice():
    good, bad = list(range(10, 30)), [*range(10, 15), *range(40, 55)]
    answers = [answer(good, 0), answer(bad, 1, reward=0.0), answer(bad, 2, reward=0.0)]
    steps = [step(*answers), step(answer(good), number=2)]
    drafted = {}
    for kind in (RhymeDrafter, RewardedDrafter):
        drafter = kind(8, 256, policy="fixed", min_acceptance=0.0, switches=("siblings", "common"))

        class Watched:
            def propose(self, batch, sampled, now, drafter=drafter, kind=kind):
                drafts = drafter.propose(batch, sampled, now)
                if batch.requests[0].request_id.startswith("2-"):
                    drafted.setdefault(kind, list(drafts[0]))
                return drafts

            def finish_step(self, step, drafter=drafter):
                drafter.finish_step(step)

        replay(steps, Watched(), concurrency=5)
        first = drafted[kind]
        assert first[:4] == [11, 12, 13, 14]
        assert first[4] == (40 if kind is RhymeDrafter else 15)


def test_a_trace_that_cannot_be_compared_is_refused_before_anything_is_replayed(tmp_path):
    path = recorded(tmp_path / "short.parquet", [(1, 7, 0, [1, 2], 0.0, None)])
    for trace, complaint in ((path, "one epoch only"), (tmp_path / "nowhere", "no trace here")):
        with pytest.raises(typer.BadParameter, match=f"{trace}: {complaint}"):
            drafter.main(trace=[trace], result=tmp_path / "never.json")
