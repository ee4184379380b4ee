"""The figures of docs/paper.md are those of the result files."""

import statistics
from pathlib import Path

from tools.result_tables.markdown import result_of

PAGE = (Path(__file__).parents[2] / "docs/paper.md").read_text(encoding="utf-8")


def bar(result, name):
    return result_of(result)["bars"][name]["measured"]


def simulated(case, name="steps_per_hour"):
    rows = [row for row in result_of("pipe")["rows"] if row["factor"] == "base" and not row["drafted"]]
    return statistics.median(row[name] for row in rows if row["case"] == case)


def test_of_the_drafter():
    matched = [
        bar("drafter", f"{text}: accepted per verify / Arctic's best, no more drafted")
        for text in ("gsm8k", "gsm8k-noisy", "longtail")
    ]
    where = ("times the accepted tokens per verification on GSM8K", "on noisy GSM8K", "on the long-tail text")
    assert ", ".join(f"{ratio:.2f} {text}" for ratio, text in zip(matched, where, strict=True)) in PAGE
    rows = result_of("drafter")["traces"]["gsm8k"]
    budget, window = (
        rows[name]["16"]["accepted_per_verify"] for name in ("rhyme fixed", "rhyme fixed, the paper's window")
    )
    assert f"{budget:.2f} with the learnt probability alone, {window:.2f} with the window in addition (GSM8K" in PAGE
    exact = bar("end_to_end", "sync rhyme, float32 trainer: largest difference of a token's probability")
    assert f"over 20 steps: {exact:.5f} (" in PAGE


def test_of_the_scheduler():
    sync, ours = simulated("sync, verl"), simulated("sync, histopipe")
    jobs = bar("end_to_end", "sync rhyme / sync histospec: steps/h")
    assert f"{jobs:.2f} times the steps per hour of HistoSpec alone in whole jobs" in PAGE
    assert f"simulated, {ours:.2f} against {sync:.2f}" in PAGE
    one, two = ("colocate async, histopipe, max_age 1", "colocate async, histopipe, max_age 2")
    assert (
        f"{sync:.1f} in `sync`, {simulated('pipelined, two-tier'):.1f} in the paper's order, "
        f"{simulated(one):.1f} with `max_age` 1, {simulated(two):.1f} with `max_age` 2"
    ) in PAGE
    mixed, verl = 100 * simulated(two, "mixed"), 100 * simulated("colocate async, verl", "mixed")
    assert f"{mixed:.1f} % with `max_age` 2, {verl:.1f} % in verl's `colocate_async`" in PAGE


def test_of_the_faults():
    faults = result_of("faults")
    assert f"all {len(faults['tests'])} tests with faults pass" in PAGE
    assert bar("faults", "tests that did not pass") == 0
