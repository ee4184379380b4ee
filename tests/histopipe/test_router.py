"""The router as an actor, with real actors as workers and replicas: waiting, death, joining, units."""

import asyncio
import functools
import itertools
import json
import logging
import multiprocessing
import os
import signal
import time
from pathlib import Path

import psutil
import pytest
import ray

from rhyme_verl.histopipe import actor_death
from rhyme_verl.histopipe.lengths_file import FILE
from rhyme_verl.histopipe.messages import Begun, Finished, Follows, Group, GroupEnded
from rhyme_verl.histopipe.router import HistoPipeRouter, Router
from rhyme_verl.histopipe.scheduler import Job
from rhyme_verl.histopipe.units import UnitShape
from rhyme_verl.histopipe.worker_lanes import WorkerLanes
from tests.helpers.checkpoints import save_checkpoint
from tests.helpers.processes import stopped
from tests.helpers.ray_node import start_ray
from tests.helpers.waiting import wait_for

LANES = 4


@pytest.fixture(scope="module", autouse=True)
def cluster():
    start_ray(num_cpus=8)
    yield
    ray.shutdown()


@ray.remote(num_cpus=0, max_concurrency=1000)
class Replica:
    """Answers after a while, and remembers what it answered and how much it had to do at once."""

    def __init__(self, seconds):
        self._seconds = seconds
        self.answered = []
        self._running = self.most = 0

    async def generate(self, answer):
        self._running += 1
        self.most = max(self.most, self._running)
        await asyncio.sleep(self._seconds * (1 + hash(answer) % 4))
        self._running -= 1
        self.answered.append(answer)

    async def rhyme_stay(self):
        await asyncio.Event().wait()

    async def seen(self):
        return self.answered, self.most

    async def pid(self):
        return os.getpid()


async def answering(replica):
    """Until the replica has begun with an answer."""
    while not (await replica.seen.remote())[1]:
        await asyncio.sleep(0.01)


@ray.remote(num_cpus=0)
class Table:
    """Stands for verl's table of groups: how many the trainer has taken is said by the test."""

    def __init__(self):
        self.shown, self.num_taken, self.failed = [], 0, []

    def show(self, uid):
        self.shown.append(uid)

    def take(self, num):
        self.num_taken += num

    def available(self, published):
        return ({*self.shown} | published) - {*self.shown[: self.num_taken]}

    def fail(self, uids):
        self.failed += uids

    def failures(self):
        return self.failed


class TableClient:
    def __init__(self):
        self.actor = Table.remote()

    def available(self, published):
        return ray.get(self.actor.available.remote(published))

    def mark_failed(self, uids):
        ray.get(self.actor.fail.remote(list(uids)))


class Client:
    """What an agent-loop worker and verl's client do."""

    def __init__(self, router, name="w0", table=None):
        self.router = router
        self.lanes = WorkerLanes(router, name)
        self.table = table
        self.published = {}

    async def answer(self, answer):
        good = await self.request(answer, await self.lanes.lane(answer))
        self.lanes.finish(Finished(answer, tokens=10 + hash(answer) % 30 if good else None, versions=(1, 1)))
        await self.lanes.end(answer, not good)
        return good

    async def request(self, answer, lane):
        name, handle = None, None if lane is None else lane.handle
        if lane is None:
            name, handle = await self.router.acquire_server.remote(request_id=str(answer))
        else:
            self.lanes.start(answer)
        try:
            await handle.generate.remote(answer)
            return True
        except ray.exceptions.ActorUnavailableError:  # a network failure
            return await self.request(answer, lane)
        except ray.exceptions.RayActorError:
            return False
        finally:
            if lane is None:
                self.router.release_server.remote(server_id=name)
            else:
                self.lanes.stop(answer)

    async def group(self, group):
        self.lanes.follow([group.uid])
        await self.lanes.open(group.uid, group.samples)
        good = await asyncio.gather(*(self.answer((group.uid, sample)) for sample in range(group.samples)))
        self.published[group.uid] = time.monotonic()
        if self.table is not None:
            await self.table.actor.show.remote(group.uid)
        self.lanes.close(group.uid)
        return good

    async def run(self, groups):
        return [one for good in await asyncio.gather(*(self.group(group) for group in groups)) for one in good]


