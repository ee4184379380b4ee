"""The real router and the real store of a job as Ray actors, with the processes that play the rest of the job."""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import ray
from ray.exceptions import RayError

from benchmarks.load.calls import Recorded, merged
from benchmarks.load.job import LANES, MAX_TOKENS, VOCABULARY, LoadedJob
from benchmarks.load.players import Players, Probe
from rhyme_verl.config import GIB, HistoryConfig
from rhyme_verl.histopipe.messages import Group
from rhyme_verl.histopipe.router import HistoPipeRouter
from rhyme_verl.histopipe.scheduler import Job
from rhyme_verl.history import snapshot
from rhyme_verl.history.actors import open_actor
from rhyme_verl.history.server_history import SPEAKERS
from rhyme_verl.history.store import StoreCounters
from rhyme_verl.history.vocabulary import Vocabulary

NUM_PLAYERS = 2
LIMIT_SECONDS = 120.0  # for a snapshot, and for a killed shard to answer again
POLL_SECONDS = 0.05


class ControlPlane:
    """Starts everything; a context manager that ends it.

    Args:
        num_driven: number of shards that are started, and used. A machine with a few cores can carry the router of a
            large job and one of the shards, each with the load that it has in such a job, but not all shards.
    """

    def __init__(self, job: LoadedJob, settings: HistoryConfig, num_driven: int = 1) -> None:
        self.job = job
        self.settings = settings
        vocabulary = Vocabulary(VOCABULARY, uuid.uuid4().hex)
        self.shards = [open_actor(index, settings, vocabulary, 0.0) for index in range(num_driven)]
        self.router = HistoPipeRouter.remote({str(index): None for index in range(job.replicas)}, {})
        shares = [list(range(index, job.workers, NUM_PLAYERS)) for index in range(NUM_PLAYERS)]
        self.players = [Players.remote(job, settings, vocabulary, self.router, self.shards, share) for share in shares]
        self.probe = Probe.remote(job, settings, vocabulary, self.router, num_driven)
        workers = {f"w{one}": player for player, share in zip(self.players, shares, strict=True) for one in share}
        routed = Job(batch_size=job.prompts, max_running=LANES, max_tokens=MAX_TOKENS)
        ray.get(self.router.configure.remote(routed, workers, None))
        named = {"router": self.router, **{f"shard {index}": one for index, one in enumerate(self.shards)}}
        self._pids = {name: ray.get(actor.__ray_call__.remote(_pid)) for name, actor in named.items()}
        self.probe.run.remote()

    def __enter__(self) -> ControlPlane:
        return self

    def __exit__(self, *_: object) -> None:
        for actor in (self.probe, *self.players, self.router, *self.shards):
            ray.kill(actor)

    def fill(self, step: int, num_prompts: int) -> None:
        """Send the answers to all prompts to the store."""
        calls = (
            one.fill.remote(step, list(range(index, num_prompts, NUM_PLAYERS)))
            for index, one in enumerate(self.players)
        )
        ray.get(list(calls))

    def prepare(self, step: int) -> list[Group]:
        """Return a step's groups, and let the players draw its answers."""
        ray.get([player.prepare.remote(step) for player in self.players])
        return [group for worker in range(self.job.workers) for group in self.job.groups(worker, step)]

    def submit(self, groups: list[Group]) -> float:
        """Submit a step's groups to the router; return the seconds that takes."""
        began = time.perf_counter()
        ray.get(self.router.submit.remote(groups, validate=False))
        return time.perf_counter() - began

    def play(self) -> list[Any]:
        """Start the generation of a submitted step."""
        return [player.play.remote() for player in self.players]

    def end_step(self, step: int) -> None:
        """Let the replicas that speak for all report a change of weights, and the store save its snapshot."""
        assert self.settings.snapshot_dir is not None
        checkpoint = Path(self.settings.snapshot_dir) / f"global_step_{step}"
        (checkpoint / snapshot.MODEL_FOLDER).mkdir(parents=True)
        ray.get([player.end_step.remote(step, SPEAKERS // NUM_PLAYERS) for player in self.players])
        deadline = time.monotonic() + LIMIT_SECONDS
        while len(snapshot.shard_files(checkpoint / snapshot.FOLDER)) < len(self.shards):
            if time.monotonic() > deadline:
                raise TimeoutError(f"the store did not save {checkpoint}")
            time.sleep(POLL_SECONDS)

    def kill_shard(self, index: int) -> dict[str, float]:
        """Kill a shard, which Ray starts again; return the tokens that it held, and the seconds until it answers."""
        shard, pid = self.shards[index], self._pids[f"shard {index}"]
        held, began = self.counters()[index].tokens, time.perf_counter()
        ray.kill(shard, no_restart=False)
        while time.perf_counter() - began < LIMIT_SECONDS:
            with contextlib.suppress(RayError):
                if ray.get(shard.__ray_call__.remote(_pid), timeout=1.0) != pid:
                    break
            time.sleep(POLL_SECONDS)
        return {"held_tokens": held, "seconds": time.perf_counter() - began}

    def take(self) -> tuple[Recorded, Counter[int], np.ndarray]:
        """Wait until the store has everything.

        Returns:
            The calls since the last time, all tokens sent to the store by shard, and when answers have ended.
        """
        ray.get([player.drain.remote() for player in self.players])
        played = ray.get([player.take.remote() for player in self.players])
        calls = merged([ray.get(self.probe.take.remote()), *(calls for calls, _, _ in played)])
        ends = np.concatenate([np.array(ends) for _, _, ends in played])
        return calls, sum((sent for _, sent, _ in played), Counter()), np.sort(ends)

    def counters(self) -> list[StoreCounters]:
        """Return what each shard holds and has dropped."""
        found: list[StoreCounters] = ray.get([shard.counters.remote() for shard in self.shards])
        return found

    def usage(self) -> dict[str, dict[str, float]]:
        """Return the CPU seconds so far and the GiB of memory of each actor's process."""
        found = {}
        for name, pid in self._pids.items():
            process = psutil.Process(pid)
            times, memory = process.cpu_times(), process.memory_info()
            found[name] = {"cpu_s": times.user + times.system, "gib": (memory.rss - memory.shared) / GIB}
        return found


def _pid(actor: Any) -> int:
    return os.getpid()


def spent(before: Mapping[str, Mapping[str, float]], after: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Return the CPU seconds between two measurements, by actor."""
    return {name: after[name]["cpu_s"] - before[name]["cpu_s"] for name in after}
