"""The history's Ray actors and their client: a whole round, sharding, death and return, snapshots with checkpoints."""

import asyncio
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import ray
from rhyme_verl._core import prompt_key

from rhyme_verl.config import HistoryConfig
from rhyme_verl.history import client as client_module
from rhyme_verl.history import snapshot
from rhyme_verl.history.actors import HistoryActor, shard_of, wait_for_snapshots
from rhyme_verl.history.client import HistoryClient
from rhyme_verl.history.store import HistoryShard
from rhyme_verl.history.vocabulary import Vocabulary
from rhyme_verl.telemetry.files import unfinished_file
from tests.helpers.answers import add
from tests.helpers.checkpoints import save_checkpoint
from tests.helpers.processes import full_disk
from tests.helpers.ray_node import start_ray

pytestmark = pytest.mark.usefixtures("patient_clients")

KEYS = [prompt_key(np.array([8, key], np.int32)) for key in range(10)]  # of one length, as a template's prompts are


VOCABULARY = Vocabulary(size=1000, fingerprint="0123456789abcdef")


@pytest.fixture(scope="module", autouse=True)
def cluster():
    start_ray(num_cpus=2)
    yield
    ray.shutdown()


@pytest.fixture
def make_client():
    """A function that makes clients of the test's own actors, which end with it."""
    opened = []

    def make(**settings):
        opened.append(HistoryConfig(**settings))
        return HistoryClient(opened[-1], VOCABULARY)

    yield make
    for settings in opened:
        for index in range(settings.shards):
            end_actor(index, settings.shards)


def actor_of(index=0, num_shards=1):
    return ray.get_actor(f"rhyme_history_{VOCABULARY.fingerprint}_{VOCABULARY.size}_{index}_of_{num_shards}")