@ray.remote(num_cpus=0)
class Worker:
    def __init__(self, router, name):
        self._client = Client(router, name)

    async def stay(self):
        await asyncio.Event().wait()

    async def run(self, groups):
        return await self._client.run(groups)


def make_router(replicas, workers=None, table=None, log_folder=None, name=None, **job):
    config = {"router_class": "rhyme_verl.histopipe.router.HistoPipeRouter"}
    router = HistoPipeRouter.options(name=name).remote(replicas, config)
    job = Job(**{"batch_size": 8, "max_running": LANES, "max_tokens": 100, "log_folder": log_folder, **job})
    ray.get(router.configure.remote(job, workers or {}, table))
    return router


def make_groups(num, step=1, samples=4):
    return [Group(f"{step}-{index}", index, samples, step) for index in range(num)]


def wanted(groups):
    return sorted((group.uid, sample) for group in groups for sample in range(group.samples))


def answered(*replicas):
    return sorted(one for replica in replicas for one in ray.get(replica.seen.remote())[0])


def test_answers_wait_in_their_worker_until_a_replica_has_room():
    replicas = {name: Replica.remote(0.02) for name in ("a", "b")}
    router, groups = make_router(replicas), make_groups(8)
    ray.get(router.submit.remote(groups, validate=False))
    assert all(asyncio.run(Client(router).run(groups)))
    assert answered(*replicas.values()) == wanted(groups)
    assert all(0 < ray.get(one.seen.remote())[1] <= LANES + 1 for one in replicas.values())
    (report,) = ray.get(router.metrics.remote())
    assert report["answers"] == 32 and 0.0 <= report["bubble"] < 1.0
    page = (Path(__file__).parents[2] / "docs/metrics.md").read_text(encoding="utf-8")
    assert not [name for name in report if name != "step" and f"`pipe/{name}`" not in page]
    status = ray.get(router.get_status.remote())
    assert status["total_inflight"] == status["waiting"] == 0 and status["active_servers"] == 2
    assert ray.get(router.metrics.remote()) == []


def test_groups_are_not_remembered_where_none_is_held_back():
    router, groups = make_router({"a": Replica.remote(0.01)}, table=TableClient()), make_groups(8)
    ray.get(router.submit.remote(groups, validate=False))
    assert all(asyncio.run(Client(router).run(groups)))
    assert ray.get(router.__ray_call__.remote(lambda self: len(self._published))) == 0


def test_what_was_granted_on_a_removed_replica_goes_elsewhere_and_one_that_joins_gets_work():
    replicas = {name: Replica.remote(0.05) for name in ("a", "b")}
    router, groups = make_router(replicas), make_groups(8)
    joined = Replica.remote(0.02)

    async def play():
        await router.submit.remote(groups, validate=False)  # lanes are granted before anybody follows
        await router.remove_servers.remote(["a"])
        running = asyncio.create_task(Client(router).run(groups))
        await asyncio.sleep(0.2)
        await router.add_servers.remote({"new": joined})
        return await asyncio.wait_for(running, 60)

    assert all(asyncio.run(play()))
    assert answered(replicas["a"]) == []
    assert answered(replicas["b"], joined) == wanted(groups)
    assert answered(joined)


