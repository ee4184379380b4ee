"""Ray actors that play the job's other processes: `Players` its workers and replicas, `Probe` an idle caller.

Workers use the router's own client, workers and replicas the store's own clients, one each, as in a job. Only the
engines are played: an answer takes as long as its tokens at the speed of its lane.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
from rhyme_verl._core import prompt_key

from benchmarks.load.calls import Calls, Recorded, TimedActor
from benchmarks.load.job import SAMPLES, VOCABULARY, LoadedJob, prompt_of
from rhyme_verl.config import HistoryConfig
from rhyme_verl.histopipe.messages import Finished, Group
from rhyme_verl.histopipe.worker_lanes import WorkerLanes
from rhyme_verl.history.actors import shard_of
from rhyme_verl.history.client import HistoryClient
from rhyme_verl.history.server_history import FETCH_SECONDS, PROMPTS_PER_FETCH
from rhyme_verl.history.vocabulary import Vocabulary
from rhyme_verl.request_id import AnswerId, RequestTag

PROBE_SECONDS = 0.02  # between two rounds of a probe's calls
DRAIN_SECONDS = 120.0
PROMPTS_IN_FLIGHT = 64  # of `fill`, before it waits for the store


class _Replica:
    """What a replica asks of the store, as in `history.server_history`: each prompt once per step."""

    def __init__(self, history: HistoryClient, calls: Calls, num_shards: int) -> None:
        self.history = history
        self._prompts_per_fetch = PROMPTS_PER_FETCH * num_shards
        self.num_fetched_bytes = self.num_unanswered = 0
        self._calls = calls
        self._asked: set[int] = set()
        self._wanted: list[int] = []
        self._fetcher: asyncio.Task[None] | None = None

    def begin(self, key: int) -> None:
        if key in self._asked:
            return
        self._asked.add(key)
        self._wanted.append(key)
        if self._fetcher is None:
            self._fetcher = asyncio.get_running_loop().create_task(self._fetch())

    async def _fetch(self) -> None:
        while self._wanted:
            await asyncio.sleep(FETCH_SECONDS)
            most = self._prompts_per_fetch
            keys, self._wanted = self._wanted[:most], self._wanted[most:]
            batches, unanswered = await self._calls.timed("fetch", self.history.changes(dict.fromkeys(keys, 0)))
            self.num_fetched_bytes += sum(batch.tokens.nbytes for batch in batches)
            self.num_unanswered += len(unanswered)
            self._asked -= unanswered  # the prompt's next request asks again
        self._fetcher = None


@dataclass(frozen=True, slots=True)
class _Group:
    """A group of a worker, the key of its prompt, and the lengths of its answers in tokens."""

    worker: int
    group: Group
    key: int
    tokens: list[int]


@ray.remote(num_cpus=0, max_concurrency=4096)
class Players:
    """A share of the job's workers, and the requests that all replicas get from them.

    Args:
        shards: handles of the store's first shards; prompts of other shards have no history.
    """

    def __init__(
        self,
        job: LoadedJob,
        settings: HistoryConfig,
        vocabulary: Vocabulary,
        router: Any,
        shards: list[Any],
        workers: list[int],
    ) -> None:
        self._job = job
        self._num_shards = settings.shards
        self._shards = shards
        self._calls = Calls()
        timed = TimedActor(router, self._calls, ("report",))
        self._lanes = {one: WorkerLanes(timed, f"w{one}") for one in workers}
        self._workers = {one: HistoryClient(settings, vocabulary) for one in workers}
        self._clients = [HistoryClient(settings, vocabulary) for _ in range(job.replicas)]
        for client in (*self._workers.values(), *self._clients):
            client._actors = self._clients[0]._actors  # each handle costs a call of Ray's, in a job once per process
        self._replicas: list[_Replica] = []
        self._rng = np.random.default_rng(workers[0])
        self._noise = self._rng.integers(0, VOCABULARY, 1 << 20).astype(np.int32)
        self._sent: Counter[int] = Counter()  # tokens by shard
        self._plan: list[_Group] = []
        self._ends: list[float] = []  # of answers, by `time.time()`
        self._lag: asyncio.Task[None] | None = None

    async def stay(self) -> None:
        await asyncio.Event().wait()

    async def prepare(self, step: int) -> None:
        """Draw the lengths of a step's answers, so that `play` only generates."""
        groups = [(one, group) for one in self._lanes for group in self._job.groups(one, step)]
        groups.sort(key=lambda each: each[1].prompt)  # all workers begin together
        sizes = self._job.lengths(self._rng, (len(groups), SAMPLES)).tolist()
        self._plan = [
            _Group(worker, group, prompt_key(prompt_of(group.prompt)), tokens)
            for (worker, group), tokens in zip(groups, sizes, strict=True)
        ]

    async def play(self) -> dict[str, int]:
        """Generate the prepared step; return the bytes that were fetched and the prompts whose fetch failed."""
        self._lag = self._lag or asyncio.get_running_loop().create_task(self._calls.watch_lag())
        self._replicas = [_Replica(client, self._calls, len(self._shards)) for client in self._clients]
        for worker, lanes in self._lanes.items():
            lanes.follow([one.group.uid for one in self._plan if one.worker == worker])
        tasks = []
        for one in self._plan:
            tasks.append(asyncio.create_task(self._group(one)))
            await asyncio.sleep(0)  # a process of a job has one worker, whose loop is not blocked by so many groups
        await asyncio.gather(*tasks)
        return {
            "fetched_bytes": sum(replica.num_fetched_bytes for replica in self._replicas),
            "unanswered_prompts": sum(replica.num_unanswered for replica in self._replicas),
        }

    async def fill(self, step: int, prompts: list[int]) -> None:
        """Send the answers to these prompts to the store, as fast as it takes them."""
        clients = list(self._workers.values())
        for count, number in enumerate(prompts, start=1):
            key, sizes = prompt_key(prompt_of(number)), self._job.lengths(self._rng, SAMPLES).tolist()
            for sample, tokens in enumerate(sizes):
                self._store(clients[number % len(clients)], key, (f"{step}-{number}", sample), step, tokens)
            if count % PROMPTS_IN_FLIGHT == 0:
                await self.drain()
        await self.drain()

    async def end_step(self, step: int, num_replicas: int) -> None:
        """Make the calls of a share of the replicas at a change of weights."""

        async def end() -> None:
            for shard in self._shards:
                await self._calls.timed("finish_step", shard.finish_step.remote(step))
            for shard in self._shards:
                await self._calls.timed("counters", shard.counters.remote())

        await asyncio.gather(*(end() for _ in range(num_replicas)))

    async def drain(self) -> None:
        """Wait until the store has everything."""
        clients = (*self._workers.values(), *self._clients)
        await asyncio.gather(*(client.drain(DRAIN_SECONDS) for client in clients))

    async def take(self) -> tuple[Recorded, Counter[int], list[float]]:
        """Return the calls since the last time, all tokens sent to the store by shard, and when answers have ended."""
        return self._calls.take(), self._sent, self._ends

    async def _group(self, one: _Group) -> None:
        lanes, uid = self._lanes[one.worker], one.group.uid
        await lanes.open(uid, SAMPLES)
        await asyncio.gather(
            *(self._answer(one, lanes, (uid, sample), one.tokens[sample]) for sample in range(SAMPLES))
        )
        lanes.close(uid)

    async def _answer(self, one: _Group, lanes: WorkerLanes, answer: AnswerId, tokens: int) -> None:
        lane = await lanes.lane(answer)
        assert lane is not None, "HistoPipe has ended"
        replica, step = self._replicas[int(lane.replica)], one.group.step
        if self._is_driven(one.key):
            replica.begin(one.key)
        lanes.start(answer)
        await asyncio.sleep(tokens / self._job.lane_tokens_per_s)
        lanes.stop(answer)
        self._store(replica.history, one.key, answer, step, tokens)
        lanes.finish(Finished(answer, tokens, versions=(step, step)))
        self._ends.append(time.time())
        if self._is_driven(one.key):
            self._workers[one.worker].set_reward(one.key, RequestTag(answer, 0).answer_key, 1.0)
        await lanes.end(answer, failed=False)

    def _is_driven(self, key: int) -> bool:
        return shard_of(key, self._num_shards) < len(self._shards)

    def _store(self, client: HistoryClient, key: int, answer: AnswerId, step: int, tokens: int) -> None:
        if not self._is_driven(key):
            return
        start = int(self._rng.integers(0, len(self._noise) - tokens))
        client.add(key, RequestTag(answer, 0).answer_key, step, self._noise[start : start + tokens])
        self._sent[shard_of(key, self._num_shards)] += tokens


