"""What runs on the machines: `Machine.call` runs one of these functions as a Ray driver on a machine.

A driver pins actors to the machines, as verl does with its servers and workers, and returns what JSON can hold.
"""

import asyncio
import time
from pathlib import Path

import numpy as np
import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import rhyme_verl
from examples.quickstart.job import CPU_ENVIRONMENT
from rhyme_verl.commands.doctor.cluster import check_cluster
from rhyme_verl.config import HistoryConfig
from rhyme_verl.histopipe import router
from rhyme_verl.histopipe.messages import Group
from rhyme_verl.histopipe.scheduler import Job
from rhyme_verl.history.actors import ACTOR_PREFIX
from rhyme_verl.history.answers import Answer, AnswerBatch
from rhyme_verl.history.client import HistoryClient
from rhyme_verl.history.feed import AnswerPublisher, AnswerSubscriber, own_keys
from rhyme_verl.history.vocabulary import Vocabulary
from tests.helpers.checkpoints import save_checkpoint
from tests.helpers.machines import GCS, SHARED, address
from tests.histopipe.test_router import Replica, Worker

KEYS = [index << 32 for index in range(6)]  # of shard `index % shards`
VOCABULARY = Vocabulary(size=1000, fingerprint="0123456789abcdef")
TICK_SECONDS = 0.05
FETCHED_PROMPTS = 8  # of one call


@ray.remote(num_cpus=0)
class Peer:
    """A process of the job with a client of the history, such as a rollout server."""

    def open(self, **settings):
        self._client = HistoryClient(HistoryConfig(**settings), VOCABULARY)

    def identity(self):
        return {"package": str(Path(rhyme_verl.__file__).parent), "address": ray.util.get_node_ip_address()}

    async def write(self, step, keys):
        for key in keys:
            self._client.add(key, (key >> 32) + 100 * step, step, np.arange(4, dtype=np.int32) + step)

    async def held(self):
        """Ids of the answers in the store by index of the prompt; None: a shard does not respond."""
        await self._client.drain(1.0)
        batches, unanswered = await self._client.changes(dict.fromkeys(KEYS, 0))
        return None if unanswered else {batch.prompt_key >> 32: sorted(batch.ids.tolist()) for batch in batches}

    async def timed_calls(self, gone, stop, step):
        """Make all calls again and again until the file `stop` exists, and write answers when `gone` exists.

        Returns:
            The longest call of each, and the longest time for which the event loop did not run, in seconds.
        """
        longest = dict.fromkeys(("changes", "finish_step", "counters", "stall"), 0.0)

        async def watch_loop():
            while True:
                before = time.monotonic()
                await asyncio.sleep(TICK_SECONDS)
                longest["stall"] = max(longest["stall"], time.monotonic() - before - TICK_SECONDS)

        async def repeat(name, call):
            while not Path(stop).exists():
                before = time.monotonic()
                await call()
                longest[name] = max(longest[name], time.monotonic() - before)
                await asyncio.sleep(TICK_SECONDS)

        async def write():
            while not Path(gone).exists():
                await asyncio.sleep(TICK_SECONDS)
            await self.write(step, KEYS)

        watcher = asyncio.create_task(watch_loop())
        await asyncio.gather(
            write(),
            repeat("changes", lambda: self._client.changes(dict.fromkeys(KEYS, 0))),
            repeat("finish_step", lambda: self._client.finish_step(step)),
            repeat("counters", self._client.counters),
        )
        watcher.cancel()
        return longest

    async def finish_step(self, step):
        await self._client.drain(30.0)
        await self._client.finish_step(step)

    async def publish(self, subscriber):
        """Publish answers to the subscriber, another Peer."""
        publisher = AnswerPublisher(ray.util.get_node_ip_address())
        publisher.allow([await subscriber.feed_key.remote()])
        await publisher.accept(subscriber.subscribe.remote(publisher.address))
        for key in KEYS:
            publisher.publish(AnswerBatch.of(key, 1, [Answer(key >> 32, 1, np.arange(3, dtype=np.int32).tobytes())]))
        received = await subscriber.received.remote()
        publisher.close()
        return publisher.address.endpoint, received

    def feed_key(self):
        return own_keys()[0].decode()

    async def subscribe(self, address):
        self._received = []
        self._subscriber = await asyncio.to_thread(
            AnswerSubscriber, address, lambda key, tokens, *_: self._received.append((key >> 32, tokens.tolist()))
        )

    async def received(self):
        deadline = time.monotonic() + 60
        while len(self._received) < len(KEYS) and time.monotonic() < deadline:
            await asyncio.sleep(TICK_SECONDS)
        await asyncio.to_thread(self._subscriber.close)
        return self._received


