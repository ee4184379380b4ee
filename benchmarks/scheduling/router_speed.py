"""Measures HistoPipe's router: time per decision, CPU time per answer, and the delay while it saves lengths."""

from __future__ import annotations

import asyncio
import logging
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import ray
from verl.workers.rollout.router import GlobalRequestLoadBalancer

from benchmarks.common.result_files import bar
from rhyme_verl.histopipe.lengths_file import FILE
from rhyme_verl.histopipe.messages import Finished, Group
from rhyme_verl.histopipe.router import HistoPipeRouter
from rhyme_verl.histopipe.scheduler import Job, Scheduler
from rhyme_verl.histopipe.worker_lanes import WorkerLanes
from rhyme_verl.history import snapshot

LANES = 128
SAMPLES = 16
MAX_TOKENS = 16384
WORKERS = 2
ANSWERS = 20_000  # number that goes through the actor
SAVED_PROMPTS = 300_000
SAVING_LIMIT_SECONDS = 120.0


class _Grants:
    """An outbox that stores grants."""

    def __init__(self) -> None:
        self.granted: deque = deque()

    def grant(self, answer: Any, replica: str) -> None:
        self.granted.append(answer)

    def park(self, answer: Any) -> None: ...

    def publish(self, uid: str) -> None: ...


def decision_microseconds(replicas: int, groups: int, seed: int = 0) -> dict[str, float]:
    """Run a batch through the scheduler; answers end in the order in which they started.

    Returns:
        The mean and 99th percentile of microseconds per answer in the scheduler, and the seconds of `submit`.
    """
    rng = np.random.default_rng(seed)
    outbox = _Grants()
    scheduler = Scheduler(Job(batch_size=groups, max_running=LANES, max_tokens=MAX_TOKENS), outbox)
    scheduler.lanes.add_replicas([str(index) for index in range(replicas)], 0.0)
    lengths = rng.lognormal(np.log(2000.0), 0.9, groups * SAMPLES).clip(1, MAX_TOKENS).astype(int)
    prompts = np.repeat(np.arange(groups, dtype=np.uint64), SAMPLES)
    scheduler.lengths.observe(prompts, lengths, lengths >= MAX_TOKENS, 0)
    batch = [Group(f"g{index}", index, SAMPLES, 1) for index in range(groups)]
    began = time.perf_counter()
    scheduler.submit(batch, 0, 0.0)
    opening, seconds, now, running = time.perf_counter() - began, [], 0.0, deque()
    while outbox.granted or running:
        now += 0.01
        began = time.perf_counter()
        while outbox.granted:
            answer = outbox.granted.popleft()
            scheduler.start(answer, now)
            running.append(answer)
            if len(running) > 1 and outbox.granted:
                began = time.perf_counter()
        answer = running.popleft()
        scheduler.lanes.stop(answer, now)
        scheduler.finish(Finished(answer, 100), now)
        seconds.append(time.perf_counter() - began)
    return {
        "replicas": replicas,
        "answers": groups * SAMPLES,
        "open_seconds": opening,
        "mean_us": 1e6 * float(np.mean(seconds)),
        "p99_us": 1e6 * float(np.quantile(seconds, 0.99)),
    }


@ray.remote(num_cpus=0)
class _Worker:
    """A worker whose answers take 20 ms."""

    def __init__(self, router: Any, name: str) -> None:
        self._router = router
        self._name = name

    async def stay(self) -> None:
        await asyncio.Event().wait()

    async def run(self, groups: list[Group]) -> None:
        lanes = WorkerLanes(self._router, self._name)
        lanes.follow([group.uid for group in groups])
        await asyncio.gather(*(self._group(lanes, group) for group in groups))

    async def _group(self, lanes: WorkerLanes, group: Group) -> None:
        await lanes.open(group.uid, group.samples)
        await asyncio.gather(*(self._answer(lanes, (group.uid, sample)) for sample in range(group.samples)))
        lanes.close(group.uid)

    async def _answer(self, lanes: WorkerLanes, answer: Any) -> None:
        await lanes.lane(answer)
        lanes.start(answer)
        await asyncio.sleep(0.02)
        lanes.stop(answer)
        lanes.finish(Finished(answer, 100, versions=(1, 1)))
        await lanes.end(answer, failed=False)

    async def run_verl(self, requests: int) -> None:
        """Make the calls of verl's client to its balancer for this number of requests."""

        async def request(number: int) -> None:
            name, _ = await self._router.acquire_server.remote(request_id=f"{self._name}-{number}")
            await asyncio.sleep(0.02)
            self._router.release_server.remote(server_id=name)

        for first in range(0, requests, 2000):
            await asyncio.gather(*(request(first + number) for number in range(min(2000, requests - first))))