def end_actor(index, num_shards):
    """End an actor for good and wait until its name is free."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            ray.kill(actor_of(index, num_shards))
        except ValueError:
            return
        time.sleep(0.05)


def pid_of(actor):
    return ray.get(actor.__ray_call__.remote(lambda self: os.getpid()))


def text(key, sample=0):
    return np.arange(sample, sample + key % 50 + 1, dtype=np.int32)


def fill(client, step=1):
    for key in KEYS:
        client.add(key, key % 1000, step, text(key))
        client.set_reward(key, key % 1000, key % 7)


async def ids_of(client, since=0):
    """Ids of the answers held, by prompt, once all that was sent is there; None: nobody answers."""
    await client.drain(30)
    batches, unanswered = await client.changes(dict.fromkeys(KEYS, since))
    return None if unanswered else {batch.prompt_key: batch.ids.tolist() for batch in batches}


async def until_answered(client):
    deadline = time.monotonic() + 120  # actors that start beside other tests take long
    while (found := await ids_of(client)) is None:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.2)
    return found


@pytest.mark.parametrize("shards", [1, 3])
def test_answers_come_back_to_any_client(make_client, shards):
    async def scenario():
        client, other = make_client(shards=shards), make_client(shards=shards)
        assert await client.changes({KEYS[0]: 0}) == ([], set())
        fill(client)
        await client.drain(30)
        batches, unanswered = await other.changes({**dict.fromkeys(KEYS, 0), 3: 0})
        assert not unanswered
        found = {batch.prompt_key: batch for batch in batches}
        assert found.keys() == set(KEYS)
        for key, batch in found.items():
            assert batch.tokens.tolist() == text(key).tolist()
            assert batch.ids.tolist() == [key % 1000]
        assert await other.changes({key: batch.version for key, batch in found.items()}) == ([], set())
        counters = await other.counters()
        assert (counters.prompts, counters.tokens) == (10, sum(len(text(key)) for key in KEYS))

    asyncio.run(scenario())


def test_what_waits_to_be_sent_is_bounded_in_bytes(make_client, monkeypatch, caplog):
    monkeypatch.setattr(client_module, "MAX_WAITING_BYTES", 10_000)

    async def scenario():
        client = make_client()
        for key in KEYS[:4]:  # before anything can be sent
            client.add(key, 1, 0, np.zeros(1000, np.int32))
        assert (await until_answered(client)).keys() == set(KEYS[:2])
        client.add(KEYS[3], 1, 0, np.zeros(1000, np.int32))
        assert (await until_answered(client)).keys() == {*KEYS[:2], KEYS[3]}

    asyncio.run(scenario())
    assert caplog.text.count("beyond its buffer are dropped") == 1


def test_the_budget_is_divided_over_the_shards(make_client):
    async def scenario():
        client = make_client(shards=2, budget_gib=0.001)
        for key in range(400):
            client.add(key << 32, 1, key, np.zeros(2000, np.int32))
        await client.drain(30)
        counters = await client.counters()
        assert 0.8 * 2**30 / 1000 < counters.bytes <= 2**30 / 1000
        assert counters.evicted_tokens == 2000 * (400 - counters.answers)

    asyncio.run(scenario())


def test_a_history_over_64_mib_drops_its_oldest_answers(make_client):
    async def scenario():
        client = make_client(budget_gib=0.0625, window_epochs=1000, max_tokens_per_prompt=1 << 24)
        for number in range(100):
            client.add(KEYS[number % 10], number, number, np.zeros(250_000, np.int32))  # 1 MB
        found = await ids_of(client)
        counters = await client.counters()
        assert sorted(sum(found.values(), [])) == list(range(100 - counters.answers, 100))
        assert 0.95 * 2**26 < counters.bytes <= 2**26
        assert counters.evicted_tokens == 250_000 * (100 - counters.answers)

    asyncio.run(scenario())


def test_a_send_that_is_repeated_after_a_long_silence_counts_once(make_client, tmp_path, monkeypatch, caplog):
    """The actor takes the first send when the client has already given up on it, and drops some of its answers."""
    monkeypatch.setattr(client_module, "CALL_SECONDS", 1.0)

    async def scenario():
        client, gate = make_client(budget_gib=0.001), tmp_path / "gate"
        assert await client.counters() is not None

        def wait_for_gate(actor):
            while not gate.exists():
                time.sleep(0.01)

        actor_of().__ray_call__.remote(wait_for_gate)
        for number in range(400):
            client.add(KEYS[number % 10], number, number, np.zeros(2000, np.int32))
        while "the history does not respond" not in caplog.text:
            await asyncio.sleep(0.01)
        gate.touch()
        await client.drain(30)
        counters = await client.counters()
        assert counters.evicted_tokens == 2000 * (400 - counters.answers) > 0

    with caplog.at_level(logging.WARNING, logger="rhyme_verl"):
        asyncio.run(scenario())


@pytest.mark.slow
def test_a_full_disk_costs_one_snapshot_and_the_actor_goes_on(make_client, tmp_path):
    async def scenario():
        client = make_client(snapshot_dir=str(tmp_path))
        fill(client)
        client.add(3, 3, 1, np.random.default_rng(0).integers(0, 1000, 100_000))  # more than the limit below
        await client.drain(30)
        first, second = (snapshot.shard_file(tmp_path / f"global_step_{n}" / snapshot.FOLDER, 0, 1) for n in (7, 8))
        for file in (first, second):
            save_checkpoint(file.parent.parent)
        with full_disk(pid_of(actor_of()), num_bytes=1 << 16):
            await client.finish_step(7)
            wait_for_snapshots(120)
        assert list(first.parent.iterdir()) == []
        assert len(await ids_of(client)) == 10
        await client.finish_step(8)
        wait_for_snapshots(120)
        assert len(list(snapshot.load(second, VOCABULARY))) == 11

    asyncio.run(scenario())


OTHER_JOB = """
import asyncio
from rhyme_verl.config import HistoryConfig
from rhyme_verl.history.client import HistoryClient
from tests.helpers.ray_node import start_ray
from tests.history.test_actors import VOCABULARY, fill, until_answered

