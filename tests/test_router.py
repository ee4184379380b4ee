"""The router as an actor, with real actors as replicas: waiting, death, joining, and many requests at once."""

import asyncio
import logging
import time
from pathlib import Path

import pytest
import ray
from ray.exceptions import RayActorError

from rhyme_verl.histopipe.dispatcher import MAX_AHEAD, Group
from rhyme_verl.histopipe.places import Finish, Places, Release
from rhyme_verl.histopipe.request_id import tag
from rhyme_verl.histopipe.router import HistoPipeRouter, Router, RouterSettings
from rhyme_verl.histopipe.trial import TURNS

LANES = 4


@pytest.fixture(scope="module", autouse=True)
def cluster():
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    yield
    ray.shutdown()


@ray.remote(num_cpus=0, max_concurrency=1000)
class Replica:
    """Answers after a while, and remembers what it answered and how much it had to do at once."""

    def __init__(self, seconds):
        self._seconds = seconds
        self.answered = []
        self._running = 0
        self.most = 0

    async def generate(self, trajectory, start):
        """Generate from token `start` on; a replica that is told to abort returns what it has."""
        self._running += 1
        self.most = max(self.most, self._running)
        await asyncio.sleep(self._seconds * (1 + hash(trajectory) % 4))
        self._running -= 1
        self.answered.append(trajectory)
        return trajectory

    async def seen(self):
        return self.answered, self.most


class Client:
    """What verl's client does, with the retry of ours."""

    def __init__(self, router):
        self.router = router
        self.places = Places(router)
        self.deaths = 0

    async def run(self, group, sample):
        trajectory = (group.uid, sample)
        request_id = tag("request", *trajectory)
        await self.places.wait_for_place(trajectory)
        while True:
            server_id, server = await self.router.acquire_server.remote(request_id=request_id)
            try:
                await server.generate.remote(trajectory, 0)
                break
            except RayActorError:
                self.deaths += 1
                assert await self.router.fail.remote(request_id)
            finally:
                self.places.release(server_id, request_id)
        self.places.end(Finish(trajectory, tokens=10 + hash(trajectory) % 30, versions=(1, 1)))
        return trajectory

    async def run_all(self, groups):
        async def prompt(group):
            done = await asyncio.gather(*(self.run(group, sample) for sample in range(group.samples)))
            await self.places.wait_until_published(group.uid)
            return done

        await self.places.follow([group.uid for group in groups])
        return [one for done in await asyncio.gather(*(prompt(group) for group in groups)) for one in done]


def make_router(replicas, mode="barrier", **settings):
    router = HistoPipeRouter.remote(replicas, {"router_class": "rhyme_verl.histopipe.router.HistoPipeRouter"})
    defaults = dict(mode=mode, forced=False, batch_size=8, prefetched=1, max_running=LANES, max_tokens=100)
    ray.get(router.configure.remote(RouterSettings(**{**defaults, **settings})))
    return router


def make_groups(num, step=1, samples=4):
    return [Group(f"{step}-{index}", index, samples, step) for index in range(num)]


def wanted(groups):
    return sorted((group.uid, sample) for group in groups for sample in range(group.samples))


def test_requests_wait_in_the_router_until_a_replica_has_room():
    replicas = {name: Replica.remote(0.02) for name in ("a", "b")}
    router, groups = make_router(replicas), make_groups(8)
    ray.get(router.submit.remote(groups, validate=False, available=0))
    assert sorted(asyncio.run(Client(router).run_all(groups))) == wanted(groups)
    seen = [ray.get(replica.seen.remote()) for replica in replicas.values()]
    assert sorted(one for answered, _ in seen for one in answered) == wanted(groups)
    assert all(0 < most <= LANES * (1 + MAX_AHEAD) < 32 for _, most in seen)
    (report,) = ray.get(router.metrics.remote())
    assert report["answers"] == 32 and 0.0 <= report["bubble"] < 1.0
    page = (Path(__file__).parents[1] / "docs/metrics.md").read_text(encoding="utf-8")
    assert not [name for name in report if name != "step" and f"`pipe/{name}`" not in page]
    status = ray.get(router.get_status.remote())
    assert status["total_inflight"] == status["waiting"] == 0 and status["active_servers"] == 2
    assert ray.get(router.metrics.remote()) == []


def test_a_prompt_of_which_some_answers_fail_while_it_waits_ends_with_the_others():
    async def run():
        router = Router({"a": object(), "b": object()})
        defaults = dict(mode="pairs", forced=True, batch_size=2, prefetched=1, max_running=LANES, max_tokens=100)
        await router.configure(RouterSettings(**defaults))

        async def generate(groups, but=()):
            for group in groups:
                for sample in range(group.samples):
                    if (group.uid, sample) not in but:
                        name, _ = await router.acquire_server(tag("request", group.uid, sample))
                        await router.take_ended([Release(name, tag("request", group.uid, sample))])
                        await router.take_ended([Finish((group.uid, sample), 10)])
                await router.end_prompt(group.uid)

        batches = [make_groups(2, step) for step in range(1, 5)]
        for batch in batches[:3]:
            await router.submit(batch, validate=False, available=0)
        failed = (batches[2][0].uid, 1)
        await router.take_ended([Finish(failed, None)])  # before its pair is opened
        await generate(batches[0] + batches[1])
        await router.submit(batches[3], validate=False, available=0)
        await generate(batches[2] + batches[3], but=[failed])
        status, reports = await router.get_status(), await router.metrics()
        for task in router._tasks:
            task.cancel()
        return status, reports, sum(router._dispatcher.lanes_of(name) for name in "ab")

    status, reports, lanes = asyncio.run(run())
    assert [report["answers"] for report in reports] == [16, 15]
    assert status["waiting"] == status["not_opened"] == status["total_inflight"] == lanes == 0