def test_replicas_that_leave_and_return_are_watched_once():
    """Otherwise every return would take one of the replica's concurrent calls for ever."""
    replicas = {name: Replica.options(max_concurrency=8).remote(0.02) for name in ("a", "b")}
    router, groups = make_router(replicas), make_groups(2)
    for _ in range(12):
        ray.get(router.remove_servers.remote(["b"]))
        ray.get(router.add_servers.remote({"b": replicas["b"]}))
    assert ray.get(replicas["b"].seen.remote(), timeout=20) == ([], 0)
    ray.get(router.submit.remote(groups, validate=False))
    client = Client(router)
    assert all(asyncio.run(client.run(groups)))
    assert not client.lanes._groups
    ray.kill(replicas["b"])
    deadline = time.monotonic() + 20
    while ray.get(router.get_all_servers.remote()) != ["a"]:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_the_schedule_is_written_in_unix_time(tmp_path):
    began = time.time()
    router = make_router({"a": Replica.remote(0.01)}, log_folder=str(tmp_path))
    for step in (1, 2):
        groups = make_groups(8, step)
        ray.get(router.submit.remote(groups, validate=False))
        assert all(asyncio.run(Client(router, f"w{step}").run(groups)))
        lines, deadline = [], time.monotonic() + 20
        while len(lines) < 32 * step:
            assert time.monotonic() < deadline
            time.sleep(0.05)
            file = tmp_path / "pipe.jsonl"
            lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    assert sorted((line["uid"], line["sample"]) for line in lines[32:]) == wanted(groups)
    assert {(line["replica"], line["step"], line["lanes"]) for line in lines} == {("a", 1, LANES), ("a", 2, LANES)}
    for line in lines:
        assert line["tokens"] == 10 + hash((line["uid"], line["sample"])) % 30
        assert began - 1 < line["start"] <= line["end"] < time.time() + 1


@ray.remote(num_cpus=0)
class FinishingReplica:
    """A replica that reports a finished step to the router, as rhyme's server does."""

    async def rhyme_stay(self):
        await asyncio.Event().wait()

    async def rhyme_set_router(self, router):
        self._router = router

    async def finish_step(self, step):
        while not hasattr(self, "_router"):
            await asyncio.sleep(0.01)
        await self._router.finish_step.remote(step)


def test_lengths_are_in_a_checkpoint_when_its_step_is_finished_and_leave_with_its_model(tmp_path):
    replica, idle = Replica.remote(0.01), FinishingReplica.remote()
    router = HistoPipeRouter.remote({"a": replica}, {})
    job = Job(batch_size=8, max_running=64, max_tokens=100, checkpoints=str(tmp_path))
    old = save_checkpoint(tmp_path / "global_step_2")
    ray.get(router.configure.remote(job, {}, None))
    groups = make_groups(8)
    ray.get(router.submit.remote(groups, validate=False))
    assert all(asyncio.run(Client(router).run(groups)))
    ray.get(router.add_servers.remote({"b": idle}))
    folders = [tmp_path / f"global_step_{step}" for step in (3, 4, 5)]
    ray.get(idle.finish_step.remote(2))
    assert not (old / FILE).exists(), "the checkpoint is of an earlier run"
    for folder in folders[:2]:
        (folder / "actor").mkdir(parents=True)
        ray.get(idle.finish_step.remote(int(folder.name[-1])))
    ray.get(idle.finish_step.remote(5))
    assert [(folder / FILE).is_file() for folder in folders] == [True, True, False], "step 5 has no checkpoint"
    (folders[0] / "actor").rmdir()
    (folders[2] / "actor").mkdir(parents=True)
    ray.get(idle.finish_step.remote(6))
    ray.get(idle.finish_step.remote(5))
    assert [(folder / FILE).is_file() for folder in folders] == [False, True, True]


class Wavering:
    """Stands for an actor's method: unavailable for a moment, then dead."""

    def __init__(self):
        self.errors = [ray.exceptions.ActorUnavailableError("no network", b"0" * 16), ray.exceptions.ActorDiedError()]

    async def remote(self):
        raise self.errors.pop(0)


def test_a_network_failure_is_not_death(monkeypatch):
    monkeypatch.setattr(actor_death, "RETRY_SECONDS", 0.01)
    stay = Wavering()
    assert "died" in asyncio.run(actor_death.death_of(stay))
    assert not stay.errors