async def scenario():
    client = HistoryClient(HistoryConfig(), VOCABULARY)
    print(len(await until_answered(client)))
    fill(client, step=9)
    print(len(await until_answered(client)))

start_ray(num_cpus=1)
asyncio.run(scenario())
"""


@pytest.mark.slow
def test_two_jobs_with_the_same_prompts_have_their_own_histories(make_client):
    async def scenario():
        client = make_client()
        fill(client, step=1)
        await client.drain(30)
        command, folder = [sys.executable, "-c", OTHER_JOB], Path(__file__).parents[2]
        other = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600)
        assert other.stdout.split() == ["0", "10"], other.stderr[-2000:]
        batches, _ = await client.changes(dict.fromkeys(KEYS, 0))
        assert [batch.rollouts.tolist() for batch in batches] == [[1]] * 10

    asyncio.run(scenario())


@pytest.mark.parametrize("clock_seconds", [-3600, pytest.param(3600, marks=pytest.mark.slow)])
def test_a_dead_actor_returns_from_this_runs_snapshot_and_the_client_goes_on(
    make_client, tmp_path, monkeypatch, clock_seconds
):
    """The clock of the first client's process is an hour off."""
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + clock_seconds)

    async def scenario():
        stale = snapshot.shard_file(tmp_path / "global_step_90" / snapshot.FOLDER, 0, 1)  # of an earlier run
        stale.parent.mkdir(parents=True)
        stale.write_bytes(b"never looked at")
        os.utime(stale, (now() - 60, now() - 60))
        client = make_client(snapshot_dir=str(tmp_path))
        fill(client)
        save_checkpoint(tmp_path / "global_step_7")
        await client.finish_step(6)
        await client.finish_step(7)
        await client.finish_step(7)
        wait_for_snapshots(120)
        assert [file.name for file in (tmp_path / "global_step_7/rhyme_history").iterdir()] == ["shard-0-of-1.parquet"]
        before = (await client.changes({KEYS[0]: 0}))[0][0]
        client.add(1, 1, 8, text(1))  # after the snapshot: lost with the actor
        await client.drain(30)
        os.kill(pid_of(actor_of()), signal.SIGKILL)
        client.add(KEYS[0], 5000, 8, text(3))  # while it is down: kept until it is back
        found = await until_answered(client)
        assert found == {key: [key % 1000] + [5000] * (key == KEYS[0]) for key in KEYS}
        news = (await client.changes({KEYS[0]: before.version}))[0][0]
        assert news.ids.tolist() == [KEYS[0] % 1000, 5000], "who knew the old actor learns all from the new one"
        assert (await client.counters()).prompts == 10
        saved = dict(snapshot.load(tmp_path / "global_step_7/rhyme_history/shard-0-of-1.parquet"))
        assert {key: answer.reward for key, answer in saved.items()} == {key: key % 7 for key in KEYS}

    asyncio.run(scenario())


def test_an_actor_ended_for_good_is_replaced(make_client, caplog):
    async def scenario():
        client = make_client()
        fill(client)
        assert len(await ids_of(client)) == 10
        end_actor(0, 1)
        await until_answered(client)
        fill(client, step=2)
        assert len(await ids_of(client)) == 10

    with caplog.at_level(logging.INFO, logger="rhyme_verl"):
        asyncio.run(scenario())
    assert caplog.text.count("the history does not respond") == 1
    assert caplog.text.count("the history responds again") == 1


