"""What HistoPipe's router costs: microseconds a decision, and the processor time of answers that wait."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from typing import Any

import numpy as np
import ray

from rhyme_verl.histopipe.dispatcher import Dispatcher, Group
from rhyme_verl.histopipe.places import Places
from rhyme_verl.histopipe.router import HistoPipeRouter, RouterSettings

LANES = 128
SAMPLES = 16
MAX_TOKENS = 16384
IDLE_SECONDS = 10.0
WAITING = 10_000


def decision_microseconds(replicas: int, groups: int, seed: int = 0) -> dict[str, float]:
    """Play a whole pair of steps through the dispatcher; answers end in the order of their lengths.

    Returns:
        Microseconds an answer spends in `ask`, `release` and `finish` (which binds the next one) together, median and
        99th percentile, and the seconds that opening (with planning) takes.
    """
    rng = np.random.default_rng(seed)
    dispatcher = Dispatcher(max_running=LANES, max_tokens=MAX_TOKENS)
    dispatcher.add_replicas([str(index) for index in range(replicas)], 0.0)
    batch = [Group(f"g{index}", index, SAMPLES, 1) for index in range(groups)]
    lengths = rng.lognormal(np.log(2000.0), 0.9, groups * SAMPLES).clip(1, MAX_TOKENS)
    lengths = dict(zip(((group.uid, sample) for group in batch for sample in range(SAMPLES)), lengths, strict=True))
    prompts = np.repeat(np.arange(groups, dtype=np.uint64), SAMPLES)
    past = np.array(list(lengths.values()))
    dispatcher.predictor.observe(prompts, past, past >= MAX_TOKENS, 0)
    started = time.perf_counter()
    bound = deque(dispatcher.open(batch, planned=True, now=0.0))
    opening = time.perf_counter() - started
    running: deque = deque()
    seconds = []
    now = 0.0
    while bound or running:
        before = time.perf_counter()
        spent = 0.0
        while bound:
            trajectory = bound.popleft()
            running.append((trajectory, dispatcher.ask(trajectory, now)))
            spent = time.perf_counter() - before
        now += 0.01
        trajectory, replica = running.popleft()
        before = time.perf_counter()
        dispatcher.release(trajectory, replica, now)
        more, _, _ = dispatcher.finish(trajectory, int(lengths[trajectory]), False, now)
        bound.extend(more)
        seconds.append(time.perf_counter() - before + (spent if len(more) <= 1 else 0.0))
    return {
        "replicas": replicas,
        "answers": groups * SAMPLES,
        "open_seconds": opening,
        "median_us": 1e6 * float(np.median(seconds)),
        "mean_us": 1e6 * float(np.mean(seconds)),
        "p99_us": 1e6 * float(np.quantile(seconds, 0.99)),
    }


def waiting_cpu_share() -> dict[str, float]:
    """Let 10,000 answers wait for two full replicas; return the processor time of the router and of their worker, by
    the time that passes, above that of a router with nothing to do.
    """
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    try:
        router = HistoPipeRouter.remote({"a": None, "b": None}, {})
        settings = RouterSettings(
            mode="barrier", forced=False, batch_size=1, prefetched=0, max_running=LANES, max_tokens=MAX_TOKENS
        )
        ray.get(router.configure.remote(settings))
        idle = _cpu_share(router)
        groups = [Group(f"g{index}", index, SAMPLES, 1) for index in range(WAITING // SAMPLES + 2 * LANES)]
        ray.get(router.submit.remote(groups, validate=False, available=0))
        worker = asyncio.run(_wait_in_worker(router, groups))
        return {**worker, "router_idle_share": idle}
    finally:
        ray.shutdown()


async def _wait_in_worker(router: Any, groups: list[Group]) -> dict[str, float]:
    places = Places(router)
    await places.follow([group.uid for group in groups])
    tasks = [
        asyncio.create_task(places.wait_for_place((group.uid, sample)))
        for group in groups
        for sample in range(group.samples)
    ]
    await asyncio.sleep(2.0)
    waiting = sum(not task.done() for task in tasks)
    before, cpu = time.perf_counter(), time.process_time()
    router_before = await router.__ray_call__.remote(lambda self: time.process_time())
    await asyncio.sleep(IDLE_SECONDS)
    router_cpu = await router.__ray_call__.remote(lambda self: time.process_time()) - router_before
    seconds = time.perf_counter() - before
    worker_cpu = time.process_time() - cpu
    for task in tasks:
        task.cancel()
    return {
        "waiting": waiting,
        "router_share": router_cpu / seconds,
        "worker_share": worker_cpu / seconds,
    }


def _cpu_share(router: Any) -> float:
    before = ray.get(router.__ray_call__.remote(lambda self: time.process_time()))
    time.sleep(IDLE_SECONDS)
    return (ray.get(router.__ray_call__.remote(lambda self: time.process_time())) - before) / IDLE_SECONDS


def measure() -> dict[str, Any]:
    """Measure all of it (~1 minute)."""
    return {
        "decisions": [decision_microseconds(64, 1024), decision_microseconds(4096, 65536 // SAMPLES * 4)],
        "waiting": waiting_cpu_share(),
    }