FAILING_CALLS = {"num_failures": 8, "req_failure_prob": 15, "resp_failure_prob": 15, "in_flight_failure_prob": 0}


def _run_with_a_failing_network(address, namespace, groups):
    """In a process of its own, because Ray reads which calls are to fail when it starts."""
    ray.init(address=address, namespace=namespace, log_to_driver=False, logging_level=logging.ERROR)
    router = ray.get_actor("router")
    ray.get(router.submit.remote(groups, validate=False))
    client = Client(router)
    assert all(asyncio.run(client.run(groups)))
    assert not client.lanes._is_lost
    assert len(ray.get(router.get_all_servers.remote())) == 2


@pytest.mark.slow
def test_no_report_and_no_news_is_lost_with_a_failing_network(monkeypatch):
    replicas = {name: Replica.remote(0.02) for name in ("a", "b")}
    router, groups = make_router(replicas, name="router"), make_groups(8)
    monkeypatch.setenv("RAY_testing_rpc_failure", json.dumps({"CoreWorkerService.grpc_client.PushTask": FAILING_CALLS}))
    context = ray.get_runtime_context()
    process = multiprocessing.get_context("spawn").Process(
        target=_run_with_a_failing_network, args=(context.gcs_address, context.namespace, groups)
    )
    process.start()
    process.join(120)
    assert process.exitcode == 0
    assert set(answered(*replicas.values())) == set(wanted(groups))
    (report,) = ray.get(router.metrics.remote())
    assert report["answers"] == 32, "each answer is reported once"
    status = ray.get(router.get_status.remote())
    assert status["total_inflight"] == status["waiting"] == 0


def test_a_dead_replica_gets_nothing_more_and_its_answers_fail():
    replicas = {name: Replica.remote(0.1) for name in ("a", "b")}
    router, groups = make_router(replicas), make_groups(8)
    later = make_groups(8, step=2)

    async def play():
        client = Client(router)
        await router.submit.remote(groups, validate=False)
        running = asyncio.create_task(client.run(groups))
        await answering(replicas["b"])
        ray.kill(replicas["b"])
        good = await asyncio.wait_for(running, 60)
        await asyncio.to_thread(wait_for, lambda: ray.get(router.get_all_servers.remote()) == ["a"])
        await router.submit.remote(later, validate=False)
        return good, await asyncio.wait_for(client.run(later), 60)

    good, good_later = asyncio.run(play())
    assert 0 < good.count(False) < 32
    assert all(good_later)


def test_when_the_last_replica_dies_its_answers_fail_and_no_batch_is_taken():
    replicas = {"a": Replica.remote(0.2)}
    router, groups = make_router(replicas), make_groups(8)

    async def play():
        await router.submit.remote(groups, validate=False)
        running = asyncio.create_task(Client(router).run(groups))
        await answering(replicas["a"])
        ray.kill(replicas["a"])
        return await asyncio.wait_for(running, 60)

    assert asyncio.run(play()).count(False) > LANES, "those that had no lane yet do not wait for one"
    wait_for(lambda: ray.get(router.__ray_call__.remote(lambda self: self._is_dead)))
    with pytest.raises(RuntimeError, match="all replicas are dead"):
        ray.get(router.submit.remote(make_groups(8, step=2), validate=False))


def test_a_replica_that_stops_for_a_while_loses_no_answer():
    replicas = {name: Replica.remote(0.02) for name in ("a", "b")}
    router, groups = make_router(replicas), make_groups(8)

    async def play():
        with stopped(psutil.Process(await replicas["b"].pid.remote())):
            await router.submit.remote(groups, validate=False)
            running = asyncio.create_task(Client(router).run(groups))
            await asyncio.sleep(2.0)
            assert not running.done()
        return await asyncio.wait_for(running, 60)

    assert all(asyncio.run(play()))
    assert answered(*replicas.values()) == wanted(groups)


