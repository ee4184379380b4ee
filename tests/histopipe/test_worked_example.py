"""docs/worked-example.md and its figure show what the production code decides."""

import re
from pathlib import Path

import numpy as np

from rhyme_verl.histopipe.lanes import AHEAD
from rhyme_verl.histopipe.units import UnitShape
from rhyme_verl.history.store import ANSWER_OVERHEAD_BYTES, PROMPT_OVERHEAD_BYTES
from rhyme_verl.sim.systems import HistoPipe, VerlBalancer
from rhyme_verl.sim.trainer import Scenario, Simulation
from rhyme_verl.sim.workload import Workload, from_recorded

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "worked-example.md").read_text(encoding="utf-8")
FIGURE = (DOCS / "worked-example.svg").read_text(encoding="utf-8")
P1, Q1 = [620, 700, 760, 1320], [210, 240, 260, 290]  # lengths in step 1
P2, Q2 = [690, 1250, 820, 640], [220, 260, 250, 230]  # and in step 2
SECONDS_PER_TOKEN = 9.8e-3 / 4.2
LEFT, PIXELS_PER_SECOND = 118, 200  # of the figure


class Recorder(HistoPipe):
    """HistoPipe with a list of its grants: (second, answer, replica)."""

    def __init__(self, cluster, **options):
        self.grants = []
        super().__init__(cluster, **options)

    def grant(self, answer, replica):
        self.grants.append((self.cluster.now, int(answer[0]) * self.cluster.samples + answer[1], int(replica)))
        super().grant(answer, replica)


def play(workload, seconds_per_token, steps, mode, system=Recorder, **options):
    """Simulate two replicas of two lanes, without training time and prefill."""
    scenario = Scenario(
        workload=workload, speeds=np.ones(2), step_seconds=np.full(3, seconds_per_token), steps=steps,
        recompute_seconds_per_token=0.0,
    )  # fmt: skip
    cluster = Simulation(scenario, mode, warmup_batches=2)
    cluster.system = system(cluster, **options)
    cluster.run()
    return cluster.system, cluster


def remembered(first=("P", "Q")):
    """Return the page's answers, with predictions for steps 1 to 3."""
    lengths = {"P": (P1, P2), "Q": (Q1, Q2)}
    steps = [[lengths[name][step] for name in first] for step in (0, 1, 1)]
    return from_recorded(np.array([[ord(name) for name in first]] * 3, dtype=np.uint64), np.array(steps))


def second_step(run, names=("P", "Q")):
    """Return (replica, answer, start, end) of the second step, in seconds from its beginning."""
    first = 4 * len(names)
    answers = [f"{name}{sample}" for name in names for sample in range(4)]
    began = run.trained[0]
    found = [
        ("AB"[r], answers[a - first], start - began, end - began) for r, a, start, end in run.segments if a >= first
    ]
    return sorted(found, key=lambda run: run[3])


def test_the_predictions_of_the_page():
    workload = remembered()
    assert workload.mean[1].round().tolist() == [788, 308]
    for answers, tokens in ((4, 3_400), (8, 6_800)):
        held = 4 * tokens + ANSWER_OVERHEAD_BYTES * answers + PROMPT_OVERHEAD_BYTES
        assert f"{held:,}" in PAGE
    assert "(3,400 + 540) / 5 = 788 tokens" in PAGE and "(1,000 + 540) / 5 = 308" in PAGE
    assert f"about {workload.mean[2][0]:.0f} tokens for P in" in PAGE
    assert f"their rank correlation is {workload.rank_correlation:.2f}" in PAGE


def test_the_lanes_of_the_page():
    system, _ = play(remembered(), SECONDS_PER_TOKEN, 2, "sync")
    granted = [(f"{'PQ'[(answer - 8) // 4]}{answer % 4}", "AB"[replica]) for _, answer, replica in system.grants[8:]]
    assert granted == [(f"{name}{sample}", "AB"[sample % 2]) for name in "PQ" for sample in range(4)]
    assert "P0 to A, P1 to B, P2 to\n   A, P3 to B" in PAGE and "Q0 and Q2 to A, Q1 and Q3 to B" in PAGE
    holds, next_one = [2 * 788, 2 * 788 + 308, 2 * 788 + 2 * 308], 308
    assert [num * next_one < AHEAD * tokens for num, tokens in enumerate(holds)] == [True, True, False]
    assert f"{AHEAD:.0%}".replace("%", " %") in PAGE and f"{AHEAD:.0%}" == "20%"
    assert all(f"{tokens:,}" in PAGE for tokens in holds)


