"""What the replica benchmark makes of a run's records, on a run small enough to check by hand."""

import json
from pathlib import Path

import pytest

from benchmarks.jobs.replica_job import analyse


def write(path: Path, lines: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def request(start: float, end: float, tokens: int, *, resumed: int = 0, aborted: bool = False) -> dict:
    prompt = 10 + resumed
    return {
        "start": start, "end": end, "prompt": prompt, "resumed": resumed, "cached": 0, "tokens": tokens,
        "aborted": aborted,
    }  # fmt: skip


def metrics(step: int) -> dict:
    staleness = {
        f"training/off_policy/trajectory_staleness{kind}/{name}": 0
        for kind in ("", "_worst")
        for name in ("mean", "max")
    }
    data = {
        "critic/rewards/mean": 0.5, "timing_s/step": 1.0, "timing_s/gen": 1.0,
        "training/rollout_actor_probs_pearson_corr": 0.99, "training/rollout_probs_diff_max": 1e-5, **staleness,
    }  # fmt: skip
    return {"step": step, "data": data}


@pytest.fixture
def partial_rollout(tmp_path: Path) -> Path:
    """Two replicas; verl stops them when the first batch is there, trains, and resumes the third answer."""
    times = tmp_path / "times"
    write(times / "requests-0.jsonl", [request(0, 4, 40), request(0, 6.5, 60, aborted=True), request(10, 13, 30)])
    write(times / "requests-1.jsonl", [request(0, 6, 60), request(10, 14, 40, resumed=60)])
    write(times / "samples.jsonl", [
        {"step": 1, "asked": 0.0, "got": 6.0, "versions": [[0, 0], [0, 0]]},
        {"step": 2, "asked": 10.0, "got": 14.0, "versions": [[0, 1], [1, 1]]},
    ])  # fmt: skip
    for replica in (0, 1):
        write(times / f"gates-{replica}.jsonl", [
            {"time": 6.0, "open": False}, {"time": 9.5, "open": True}, {"time": 14.0, "open": False},
        ])  # fmt: skip
    write(tmp_path / "metrics.jsonl", [metrics(1), metrics(2)])
    return tmp_path


def test_time_counts_while_replicas_are_open(partial_rollout: Path) -> None:
    run = analyse(partial_rollout, "colocate_async", replicas=2, lanes=2)
    first, second = run["steps"]
    assert (first["rollout_seconds"], second["rollout_seconds"]) == (6.0, 4.5)
    # Half of the lanes are free: of one replica from 4 on, of the other all the time.
    assert first["bubble"] == pytest.approx((2 / 2 + 6 / 2) / 12)
    assert second["empty_share"] == pytest.approx((0.5 + 1.0 + 0.5) / 9)
    assert (first["aborted"], second["aborted"]) == (0, 1)  # its end comes just after the replicas are closed
    assert (first["recomputed_tokens"], second["recomputed_tokens"]) == (0, 70)
    assert (first["spanning_share"], second["spanning_share"]) == (0.0, 0.5)
    assert (first["tokens"], second["tokens"]) == (100, 130)


def test_sync_rollouts_take_as_long_as_the_trainer_waits(partial_rollout: Path) -> None:
    run = analyse(partial_rollout, "sync", replicas=2, lanes=2)
    assert [step["rollout_seconds"] for step in run["steps"]] == [6.0, 4.0]