def test_the_groups_of_a_dead_worker_are_marked_and_nothing_waits_for_them():
    replicas, table = {"a": Replica.remote(1.0)}, TableClient()
    router = HistoPipeRouter.remote(replicas, {})
    workers = {name: Worker.remote(router, name) for name in ("w0", "w1")}
    job = Job(batch_size=4, max_running=64, max_tokens=100, max_age=2, shape=UnitShape(2, 0))
    ray.get(router.configure.remote(job, workers, table))
    groups = make_groups(8)
    ray.get(router.submit.remote(groups, validate=False))
    doomed = workers["w1"].run.remote(groups[4:])
    wait_for(lambda: ray.get(replicas["a"].seen.remote())[1] == 16)
    ray.kill(workers["w1"])
    good = ray.get(workers["w0"].run.remote(groups[:4]), timeout=60)
    assert all(good), "the unit is published without the dead worker's groups"
    wait_for(lambda: len(ray.get(table.actor.failures.remote())) >= 4)
    assert sorted(ray.get(table.actor.failures.remote())) == sorted(group.uid for group in groups[4:])
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(doomed)


def kill_process(router):
    os.kill(ray.get(router.__ray_call__.remote(lambda self: os.getpid())), signal.SIGKILL)


def raise_in_it(router):
    ray.get(router.__ray_call__.remote(lambda self: setattr(self._scheduler, "finish", None)))


@pytest.mark.parametrize("end", [kill_process, pytest.param(raise_in_it, marks=pytest.mark.slow)])
def test_workers_and_verl_go_on_without_their_router(end):
    """What verl's `separate_async` calls meanwhile succeeds, and answers go to the replicas in rotation only."""
    replicas = {name: Replica.remote(0.1) for name in ("a", "b", "c")}
    router = make_router(replicas, batch_size=64, max_age=1, shape=UnitShape(2, 0))
    groups, more = make_groups(8), make_groups(8, step=2)

    async def play():
        client = Client(router)
        assert await router.submit.remote(groups, validate=False)
        running = asyncio.create_task(client.run(groups))
        while not ray.get(replicas["b"].seen.remote())[0]:
            await asyncio.sleep(0.05)
        end(router)
        await router.remove_servers.remote(["b", "c"])
        await router.add_servers.remote({"c": replicas["c"]})
        loads = (await router.clear_sticky_cache.remote())["server_loads"]
        assert set(loads) == set(await router.get_all_servers.remote()) == {"a", "c"}
        assert all(await asyncio.wait_for(running, 60))
        before = ray.get(replicas["b"].seen.remote())
        assert not await router.submit.remote(more, validate=False)
        late = Client(router, "a worker that knew no replica")
        for one, part in ((client, more[:4]), (late, more[4:])):
            assert all(await asyncio.wait_for(one.run(part), 60))
            assert not one.lanes._groups and not one.lanes._reports
        assert ray.get(replicas["b"].seen.remote()) == before

    asyncio.run(play())
    assert set(answered(*replicas.values())) == set(wanted(groups + more))
    assert ray.get(router.get_total_inflight.remote()) == 0


FAULTS = {
    "submit": ("_scheduler.submit", lambda router: router.submit(make_groups(2, step=2), validate=False)),
    "validate": ("_scheduler.submit_validation", lambda router: router.submit(make_groups(2, step=2), validate=True)),
    "take": ("_scheduler.finish", lambda router: router.report("w", 2, [Finished(("1-0", 0), 5)])),
    "deal": ("_scheduler.lanes.deal", lambda router: router._deal()),
    "metrics": ("_scheduler.take_reports", lambda router: router.metrics()),
    "add": ("_scheduler.lanes.add_replicas", lambda router: router.add_servers({"b": object()})),
    "remove": ("_scheduler.lanes.remove_replicas", lambda router: router.remove_servers(["b"])),
    "tick": ("_scheduler.lanes.expire", lambda router: router._every(0.0, router._tick)),
    "worker": ("_board.remove_groups_of", lambda router: router._watch_worker("w", Dead())),
    "replica": ("_watched", lambda router: router._watch_replica("a", router._handles["a"])),
}