def test_the_timeline_of_the_page_and_of_the_figure():
    system, run = play(remembered(), SECONDS_PER_TOKEN, 2, "sync")
    runs = second_step(run)
    rows = []
    for replica, answer, _, end in runs:
        started = [other for where, other, start, _ in runs if where == replica and start == end]
        rows.append(f"| {end:.2f} s | {answer} ends on {replica}{f'; {started[0]} starts' if started else ''}")
    assert re.findall(r"^(\| \d\.\d\d s \| \w\d ends on [AB](?:; \w\d starts)?)", PAGE, re.M) == rows
    report = system.scheduler.take_reports()[1]
    assert f"{100 * report['bubble']:.0f} % of the lanes' time was free" in PAGE
    assert f"no answer for {100 * report['idle']:.0f} % of it" in PAGE
    bar = r'<rect class="[pq]" x="([\d.]+)" y="(\d+)" width="([\d.]+)" height="22"/>\n  <text[^>]*>(\w\d)'
    drawn = {(("AB"[int(y) > 140]), name, float(x), float(width)) for x, y, width, name in re.findall(bar, FIGURE)}
    assert drawn == {
        (replica, answer, round(LEFT + PIXELS_PER_SECOND * start, 1), round(PIXELS_PER_SECOND * (end - start), 1))
        for replica, answer, start, end in runs
    }


def test_the_page_says_what_verls_balancer_does_with_the_short_answers_first():
    _, run = play(remembered(("Q", "P")), SECONDS_PER_TOKEN, 2, "sync", system=VerlBalancer)
    ((start, end),) = [stay[2:] for stay in second_step(run, ("Q", "P")) if stay[1] == "P1"]
    assert f"P1 would have started at {start:.2f} s and ended at\n{end:.2f} s" in PAGE


def test_the_draft_step_of_the_page_runs_what_the_timeline_says():
    _, run = play(remembered(), SECONDS_PER_TOKEN, 2, "sync")
    running = {
        answer: (1.8 - start) / SECONDS_PER_TOKEN
        for where, answer, start, end in second_step(run)
        if where == "B" and start < 1.8 < end
    }
    assert {answer: round(tokens, -1) for answer, tokens in running.items()} == {"P1": 770, "Q1": 130}
    assert "At 1.8 s, B runs P1, which has 770 tokens, and Q1, which has 130." in PAGE


def test_the_units_of_the_page():
    lengths = [[110, 70], [40, 50], [20, 30], [60, 50], [90, 70], [999, 999], [999, 999]]
    predicted = [90, 45, 25, 55, 80, 1, 1]
    workload = Workload(
        lengths=np.array(lengths)[:, None], mean=np.array(predicted, float)[:, None], max_tokens=999.0,
        rank_correlation=1.0, rank_churn=0.0,
    )  # fmt: skip
    system, run = play(workload, 1.0, 4, "colocate_async", max_age=2, shape=UnitShape(batches=2, carried=1))
    names = [f"{group}{sample}" for group in "abcdefg" for sample in range(2)]
    runs = [(names[answer], replica + 1, start, end) for replica, answer, start, end in run.segments]
    assert runs == [
        ("b0", 1, 0, 40), ("b1", 2, 0, 50), ("c0", 1, 40, 60), ("a1", 2, 0, 70), ("c1", 2, 50, 80), ("a0", 1, 0, 80),
        ("a0", 1, 80, 110), ("d0", 2, 80, 140), ("e1", 1, 80, 150), ("d1", 1, 110, 160), ("e0", 2, 80, 160),
    ]  # fmt: skip
    second_unit = [(names[answer], replica + 1) for now, answer, replica in system.grants if now == 80]
    assert second_unit == [("a0", 1), ("e0", 2), ("e1", 1), ("d0", 2), ("d1", 1)]
    assert run.trained == [80, 80, 160, 160]
    assert [(run.trained_in[2 * group] + 1, run.age[2 * group]) for group in range(4)] == [
        (3, 2),
        (1, 0),
        (2, 1),
        (4, 1),
    ]
    report = system.scheduler.take_reports()[0]
    expected = {"answers": 5, "tokens": 210, "makespan_s": 80, "carried_groups": 1, "bubble": 30 / 320}
    assert report.items() >= expected.items()
    assert "the bubble is 1 - 290 / 320 = 9.4 %" in PAGE
    assert f"{100 * AHEAD:.0f} % of its\npredicted tokens" in PAGE