@pytest.mark.parametrize(("shards_before", "shards_after"), [pytest.param(1, 3, marks=pytest.mark.slow), (3, 2)])
def test_a_resumed_job_takes_up_the_history_with_any_number_of_shards(
    make_client, tmp_path, shards_before, shards_after
):
    async def scenario():
        checkpoint = tmp_path / "global_step_4"
        first = make_client(shards=shards_before, snapshot_dir=str(tmp_path))
        fill(first)
        await first.drain(30)
        save_checkpoint(checkpoint)
        await first.finish_step(4)
        wait_for_snapshots(120)
        assert len(snapshot.shard_files(checkpoint / snapshot.FOLDER)) == shards_before
        resumed = make_client(shards=shards_after, snapshot_dir=str(tmp_path), resume_from=str(checkpoint))
        assert await until_answered(resumed) == {key: [key % 1000] for key in KEYS}
        assert (await resumed.counters()).answers == 10
        written = {file: file.stat().st_mtime_ns for file in snapshot.shard_files(checkpoint / snapshot.FOLDER)}
        await resumed.finish_step(4)  # verl says so after loading the checkpoint
        assert written == {file: file.stat().st_mtime_ns for file in snapshot.shard_files(checkpoint / snapshot.FOLDER)}
        save_checkpoint(tmp_path / "global_step_5")
        await resumed.finish_step(5)
        wait_for_snapshots(120)
        assert len(snapshot.shard_files(tmp_path / "global_step_5" / snapshot.FOLDER)) == shards_after

    asyncio.run(scenario())


def test_a_run_that_begins_anew_leaves_the_history_of_the_one_before_alone(make_client, tmp_path):
    """The earlier run's checkpoints are there, and this one saves none."""

    async def scenario():
        first = make_client(snapshot_dir=str(tmp_path))
        fill(first)
        await first.drain(30)
        save_checkpoint(tmp_path / "global_step_4")
        await first.finish_step(4)
        wait_for_snapshots(120)
        (file,) = snapshot.shard_files(tmp_path / "global_step_4" / snapshot.FOLDER)
        written = file.stat().st_mtime_ns
        end_actor(0, 1)
        trial = make_client(snapshot_dir=str(tmp_path))
        trial.add(KEYS[0], 1, 1, text(3))
        await trial.drain(30)
        await trial.finish_step(4)
        wait_for_snapshots(120)
        assert file.stat().st_mtime_ns == written
        save_checkpoint(tmp_path / "global_step_4")
        await trial.finish_step(4)
        wait_for_snapshots(120)
        assert file.stat().st_mtime_ns > written, "now the checkpoint is its own"

    asyncio.run(scenario())


def test_a_shard_without_a_file_takes_up_an_earlier_snapshot(make_client, tmp_path):
    """The job was killed when verl had saved step 5, and one of two shards its history."""

    async def scenario():
        first = make_client(shards=2, snapshot_dir=str(tmp_path))
        fill(first)
        for step in (4, 5):
            save_checkpoint(tmp_path / f"global_step_{step}")
            await first.finish_step(step)
            wait_for_snapshots(120)
            for key in KEYS:
                first.add(key, 5000, step, text(key, 1))
            await first.drain(30)
        for index in range(2):
            end_actor(index, 2)
        snapshot.shard_file(tmp_path / "global_step_5" / snapshot.FOLDER, 1, 2).unlink()
        resumed = make_client(shards=2, resume_from=str(tmp_path / "global_step_5"))
        found = await until_answered(resumed)
        assert found == {key: [key % 1000] + [5000] * (shard_of(key, 2) == 0) for key in KEYS}

    asyncio.run(scenario())


def test_a_checkpoint_without_history_is_said(tmp_path, caplog):
    settings = HistoryConfig(resume_from=str(tmp_path / "global_step_5"))
    with caplog.at_level(logging.INFO, logger="rhyme_verl"):
        HistoryActor.__ray_metadata__.modified_class(0, settings, VOCABULARY, 0.0)
    (record,) = caplog.records
    assert record.message.startswith(f"there is no history to resume in {tmp_path}") and record.levelname == "WARNING"