class Dead:
    """Stands for the handle of a dead actor."""

    def __init__(self):
        self.stay = self.rhyme_stay = self

    async def remote(self):
        raise ray.exceptions.ActorDiedError()


@pytest.mark.parametrize("name", FAULTS)
def test_an_exception_anywhere_in_the_router_ends_it_and_is_logged_once(name, caplog):
    path, act = FAULTS[name]

    def fail(*_):
        raise ValueError("a defect")

    async def play():
        router = Router({"a": Dead(), "c": object()})
        shape = UnitShape(2, 0)
        job = Job(batch_size=2, max_running=LANES, max_tokens=100, max_age=1, shape=shape)
        await router.configure(job, {}, None)
        for task in router._tasks:
            task.cancel()
        await router.submit(make_groups(4), validate=False)
        await router.report("w", 1, [Follows(["1-0"])])
        received = (await router.news("w", 0)).number
        listening = asyncio.create_task(router.news("w", received))
        await asyncio.sleep(0)
        *owners, attribute = path.split(".")
        setattr(functools.reduce(getattr, owners, router), attribute, fail)
        await act(router)
        assert await asyncio.wait_for(listening, 10) is None
        await router.remove_servers(["a"])
        await router.add_servers({"d": "handle of d"})
        assert await router.report("w", 3, [Finished(("1-0", 1), 5)]) is None
        assert not await router.submit(make_groups(1, step=3), validate=False)
        while (await router.acquire_server("r"))[0] != "d":
            pass

    asyncio.run(play())
    (record,) = [one for one in caplog.records if one.levelno >= logging.ERROR and "is dead" not in one.message]
    assert record.message == "HistoPipe has failed, and the job goes on without it"
    assert record.exc_info is not None


def test_an_answers_age_counts_from_its_beginning_whoever_sends_its_requests():
    numbers = itertools.count(1)

    async def play():
        router = Router({"a": Dead()})
        job = Job(batch_size=2, max_running=LANES, max_tokens=100, max_age=2, shape=UnitShape(2, 1))
        await router.configure(job, {}, None)

        async def submit(groups):
            await router.submit(groups, validate=False)
            await router.report("w", next(numbers), [Follows([group.uid for group in groups])])

        async def end(*uids):
            await router.report("w", next(numbers), [GroupEnded(uid, False) for uid in uids])

        await submit(make_groups(6, step=1))
        await router.report("w", next(numbers), [Begun("1-0")])
        await end("1-1", "1-2", "1-3", "1-4")
        await submit(make_groups(2, step=2))
        await submit(make_groups(2, step=3))
        assert router._published == {"1-1", "1-2", "1-3", "1-4"}, "the slowest group goes on in the next unit"
        await end("1-5", "2-0", "2-1", "3-0")
        assert len(router._published) == 4, "it would be too old if the unit were released without it"
        await end("1-0")
        assert len(router._published) == 6 and "1-0" in router._published

    asyncio.run(play())


def test_a_unit_whose_answers_never_end_is_named_once(caplog, monkeypatch):
    monkeypatch.setattr("rhyme_verl.histopipe.router.STALL_SECONDS", 0.2)

    async def play():
        router = Router({"a": Dead()})
        job = Job(batch_size=2, max_running=LANES, max_tokens=100, max_age=1, shape=UnitShape(2, 0))
        await router.configure(job, {}, None)
        await router.submit(make_groups(4), validate=False)
        await router.report("w", 1, [Begun("1-0"), GroupEnded("1-1", False)])
        await asyncio.sleep(0.1)
        await router._tick()
        assert not said()
        await asyncio.sleep(0.2)
        for _ in range(2):
            await router._tick()

    def said():
        return [one.message for one in caplog.records if one.levelno == logging.WARNING]

    asyncio.run(play())
    (message,) = said()
    assert "3 groups are unfinished (the first: 1-0)" in message and "timeout" in message