def nodes(num):
    """Wait until the cluster has `num` nodes, and return their addresses."""
    while True:
        try:
            ray.init(log_to_driver=False)
            break
        except Exception as error:  # no cluster yet; Ray raises nothing more specific
            print(error, flush=True)
            time.sleep(1.0)
    alive = [node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]]
    while len(alive) < num:
        time.sleep(0.5)
        alive = [node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]]
    return sorted(alive)


def _on(index):
    """Where machine `index` is."""
    (node,) = [one["NodeID"] for one in ray.nodes() if one["Alive"] and one["NodeManagerAddress"] == address(index)]
    return NodeAffinitySchedulingStrategy(node, soft=False)


def _peers(**settings):
    """A peer on each of the first two machines."""
    ray.init(log_to_driver=False)
    peers = [Peer.options(scheduling_strategy=_on(index)).remote() for index in range(2)]
    ray.get([peer.open.remote(**settings) for peer in peers])
    return peers


def _until(condition, seconds=240.0):
    """Wait until a call returns something true, and return that."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "too late"
        time.sleep(0.2)
    return found


def _shard_addresses(shards):
    name = f"rhyme_history_{VOCABULARY.fingerprint}_{VOCABULARY.size}_{{}}_of_{shards}"
    actors = [ray.get_actor(name.format(index)) for index in range(shards)]
    return ray.get([actor.__ray_call__.remote(lambda self: ray.util.get_node_ip_address()) for actor in actors])


def _shard_of_the_job(index):
    """A shard that the job keeps on machine `index`, and prompts that it has answers of; None: there is none yet."""
    for actor in ray.util.list_named_actors(all_namespaces=True):
        if actor["name"].startswith(ACTOR_PREFIX):
            shard = ray.get_actor(actor["name"], namespace=actor["namespace"])
            where, keys = ray.get(shard.__ray_call__.remote(_place_and_prompts))
            if where == address(index) and keys:
                return shard, keys
    return None


def _place_and_prompts(actor):
    return ray.util.get_node_ip_address(), sorted({key for key, _ in actor._shard.answers()})[:FETCHED_PROMPTS]


def time_fetches(index):
    """Read answers of a few prompts from a job's shard on machine `index`, ten times a second, until the job ends.

    Returns:
        How many reads there were, and their median and 99th percentile in milliseconds.
    """
    ray.init(log_to_driver=False)
    shard, keys = _until(lambda: _shard_of_the_job(index), seconds=900.0)
    wanted, seconds = dict.fromkeys(keys, 0), []
    try:
        while True:
            began = time.monotonic()
            assert ray.get(shard.changes.remote(wanted))
            seconds.append(time.monotonic() - began)
            time.sleep(0.1)
    except RayError:
        pass  # the job has ended
    return {"reads": len(seconds), "ms": [round(1000 * one, 1) for one in np.quantile(seconds, (0.5, 0.99)).tolist()]}


def share_history():
    first, second = _peers(shards=2)
    ray.get(first.write.remote(1, KEYS))
    _until(lambda: ray.get(first.held.remote()) is not None)
    identities = ray.get([peer.identity.remote() for peer in (first, second)])
    return {"identities": identities, "shards": _shard_addresses(2), "held": ray.get(second.held.remote())}


def feed():
    first, second = _peers()
    return ray.get(first.publish.remote(second), timeout=120)


def route():
    """A router beside the driver, and a worker and a replica on each machine; return what each replica answered."""
    ray.init(log_to_driver=False)
    replicas = {str(index): Replica.options(scheduling_strategy=_on(index)).remote(0.01) for index in range(2)}
    routing = router.HistoPipeRouter.remote(replicas, {})  # looked up when Ray runs, as verl does
    workers = {f"w{i}": Worker.options(scheduling_strategy=_on(i)).remote(routing, f"w{i}") for i in range(2)}
    job = Job(batch_size=8, max_running=4, max_tokens=100)
    ray.get(routing.configure.remote(job, workers, None))
    groups = {name: [Group(f"{name}-{i}", i, 4, 1) for i in range(4)] for name in workers}
    ray.get(routing.submit.remote([group for each in groups.values() for group in each], validate=False))
    good = ray.get([workers[name].run.remote(each) for name, each in groups.items()], timeout=120)
    answered = ray.get([replica.seen.remote() for replica in replicas.values()])
    where = ray.get(routing.__ray_call__.remote(lambda self: ray.util.get_node_ip_address()))
    return {"router": where, "good": good, "answered": [len(answers) for answers, _ in answered]}


def doctor(*folders):
    """What `rhyme doctor --cluster` finds: verdicts and texts."""
    findings = check_cluster(GCS, [Path(folder) for folder in folders], CPU_ENVIRONMENT)
    return [(one.verdict.value, one.text) for one in findings]


def call_for(seconds):
    """Call shards on both machines from machine 0 for so long, and write answers meanwhile.

    Returns:
        The longest calls, and the answers that are held then.
    """
    first, second = _peers(shards=2)
    ray.get(first.write.remote(1, KEYS))
    _until(lambda: ray.get(second.held.remote()) is not None)
    gone, stop = SHARED / "calls.gone", SHARED / "calls.stop"
    calls = first.timed_calls.remote(str(gone), str(stop), 2)
    gone.touch()
    time.sleep(seconds)
    stop.touch()
    longest = ray.get(calls)
    _until(lambda: (ray.get(second.held.remote()) or {}).get(0, []).count(200))
    return {"longest": longest, "held": ray.get(second.held.remote())}


def lose_a_shard(name, returns, rejoins):
    """Machine 1 holds the only shard. The test cuts it off when `name.ready` exists, and then writes `name.gone`; if
    the machine returns, it writes `name.back`. If it joins the cluster again later, it does when `name.lost` exists.

    Returns:
        The longest calls on machine 0 meanwhile, and the answers that are held before and after, read on machine 0 or,
        if it has joined again, on machine 1.
    """
    checkpoints = SHARED / name
    peer, _ = _peers(shards=1, snapshot_dir=str(checkpoints))
    save_checkpoint(checkpoints / "global_step_1")
    ray.get(peer.write.remote(1, KEYS))
    ray.get(peer.finish_step.remote(1))
    _until(lambda: list((checkpoints / "global_step_1").rglob("*.parquet")))
    before, where = ray.get(peer.held.remote()), _shard_addresses(1)
    stop = SHARED / f"{name}.stop"
    gone = SHARED / f"{name}.gone"
    calls = peer.timed_calls.remote(str(gone), str(stop), 2)
    (SHARED / f"{name}.ready").touch()
    _until(gone.exists)
    if returns:
        _until((SHARED / f"{name}.back").exists)
    watch = time.monotonic()
    second = Peer.options(scheduling_strategy=_on(0)).remote()  # `peer` is busy
    ray.get(second.open.remote(shards=1, snapshot_dir=str(checkpoints)))
    _until(lambda: (ray.get(second.held.remote()) or {}).get(0, []).count(200))
    seconds = time.monotonic() - watch
    stop.touch()
    longest = ray.get(calls)
    if rejoins:
        (SHARED / f"{name}.lost").touch()
        _until(lambda: sum(node["Alive"] for node in ray.nodes()) == 2)
        second = Peer.options(scheduling_strategy=_on(1)).remote()
        ray.get(second.open.remote(shards=1, snapshot_dir=str(checkpoints)))
        _until(lambda: ray.get(second.held.remote()) is not None)
    return {"before": before, "was": where, "is": _shard_addresses(1), "after": ray.get(second.held.remote()),
            "longest": longest, "seconds": seconds}  # fmt: skip