def _cpu_seconds(actor: Any) -> float:
    return ray.get(actor.__ray_call__.remote(lambda self: time.process_time()))


def actor_microseconds(replicas: int) -> dict[str, float]:
    """Return the CPU time of the router's process per answer, and that of verl's own balancer per request."""
    names = {str(index): None for index in range(replicas)}
    router = HistoPipeRouter.remote(names, {})
    workers = {f"w{index}": _Worker.remote(router, f"w{index}") for index in range(WORKERS)}
    job = Job(batch_size=ANSWERS // SAMPLES, max_running=LANES, max_tokens=MAX_TOKENS)
    ray.get(router.configure.remote(job, workers, None))
    groups = [Group(f"g{index}", index, SAMPLES, 1) for index in range(ANSWERS // SAMPLES)]
    before = _cpu_seconds(router)
    ray.get(router.submit.remote(groups, validate=False))
    ray.get([worker.run.remote(groups[index::WORKERS]) for index, worker in enumerate(workers.values())])
    spent = _cpu_seconds(router) - before
    verl = ray.remote(num_cpus=0)(GlobalRequestLoadBalancer).remote(names)
    theirs = [_Worker.remote(verl, f"v{index}") for index in range(WORKERS)]
    before = _cpu_seconds(verl)
    ray.get([worker.run_verl.remote(ANSWERS // WORKERS) for worker in theirs])
    verl_spent = _cpu_seconds(verl) - before
    for actor in (router, verl, *workers.values(), *theirs):
        ray.kill(actor)
    return {"replicas": replicas, "us_per_answer": 1e6 * spent / ANSWERS, "verl_us": 1e6 * verl_spent / ANSWERS}


def saving_lag(prompts: int = SAVED_PROMPTS) -> dict[str, float]:
    """Return the longest and the median call of the router while it saves the lengths of many prompts."""
    with tempfile.TemporaryDirectory() as folder:
        router = HistoPipeRouter.remote({"a": None}, {})
        job = Job(batch_size=1, max_running=LANES, max_tokens=MAX_TOKENS, checkpoints=folder)
        ray.get(router.configure.remote(job, {}, None))

        def fill(self: Any) -> None:
            lengths = np.full(prompts * SAMPLES, 100)
            keys = np.repeat(np.arange(prompts, dtype=np.uint64), SAMPLES)
            self._scheduler.lengths.observe(keys, lengths, lengths < 0, 1)

        ray.get(router.__ray_call__.remote(fill))
        path = Path(folder) / "global_step_1" / FILE
        (path.parents[1] / snapshot.MODEL_FOLDER).mkdir(parents=True)
        seconds, began = [], time.perf_counter()
        router.finish_step.remote(1)
        while not (seconds and path.is_file()):
            before = time.perf_counter()
            if before - began > SAVING_LIMIT_SECONDS:
                raise TimeoutError(f"the router did not save {path}")
            ray.get(router.get_all_servers.remote())
            seconds.append(time.perf_counter() - before)
        found = {
            "prompts": prompts,
            "longest_call_ms": 1e3 * max(seconds),
            "median_call_ms": 1e3 * float(np.median(seconds)),
            "seconds": time.perf_counter() - began,
        }
        ray.kill(router)
    return found


def measure() -> dict[str, Any]:
    """Run all measurements (~1 minute)."""
    decisions = [decision_microseconds(64, 1024), decision_microseconds(4096, 65536 // SAMPLES * 4)]
    ray.init("local", num_cpus=8, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    try:
        actors = [actor_microseconds(replicas) for replicas in (64, 4096)]
        return {"decisions": decisions, "actor": actors, "saving": saving_lag()}
    finally:
        ray.shutdown()


def bars_of(measured: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the bars of the measurements."""
    bars = {
        f"router, {one['replicas']:,} replicas: processor us per answer, Ray included": bar(
            one["us_per_answer"], at_most=150.0
        )
        for one in measured["actor"]
    }
    lag = measured["saving"]["longest_call_ms"]
    bars["router: longest call while 300,000 prompts are saved, ms"] = bar(lag, at_most=50.0)
    return bars
