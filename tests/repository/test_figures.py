"""The numbers in the text of README and docs/paper.md, and README's figures, are those of the result files."""

import statistics
from pathlib import Path

import pytest

from benchmarks.engines.running import mean_running
from benchmarks.jobs.job_figures import EPOCH_STEPS
from tools import docs_figures
from tools.result_tables.jobs import _at_equal_tokens
from tools.result_tables.markdown import result_of
from tools.svg import Panel, Series, draw

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/paper.md").read_text(encoding="utf-8")
BENCHMARKS = " ".join((ROOT / "docs/benchmarks.md").read_text(encoding="utf-8").split())
README = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())


def bar(result, name):
    return result_of(result)["bars"][name]["measured"]


def simulated(case, name="steps_per_hour"):
    rows = [row for row in result_of("pipe")["rows"] if row["factor"] == "base" and not row["drafted"]]
    return statistics.median(row[name] for row in rows if row["case"] == case)


def test_the_papers_drafter():
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
    assert f"{budget:.2f} with the learnt probability alone, {window:.2f} with a window" in PAGE

    weighted = [row["rewarded twice"] / row["equal"] for row in result_of("reward_weights")["traces"].values()][:3]
    texts = ("on noisy GSM8K", "on GSM8K", "on the long-tail text")
    assert ", ".join(f"{ratio:.3f} {text}" for ratio, text in zip(weighted, texts, strict=True)) in PAGE


def test_the_papers_scheduler():
    sync, ours = simulated("sync, verl"), simulated("sync, histopipe")
    assert f"`sync`, simulated steps per hour: {ours:.2f}, with verl's balancer {sync:.2f}" in PAGE
    one, two = ("colocate async, histopipe, max_age 1", "colocate async, histopipe, max_age 2")
    assert (
        f"{sync:.1f} in `sync`, {simulated('pipelined, two-tier'):.1f} in the paper's order "
        f"(without its migration), "
        f"{simulated(one):.1f} with `max_age` 1, {simulated(two):.1f} with `max_age` 2"
    ) in PAGE
    mixed, verl = 100 * simulated(two, "mixed"), 100 * simulated("colocate async, verl", "mixed")
    assert f"{mixed:.1f} % with `max_age` 2, {verl:.1f} % in verl's `colocate_async`" in PAGE


def test_the_papers_faults():
    faults = result_of("faults")
    assert f"all {len(faults['tests'])} tests with faults pass" in PAGE
    assert bar("faults", "tests that did not pass") == 0


def test_the_readme():
    fastest = bar("end_to_end", "colocate rhyme / verl's fastest mode: steps/h")
    assert f"rhyme makes {fastest:.2f} times the steps per hour" in README
    recent = bar("end_to_end", "colocate rhyme / verl's fastest mode with age <= 2: steps/h")
    assert f"{recent:.2f} times those of verl's fastest mode with answers at most as old" in README
    first = bar("end_to_end", "sync rhyme / sync stock: rollout speed in epoch 1")
    assert f"In epoch 1, rollouts in `sync` are {first:.1f} times as fast as stock's" in README
    separate = result_of("end_to_end_separate")
    ratio = separate["summary"]["separate rhyme"]["steps_per_hour_ratio"]
    waits = [
        sum(step["gen_seconds"] for step in run["steps"][EPOCH_STEPS:])
        / sum(step["step_seconds"] for step in run["steps"][EPOCH_STEPS:])
        for run in separate["runs"]
    ]
    assert f"waits for stock's rollouts in {waits[0]:.0%}".replace("%", " %") in README
    at_equal_tokens = _at_equal_tokens(*(separate["summary"][f"separate {name}"] for name in ("rhyme", "stock")))
    assert f"{ratio:.2f} times stock's steps per hour, {at_equal_tokens:.2f} at equally many tokens" in README
    assert f"in {waits[0]:.0%} of the time with stock verl, and in {waits[1]:.0%}".replace("%", " %") in BENCHMARKS
    longtail, gsm8k = (
        rows["sync rhyme"]["tokens_per_s"] / rows["sync stock"]["tokens_per_s"]
        for rows in (result_of(f"end_to_end_{name}own_speed")["summary"] for name in ("", "gsm8k_"))
    )
    assert f"{longtail:.2f} times stock's tokens per second (GSM8K: {gsm8k:.2f})" in README
    speed = "sync rhyme / sync stock: rollout speed"
    first, later = (bar("end_to_end_gsm8k_noisy", name) for name in (f"{speed} in epoch 1", speed))
    assert f"little (GSM8K, noisy), {first:.1f} times, and {later:.1f} times later" in README
    slowest = min(
        row["ratio"]["median"]
        for ways in result_of("rollout")["loads"].values()
        for measured in ways.values()
        for running, row in measured["summary"]["rhyme"].items()
        if 80 < mean_running(measured["runs"]["none"][running]) < 120
    )
    assert slowest < 1 and "with a hundred on a fast device, rollouts can be slower than stock's" in README


def test_the_drawings_are_those_of_the_results_and_all_of_them_are_shown():
    figures = docs_figures.figures()
    assert {path.name for path in docs_figures.FOLDER.iterdir()} == set(figures)
    for name, text in figures.items():
        assert (docs_figures.FOLDER / name).read_text(encoding="utf-8") == text, "run `make docs-figures`"
        assert f'"docs/figures/{name}"' in README


def test_a_point_outside_of_the_axes_is_refused():
    panel = Panel(
        title="", x_label="", y_label="", x_ticks=(0, 1), y_ticks=(0, 1), series=[Series(x=[2], y=[1], colour="blue")]
    )
    with pytest.raises(ValueError, match="2 is outside the axis from 0 to 1"):
        draw([panel], "light", "")