def test_a_unit_is_published_together_and_the_next_one_waits_for_the_trainer():
    table = TableClient()
    router = make_router(
        {name: Replica.remote(0.02) for name in ("a", "b")}, table=table, max_age=1, shape=UnitShape(2, 0)
    )
    batches = [make_groups(8, step) for step in (1, 1, 2, 3)]
    batches[1] = [Group(f"1b-{index}", index, 4, 1) for index in range(8)]

    async def play():
        client = Client(router, table=table)
        for batch in batches[:2]:
            await router.submit.remote(batch, validate=False)
        tasks = [asyncio.create_task(client.group(group)) for group in batches[0]]
        await asyncio.sleep(1.0)
        assert not client.published, "half of the unit has not even begun"
        tasks += [asyncio.create_task(client.group(group)) for group in batches[1]]
        while len(client.published) < 8:
            await asyncio.sleep(0.05)
        await asyncio.sleep(1.5)
        assert len(client.published) == 8, "the trainer sees a batch at a time"
        await table.actor.take.remote(8)
        await asyncio.gather(*tasks)
        await router.submit.remote(batches[2], validate=False)
        late = [asyncio.create_task(client.group(group)) for group in batches[2]]
        await asyncio.sleep(1.0)
        status = await router.get_status.remote()
        assert status["unopened_groups"] == 8, "the trainer has a batch: the next unit has to wait"
        await table.actor.take.remote(8)
        await router.submit.remote(batches[3], validate=False)
        late += [asyncio.create_task(client.group(group)) for group in batches[3]]
        while len(client.published) < 24:
            await asyncio.sleep(0.05)
        await table.actor.take.remote(8)
        await asyncio.gather(*late)

    asyncio.run(asyncio.wait_for(play(), 60))


class LaggingTable:
    """Shows a group only after a while; one more is published while it is being read."""

    def __init__(self, router, table):
        self.router, self.table = router, table

    def available(self, published):
        self.router._published.add("meanwhile")
        return {uid for uid in self.table if self.table[uid] == "finished"} | {
            uid for uid in published if uid in self.table
        }


def test_published_groups_count_until_the_trainer_has_removed_them():
    async def play():
        router, table = Router({}), {"old": "finished", "published": "running", "other": "running"}
        assert await router._count_available() == 0, "there is no table"
        router._table = LaggingTable(router, table)
        router._published = {"published", "taken"}
        assert await router._count_available() == 3, "old, published and meanwhile"
        assert router._published == {"published", "meanwhile"}
        table.clear()
        table["meanwhile"] = "finished"
        assert await router._count_available() == 1
        assert router._published == {"meanwhile"}

    asyncio.run(play())


def test_validation_is_neither_held_back_nor_learnt_from():
    router = make_router({"a": Replica.remote(0.01)}, max_age=1, shape=UnitShape(2, 0))
    groups = make_groups(4)
    ray.get(router.submit.remote(groups, validate=True))
    assert all(asyncio.run(Client(router).run(groups)))
    assert ray.get(router.metrics.remote()) == []


def test_requests_of_no_known_answer_are_balanced_as_by_verls_own():
    router = HistoPipeRouter.remote({name: Replica.remote(0.01) for name in ("a", "b")}, {})
    names = [ray.get(router.acquire_server.remote(request_id=f"r{index}"))[0] for index in range(10)]
    assert sorted(names) == ["a"] * 5 + ["b"] * 5
    ray.get([router.release_server.remote(server_id=name) for name in names])
    assert ray.get(router.get_total_inflight.remote()) == 0
    ray.get(router.remove_servers.remote(["a", "b"]))
    with pytest.raises(RuntimeError, match="No available servers in load balancer"):
        ray.get(router.acquire_server.remote(request_id="r"))
