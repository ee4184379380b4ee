"""Whole verl jobs in which something dies, stops, overflows or is damaged. docs/reliability.md lists all faults."""

import math
import time
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from examples.quickstart.policy import REPOSITORY
from examples.quickstart.progress import LARGEST_DIFFERENCE, SAME_PROBABILITY, json_lines
from rhyme_verl.config import GIB
from rhyme_verl.history import snapshot
from rhyme_verl.telemetry.trace import read_trace
from tests.helpers.jobs import (
    BATCH_SIZE,
    ROLLOUT,
    SAMPLES,
    check_samples,
    end_of,
    job,
    log,
    metrics,
    process,
    samples,
    snapshot_file,
    wait_for,
)
from tests.helpers.processes import full_disk, stopped

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.faults]

ANSWERS = BATCH_SIZE * SAMPLES  # per step
STOP_SECONDS = 20.0
END_SECONDS = 60.0
REPLICA_BUDGET_GIB = 0.0001  # less than the history of all prompts
CLOCK_SECONDS = 3600
ACTOR, SERVER, ENGINE = "ray::HistoryActor", "ray::RhymeHttpServer", "VLLM::EngineCore"


def replica_stats(out):
    return json_lines(out / "stats/replica-0.jsonl")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A `sync` job with one fault after another, the last of which ends it, and its continuation.

    Checkpoints follow steps 2, 4, 6, 8 and 10. The history's actor dies after step 2; in step 5 or 6, the replica stops
    for 20 s, and the disk is full for the snapshot of step 6; the engine dies after step 8, whose snapshot is then cut
    off. Throughout, one problem has no number for a reward, and the engine's history exceeds its budget.
    """
    out = tmp_path_factory.mktemp("faults")
    overrides = (
        "trainer.save_freq=2",
        "reward.custom_reward_function.path=pkg://tests.helpers.nan_reward",
        f"+{ROLLOUT}.custom.rhyme.history.replica_budget_gib={REPLICA_BUDGET_GIB}",
        f"+{ROLLOUT}.custom.rhyme.trace.path={out / 'trace'}",
    )
    with job(out, *overrides, mode="sync", steps=10) as running:
        wait_for(snapshot_file(out, 2).exists, running)
        process(running, ACTOR).kill()
        wait_for(lambda: "history resumed from" in log(out), running)
        wait_for(lambda: len(replica_stats(out)) >= 4, running)
        time.sleep(0.5)  # the next rollout has begun
        with full_disk(process(running, ACTOR).pid, snapshot_file(out, 2).stat().st_size):
            with stopped(process(running, SERVER), process(running, ENGINE)):
                time.sleep(STOP_SECONDS)
            wait_for(lambda: "the history of step 6 is not saved" in log(out), running)
        wait_for(snapshot_file(out, 8).exists, running)
        survived = log(out)
        process(running, ENGINE).kill()
        status = end_of(running, END_SECONDS)
    first = SimpleNamespace(log=log(out), samples=samples(out), metrics=metrics(out))
    saved = list(snapshot.load(snapshot_file(out, 8)))
    content = snapshot_file(out, 8).read_bytes()
    snapshot_file(out, 8).write_bytes(content[: len(content) // 2])
    with job(out, *overrides, mode="sync", steps=10) as running:
        resumed_status = end_of(running)
    return SimpleNamespace(
        out=out, survived=survived, status=status, first=first, saved=saved, resumed_status=resumed_status,
        trace=[row for row in read_trace(out / "trace").to_pylist() if row["step"] < 8],
    )  # fmt: skip


def test_no_trajectory_is_lost_duplicated_or_trained_on_twice(run):
    resumed = samples(run.out)[len(run.first.samples) :]
    check_samples([*run.first.samples[:8], *resumed], list(range(1, 11)), max_age=0)
    assert "Error in _run_prompt" not in run.survived, "no answer has failed before the engine died"
    recorded = Counter((row["step"], row["prompt_key"], row["sample"]) for row in run.trace)
    assert set(recorded.values()) == {1}
    assert Counter(step for step, _, _ in recorded) == dict.fromkeys(range(8), ANSWERS)
    # The store keeps the latest three of four epochs. It may lack answers that came just before its actor died.
    kept = Counter((key, answer.step, answer.tokens) for key, answer in run.saved)
    sent = Counter((row["prompt_key"], row["step"], np.array(row["tokens"], np.int32).tobytes()) for row in run.trace)
    assert not kept - sent
    assert {step for _, step, _ in sent - kept} <= {0, 1, 2}


def test_a_killed_history_actor_returns_with_this_runs_snapshot(run):
    folder = snapshot_file(run.out, 2).parent
    assert f"history resumed from {folder}: {2 * ANSWERS} answers" in run.survived
    # The job notices only if it calls the actor before it is back; test_actors.py has a client that does.
    if "the history does not respond; rollouts continue without it until it does" in run.survived:
        assert "the history responds again" in run.survived


def test_a_replica_stopped_for_20_seconds_is_waited_for(run):
    assert max(run.first.metrics[step]["timing_s/step"] for step in (5, 6)) > STOP_SECONDS
    assert "is dead" not in run.survived


def test_a_full_disk_costs_one_snapshot(run):
    assert run.survived.count("the history of step 6 is not saved; training continues without it") == 1
    assert list(snapshot_file(run.out, 6).parent.glob("*shard*")) == []


def test_the_history_of_an_engine_stays_within_its_budget(run):
    lines = replica_stats(run.out)[:8]
    assert max(line["history_bytes"] for line in lines) <= REPLICA_BUDGET_GIB * GIB
    assert lines[-1]["history_evicted_tokens"] > 0


def test_rewards_that_are_not_numbers_skip_verls_update_and_are_unknown_in_the_history(run):
    strange = {row["prompt_key"] for row in run.trace if math.isnan(row["reward"])}
    assert len(strange) == 1
    assert {key for key, answer in run.saved if math.isnan(answer.reward) and answer.step > 2} == strange
    assert all(math.isnan(answer.reward) for key, answer in run.saved if key in strange)
    assert "WARN: grad_norm is not finite" in run.survived
    steps = [run.first.metrics[step] for step in range(1, 9)]
    assert sum(step["actor/grad_norm"] is None for step in steps) == 4, "once per epoch"
    assert all(step[LARGEST_DIFFERENCE] < SAME_PROBABILITY for step in steps)
    assert not [name for step in steps for name, value in step.items() if name.startswith("rhyme/") and value is None]


def test_a_killed_engine_ends_a_sync_job(run):
    assert run.status not in (None, 0)
    assert "EngineDeadError" in run.first.log or "ActorDiedError" in run.first.log


def test_a_job_resumes_without_a_damaged_snapshot_and_says_so_once(run):
    assert run.resumed_status == 0
    assert log(run.out).count("the history is not resumed; rollouts start without it") == 1
    assert f"{snapshot_file(run.out, 8)}: cannot be read" in log(run.out)
    assert {answer.step for _, answer in snapshot.load(snapshot_file(run.out, 10))} == {8, 9}


@pytest.mark.parametrize(
    ("title", "message", "replicas"),
    [
        ("ray::RhymeAgentLoopWorker", "agent-loop worker agent_loop_worker_", 1),
        (SERVER, "is dead; its answers fail", 2),
        (ENGINE, "is dead; its answers fail", 1),
    ],
)
def test_a_job_ends_when_a_worker_a_replica_or_an_engine_dies(tmp_path, title, message, replicas):
    with job(tmp_path, replicas=replicas, steps=50) as running:
        wait_for(lambda: len(samples(tmp_path)) >= 2, running)
        process(running, title).kill()
        assert end_of(running, END_SECONDS) != 0
    assert message in log(tmp_path)
    assert "ActorDiedError" in log(tmp_path) or "RayActorError" in log(tmp_path)
    found = samples(tmp_path)
    check_samples(found, list(range(1, len(found) + 1)))


def test_a_job_goes_on_without_the_router(tmp_path):
    with job(tmp_path, steps=6) as running:
        wait_for(lambda: len(samples(tmp_path)) >= 2, running)
        process(running, "ray::Router").kill()
        assert end_of(running) == 0, running.log_tail(60)
    assert "HistoPipe's router is dead" in log(tmp_path)
    check_samples(samples(tmp_path), [1, 2, 3, 4, 5, 6], max_age=math.inf)


def test_two_jobs_on_one_machine_whose_clocks_differ_by_an_hour(tmp_path):
    """Both roll out the same prompts; in the second, which is an hour ahead, the history's actor dies."""
    first, second = tmp_path / "first", tmp_path / "second"
    path = f"{REPOSITORY / 'tests/helpers/shifted_clock'}:{REPOSITORY}"
    ahead = {"PYTHONPATH": path, "SHIFTED_CLOCK_SECONDS": str(CLOCK_SECONDS)}
    faster = "actor_rollout_ref.actor.optim.lr=1e-3"  # so that the jobs' weights differ
    with (
        job(first, "trainer.save_freq=2", mode="sync", steps=4) as one,
        job(second, "trainer.save_freq=2", faster, mode="sync", steps=4, environment=ahead) as two,
    ):
        wait_for(snapshot_file(second, 2).exists, two)
        process(two, ACTOR).kill()
        assert [end_of(running) for running in (one, two)] == [0, 0]  # both end before either context does
    for out in (first, second):
        check_samples(samples(out), [1, 2, 3, 4], max_age=0)
        for line in metrics(out).values():
            assert line[LARGEST_DIFFERENCE] < SAME_PROBABILITY, "weights went to the other job"
            assert 0 < line["rhyme/rollout/busy_s"] < CLOCK_SECONDS / 2
    tokens = [line["tokens"] for line in replica_stats(first)]
    assert [line["history_store_tokens"] for line in replica_stats(first)] == list(np.cumsum(tokens))
    assert samples(second)[0]["got"] > time.time() + CLOCK_SECONDS / 2, "the clock is shifted"
    assert f"history resumed from {snapshot_file(second, 2).parent}: {2 * ANSWERS} answers" in log(second)
    steps = Counter(answer.step for _, answer in snapshot.load(snapshot_file(second, 4)))
    assert steps[0] == steps[1] == ANSWERS and max(steps.values()) == ANSWERS