def test_snapshots_leave_with_the_models_that_verl_removes(make_client, tmp_path):
    async def scenario():
        client = make_client(snapshot_dir=str(tmp_path))
        fill(client)
        for step in (1, 2, 3):
            (tmp_path / f"global_step_{step}/actor").mkdir(parents=True)
            if step == 3:
                (tmp_path / "global_step_1/actor").rmdir()
                left = unfinished_file(snapshot.shard_file(tmp_path / "global_step_1" / snapshot.FOLDER, 0, 1))
                left.touch()  # by a job that was killed
            await client.finish_step(step)
            wait_for_snapshots(120)
        assert [len(snapshot.shard_files(tmp_path / f"global_step_{n}" / snapshot.FOLDER)) for n in (1, 2, 3)] == [
            0,
            1,
            1,
        ]
        assert not left.exists()

    asyncio.run(scenario())


@pytest.mark.parametrize("name", ["other/best", "other/global_step_500", "this/best"])
def test_a_history_of_another_run_is_taken_up_and_this_runs_steps_are_saved(make_client, tmp_path, name):
    async def scenario():
        folder = tmp_path / name / snapshot.FOLDER
        shard = HistoryShard(3, 1 << 40)
        add(shard, KEYS[0], 1, 1, text(KEYS[0]))
        snapshot.save(snapshot.shard_file(folder, 0, 1), shard.answers(), VOCABULARY)
        client = make_client(resume_from=str(folder.parent), snapshot_dir=str(tmp_path / "this"))
        assert await until_answered(client) == {KEYS[0]: [1]}
        save_checkpoint(tmp_path / "this/global_step_4")
        await client.finish_step(4)
        wait_for_snapshots(120)
        assert len(snapshot.shard_files(tmp_path / "this/global_step_4" / snapshot.FOLDER)) == 1

    asyncio.run(scenario())


def test_a_damaged_snapshot_is_not_taken_up_and_the_job_goes_on(make_client, tmp_path):
    async def scenario():
        folder = tmp_path / "global_step_4" / snapshot.FOLDER
        folder.mkdir(parents=True)
        (folder / "shard-0-of-1.parquet").write_bytes(b"PAR1 and nothing else")
        client = make_client(snapshot_dir=str(tmp_path), resume_from=str(folder.parent))
        fill(client)
        assert len(await until_answered(client)) == 10
        save_checkpoint(folder.parent)
        await client.finish_step(4)
        wait_for_snapshots(120)
        assert len(list(snapshot.load(folder / "shard-0-of-1.parquet"))) == 10, "the damaged file is replaced"

    asyncio.run(scenario())


def test_a_snapshot_of_another_model_is_not_taken_up_and_the_job_goes_on(make_client, tmp_path):
    async def scenario():
        folder = tmp_path / "global_step_4" / snapshot.FOLDER
        shard = HistoryShard(3, 1 << 40)
        add(shard, KEYS[0], 1, 1, text(KEYS[0]))
        snapshot.save(snapshot.shard_file(folder, 0, 1), shard.answers(), Vocabulary(2000, VOCABULARY.fingerprint))
        client = make_client(resume_from=str(folder.parent))
        assert await until_answered(client) == {}

    asyncio.run(scenario())


def test_a_weight_update_does_not_wait_for_a_snapshot(make_client, tmp_path):
    async def scenario():
        client = make_client(snapshot_dir=str(tmp_path))
        fill(client)
        await client.drain(30)
        gate = tmp_path / "gate"

        def hold_the_disk(actor):
            save = actor._save

            def slow(*arguments):
                while not gate.exists():
                    time.sleep(0.01)
                save(*arguments)

            actor._save = slow

        ray.get(actor_of().__ray_call__.remote(hold_the_disk))
        save_checkpoint(tmp_path / "global_step_7")
        await client.finish_step(7)
        client.add(KEYS[0], 5000, 8, text(3))
        assert 5000 in (await ids_of(client))[KEYS[0]], "the actor answers meanwhile"
        file = snapshot.shard_file(tmp_path / "global_step_7" / snapshot.FOLDER, 0, 1)
        assert not file.exists()
        gate.touch()
        wait_for_snapshots(120)
        assert len(list(snapshot.load(file, VOCABULARY))) == 10, "as it was when the step ended"

    asyncio.run(scenario())