@ray.remote(num_cpus=0, max_concurrency=16)
class Probe:
    """Makes one call after another from a process that does nothing else."""

    def __init__(
        self, job: LoadedJob, settings: HistoryConfig, vocabulary: Vocabulary, router: Any, num_driven: int
    ) -> None:
        keys = [prompt_key(prompt_of(number)) for number in range(job.prompts)]
        self._keys = [key for key in keys if shard_of(key, settings.shards) < num_driven]
        self._calls = Calls()
        self._router = TimedActor(router, self._calls, ("report", "acquire_server", "release_server"))
        self._history = HistoryClient(settings, vocabulary)

    async def run(self) -> None:
        """Call for ever. A fetch asks for one prompt, as most do once a step has begun."""
        asyncio.get_running_loop().create_task(self._calls.watch_lag())
        number = 0
        while True:
            number += 1
            await self._router.report.remote("probe", number, [])
            name, _ = await self._router.acquire_server.remote(request_id=str(number))
            await self._router.release_server.remote(server_id=name)
            key = self._keys[number % len(self._keys)]
            await self._calls.timed("fetch", self._history.changes({key: 0}))
            await asyncio.sleep(PROBE_SECONDS)

    async def take(self) -> Recorded:
        return {f"probe: {kind}": found for kind, found in self._calls.take().items()}