def test_no_answer_is_lost_when_a_replica_dies_another_joins_and_one_is_slow():
    replicas = {name: Replica.remote(seconds) for name, seconds in (("a", 0.05), ("b", 0.05), ("slow", 0.3))}
    router, groups = make_router(replicas), make_groups(12)
    client = Client(router)

    async def play():
        await router.submit.remote(groups, validate=False, available=0)
        answers = asyncio.create_task(client.run_all(groups))
        await asyncio.sleep(0.3)
        ray.kill(replicas["b"])
        await asyncio.sleep(0.3)
        await router.add_servers.remote({"new": (joined := Replica.remote(0.02))})
        return await asyncio.wait_for(answers, 60), joined

    answers, joined = asyncio.run(play())
    assert sorted(answers) == wanted(groups)
    assert client.deaths > 0
    assert sorted(ray.get(router.get_all_servers.remote())) == ["a", "new", "slow"]
    survivors = [ray.get(one.seen.remote()) for one in (replicas["a"], replicas["slow"], joined)]
    answered = [one for answered, _ in survivors for one in answered]
    assert len(answered) == len(set(answered)), "an answer was generated twice by living replicas"
    assert survivors[2][0], "the replica that joined got nothing"


def test_removed_replicas_get_nothing_more_and_what_was_bound_to_them_goes_elsewhere():
    replicas = {name: Replica.remote(0.05) for name in ("a", "b")}
    router, groups = make_router(replicas), make_groups(8)

    async def play():
        await router.submit.remote(groups, validate=False, available=0)  # places are taken before anybody asks
        await router.remove_servers.remote(["a"])
        return await Client(router).run_all(groups)

    assert sorted(asyncio.run(play())) == wanted(groups)
    assert ray.get(replicas["a"].seen.remote())[0] == []


def test_pairs_are_published_together():
    router = make_router({name: Replica.remote(0.02) for name in ("a", "b")}, mode="pairs")
    batches = [make_groups(8, step) for step in (1, 2, 3)]

    async def play():
        client, ends = Client(router), {}

        async def prompt(group):
            await client.run_all([group])
            ends[group.uid] = time.monotonic()

        await router.submit.remote(batches[0], validate=False, available=0)
        tasks = [asyncio.create_task(prompt(group)) for group in batches[0]]
        await asyncio.sleep(0.2)
        assert not ends
        await router.submit.remote(batches[1], validate=False, available=0)
        await asyncio.gather(*tasks, *(prompt(group) for group in batches[1]))
        await router.submit.remote(batches[2], validate=False, available=8)
        late = [asyncio.create_task(prompt(group)) for group in batches[2]]
        await asyncio.sleep(2.0)
        assert not any(task.done() for task in late), "the trainer has a batch: the next pair has to wait"
        for task in late:
            task.cancel()
        return list(ends.values())

    ends = asyncio.run(play())
    assert len(ends) == 16 and max(ends) - min(ends) < 0.5


def test_auto_tries_pairs_and_streams_and_loses_nothing_by_it(caplog):
    async def run():
        router = Router({"a": object(), "b": object()})
        settings = dict(mode="pairs", forced=False, batch_size=2, prefetched=1, max_running=LANES, max_tokens=100)
        await router.configure(RouterSettings(**settings))
        modes, answers, coming = [], 0, []
        for step in range(1, 4 * len(TURNS) + 4):
            coming += (batch := make_groups(2, step))
            await router.submit(batch, validate=False, available=0)
            if step % 2:
                continue
            modes.append((await router.get_status())["mode"])
            await asyncio.sleep(0.05 if modes[-1] == "pairs" else 0.01)
            opened = [group for group in coming if not router._intake.is_waiting(group.uid)]
            coming = [group for group in coming if group not in opened]
            for group in opened:
                for sample in range(group.samples):
                    name, _ = await router.acquire_server(tag("request", group.uid, sample))
                    await router.take_ended([Release(name, tag("request", group.uid, sample))])
                    await router.take_ended([Finish((group.uid, sample), 10)])
                    answers += 1
                await router.end_prompt(group.uid)
        reports = await router.metrics()
        for task in router._tasks:
            task.cancel()
        return modes, answers, sum(report["answers"] for report in reports)

    with caplog.at_level(logging.INFO):
        modes, answers, reported = asyncio.run(run())
    assert modes == [*(way for way in TURNS for _ in range(2)), "stream"] and reported == answers
    assert sum("it goes on with mode stream" in record.message for record in caplog.records) == 1


def test_validation_is_neither_held_back_nor_learnt_from():
    router = make_router({"a": Replica.remote(0.01)}, mode="pairs")
    groups = make_groups(4)
    ray.get(router.submit.remote(groups, validate=True, available=0))
    assert sorted(asyncio.run(Client(router).run_all(groups))) == wanted(groups)
    (report,) = ray.get(router.metrics.remote())
    assert "predictor_below_p50" not in report


def test_without_the_dispatch_module_it_balances_as_verls_own_does():
    replicas = {name: Replica.remote(0.01) for name in ("a", "b")}
    router = HistoPipeRouter.remote(replicas, {})
    names = [ray.get(router.acquire_server.remote(request_id=f"r{index}"))[0] for index in range(10)]
    assert sorted(names) == ["a"] * 5 + ["b"] * 5
    ray.get([router.release_server.remote(server_id=name, request_id="r0") for name in names])
    assert ray.get(router.get_total_inflight.remote()) == 0
    ray.get(router.remove_servers.remote(["a", "b"]))
    with pytest.raises(RuntimeError, match="No available servers in load balancer"):
        ray.get(router.acquire_server.remote(request_id="r"))
