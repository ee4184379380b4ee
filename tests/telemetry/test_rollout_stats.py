"""The per-step statistics a replica writes."""

import json

from rhyme_verl.telemetry.rollout_stats import RolloutStats


def test_a_line_holds_changes_of_counters_and_sizes_as_they_are(tmp_path):
    stats = RolloutStats(str(tmp_path), replica_rank=3)
    for step, totals in ((0, {"num_drafts": 5, "history_tokens": 10}), (1, {"num_drafts": 12, "history_tokens": 7})):
        with stats.running(), stats.running():
            stats.add_tokens(20)
        stats.add_tokens(10)
        stats.flush(step, totals)
    stats.flush(2, {"num_drafts": 12, "history_tokens": 7})  # nothing ran: no line
    lines = [json.loads(line) for line in (tmp_path / "replica-3.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1]
    assert [line["num_drafts"] for line in lines] == [5, 7]
    assert [line["history_tokens"] for line in lines] == [10, 7]
    assert [(line["answers"], line["tokens"]) for line in lines] == [(2, 30), (2, 30)]
    assert all(0 <= line["busy_seconds"] < 1 for line in lines)


def test_without_a_folder_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    stats = RolloutStats(None, replica_rank=0)
    with stats.running():
        stats.add_tokens(20)
    stats.flush(0, {})
    assert list(tmp_path.iterdir()) == []
