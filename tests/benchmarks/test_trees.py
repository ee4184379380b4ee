"""The replay of drafts that are trees: what is accepted, and what a step is charged."""

import json

import pytest
from typer.testing import CliRunner

from benchmarks.drafting import trees
from benchmarks.drafting.replay import TRACES, replay
from benchmarks.drafting.trees import ATTENTION_SECONDS, MOVING_SECONDS, TreeDraft, TreeReplay
from tests.benchmarks.test_benchmarks import Script, answer, rid, step

TREE = TreeDraft([2, 3, 9, 4, 5], [-1, 0, 0, 2, 3])  # 2 3 and 2 9 4 5


def test_a_tree_is_walked_from_its_root():
    assert TREE.walk([2, 9, 4, 7]) == [0, 2, 3]
    assert TREE.walk([2, 3, 9]) == [0, 1]
    assert TREE.walk([3, 9]) == []
    assert TREE.branches
    assert not TreeDraft([2, 3], [-1, 0]).branches


@pytest.mark.parametrize(
    ("draft", "accepted", "extra"),
    [
        (TREE, 3, ATTENTION_SECONDS + MOVING_SECONDS),
        (TreeDraft([2, 9, 3], [-1, 0, 0]), 2, ATTENTION_SECONDS),
        (TreeDraft([2, 9], [-1, 0]), 2, 0.0),
    ],
    ids=["moved", "in place", "a path"],
)
def test_a_step_is_charged_for_its_trees_and_for_what_moves(draft, accepted, extra):
    script = Script({(rid(0), 1): draft})
    engine = TreeReplay(script, 1, 16, lambda rows, num_tokens, context: 1.0)
    totals = engine.run_step(step(answer([1, 2, 9, 4, 7, 8])))
    assert (totals.accepted, totals.engine_steps) == (accepted, 6 - accepted)
    assert totals.model_seconds == pytest.approx(6 - accepted + extra)


def test_trees_without_branches_are_replayed_as_paths():
    steps = [step(answer([1, 2, 3, 4, 5, 6, 7, 8]))]
    drafts = {(rid(0), 1): [2, 3, 9, 9], (rid(0), 4): [9], (rid(0), 5): [6, 7, 8, 8, 8]}
    path = replay(steps, Script(drafts), concurrency=1)[1]
    script = Script({key: TreeDraft(draft, range(-1, len(draft) - 1)) for key, draft in drafts.items()})
    assert TreeReplay(script, 1, 16, lambda *_: 1.0).run_step(steps[0]).accepted == path.accepted == 5


def test_the_benchmark_writes_its_bars(tmp_path):
    app = trees.typer.Typer()
    app.command()(trees.main)
    result = tmp_path / "trees.json"
    arguments = ["--trace", str(TRACES / "gsm8k.parquet"), "--rows", "1", "--no-charge-drafter", "--quick"]
    done = CliRunner().invoke(app, [*arguments, "--result", str(result)], catch_exceptions=False)
    assert done.exit_code == 0
    content = json.loads(result.read_text())
    accepted, speed = content["bars"].values()
    assert accepted["holds"]
    assert speed["measured"] > 1.1
    assert content["traces"]["gsm8k"]["path"]["1"]["branched_share"] == 0.0
