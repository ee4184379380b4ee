"""The report: what is read of a run, what is computed from it, and that the page is whole. See tests/browser, too."""

import json
import re

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from rhyme_verl.cli import app
from rhyme_verl.commands.report import figures
from rhyme_verl.commands.report.page import SECTIONS, build
from rhyme_verl.commands.report.run import Run, read_run
from tests.helpers.runs import make_run

NO_DATA = 'class="missing"'


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    return make_run(root / "drafted"), make_run(root / "plain", seed=1, num_replicas=1, schedule=False, trace=False)


def test_a_run_is_what_its_folder_holds(folders):
    run = read_run(folders[0])
    assert run.name == "drafted"
    assert list(run.total("num_draft_tokens").index) == [1, 2, 3, 4, 5, 6], "steps of the weights' version + 1"
    assert run.total("num_draft_tokens")[2] == 2 * 400
    assert run.largest("history_store_tokens")[6] == 12_000
    assert run.rollouts.groupby("epoch")["step"].unique().map(list).to_dict() == {1: [1, 2], 2: [3, 4], 3: [5, 6]}
    assert len(run.schedule) == 6 * 2 * 4
    assert run.trace.num_rows == 24


def test_acceptance_by_epoch_and_by_place_are_of_sums(folders):
    run = read_run(folders[0])
    (figure,) = figures.acceptance_by_epoch([run])
    rate, per_verify = figure.data
    assert list(rate.x) == [1, 2, 3]
    assert rate.y[0] == pytest.approx(150 / 600)
    assert per_verify.y[2] == pytest.approx((600 + 750) / 100)
    (figure,) = figures.acceptance_by_place([run])
    assert list(figure.data[0].x) == ["0-63", "64-127"]
    assert figure.data[0].y == pytest.approx([2250 / 3 / 2100, 2250 / 2 / 2100])


def test_bubble_is_what_lanes_stand_idle():
    lines = [
        {"replica": "a", "start": 10.0, "end": 20.0, "lanes": 1, "tokens": 10, "predicted": 10},
        {"replica": "b", "start": 10.0, "end": 15.0, "lanes": 1, "tokens": 5, "predicted": 5},
    ]
    run = Run(name="x", schedule=pd.DataFrame(lines))
    assert figures.bubble(run) == pytest.approx(0.25)
    later = [{**line, "start": line["start"] + 100, "end": line["end"] + 100} for line in lines]
    assert figures.bubble(Run(name="x", schedule=pd.DataFrame(lines + later))) == pytest.approx(0.25), (
        "pauses of all are no bubble"
    )
    picture = np.array(figures.timelines([run])[0].data[0].z)
    assert picture.mean() == pytest.approx(0.75, abs=0.005)
    assert picture[1, : figures.TIME_BINS // 2].min() == 1.0 and picture[1, -10:].max() == 0.0


def test_an_interrupted_answer_fills_lanes_each_time_and_is_one_point_of_the_lengths():
    lines = [
        {"replica": "a", "start": 0.0, "end": 4.0, "lanes": 1},
        {"replica": "a", "start": 4.0, "end": 8.0, "lanes": 1, "tokens": 10, "predicted": 10},
        {"replica": "b", "start": 0.0, "end": 8.0, "lanes": 1, "tokens": 5, "predicted": 5},
    ]
    run = Run(name="x", schedule=pd.DataFrame(lines))
    assert figures.bubble(run) == pytest.approx(0.0)
    points, _ = figures.lengths([run])[0].data
    assert list(points.y) == [10, 5]


def test_equal_lengths_share_a_rank():
    lines = [{"predicted": p, "tokens": t} for p, t in ((1, 10), (1, 10), (2, 30), (3, 20))]
    from scipy.stats import spearmanr

    expected = spearmanr([1, 1, 2, 3], [10, 10, 30, 20]).statistic
    (figure,) = figures.lengths([Run(name="x", schedule=pd.DataFrame(lines))])
    assert figure.layout.annotations[0].text == f"x: rank correlation {expected:.2f}"


def test_the_page_is_whole_and_needs_no_network(folders):
    page = build([read_run(folder) for folder in folders])
    assert page.count(NO_DATA) == 0
    assert page.count('class="plotly-graph-div"') == len(SECTIONS)
    outside = re.findall(r'<(?:script|link|img|iframe)[^>]+(?:src|href)="(?!data:)[^"]*"', page)
    assert outside == []


def test_sections_without_data_say_what_records_it(folders):
    page = build([read_run(folders[1])])
    assert page.count(NO_DATA) == 3
    assert "rollout.router_config_path" in page and "custom.rhyme.trace.path" in page


def test_without_statistics_verls_metrics_are_drawn(tmp_path):
    metrics = {"critic/rewards/mean": 0.5, "rhyme/spec/acceptance_rate": 0.4, "rhyme/spec/draft_tokens": 10,
               "rhyme/spec/accepted_tokens": 4, "rhyme/history/tokens": 100, "rhyme/rollout/busy_s": 3.0}  # fmt: skip
    (tmp_path / "m.jsonl").write_text(json.dumps({"step": 1, "data": metrics}) + "\n")
    run = read_run(tmp_path, "logged")
    for draw in (figures.reward, figures.rollout_time, figures.drafting, figures.drafted_and_accepted, figures.history):
        assert draw([run])


def test_a_step_that_a_resumed_run_repeats_counts_once(tmp_path):
    lines = [{"step": 0, "tokens": 10}, {"step": 1, "tokens": 20}, {"step": 1, "tokens": 25}]
    (tmp_path / "replica-0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read_run(tmp_path).total("tokens").sum() == 35


def test_a_run_that_is_being_written_is_read_up_to_its_last_whole_line(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "data": {"critic/rewards/mean": 0.5}}\n{"step": 2, "da')
    assert list(read_run(tmp_path).metrics.index) == [1]


def test_folders_that_cannot_be_reported_on_are_told(tmp_path, folders):
    with pytest.raises(ValueError, match="no such folder"):
        read_run(tmp_path / "none")
    with pytest.raises(ValueError, match="nothing to report.*stats_path"):
        read_run(tmp_path)
    with pytest.raises(ValueError, match="more than one run"):
        read_run(folders[0].parent)
    (tmp_path / "replica-0.jsonl").write_text("[1]\n")
    with pytest.raises(ValueError, match=r"replica-0.jsonl: not a file of JSON objects"):
        read_run(tmp_path)


def test_the_command_writes_the_page_and_names_the_runs(folders, tmp_path):
    out = tmp_path / "page.html"
    result = CliRunner().invoke(
        app, ["report", *map(str, folders), "--out", str(out), "--name", "with <drafts>", "--name", "without"]
    )
    assert result.exit_code == 0, result.output
    assert "with &lt;drafts&gt;" in out.read_text() and "<drafts>" not in out.read_text().split("<body>")[1][:2000]
    assert CliRunner().invoke(app, ["report", str(tmp_path / "none")]).exit_code == 1
    nowhere = CliRunner().invoke(app, ["report", str(folders[0]), "--out", f"{__file__}/page.html"])
    assert isinstance(nowhere.exception, SystemExit) and nowhere.exit_code == 1 and __file__ in nowhere.output
    assert CliRunner().invoke(app, ["report", *map(str, folders), "--name", "one"]).exit_code == 2
