"""Who runs what: verl's default and its simple rivals, and HistoPipe. A policy starts sequences through the cluster."""

from __future__ import annotations

import heapq
from collections import deque
from typing import Protocol

import numpy as np

from rhyme_verl.histopipe.binder import LateBinder
from rhyme_verl.histopipe.planner import Fleet, Mode, Work
from rhyme_verl.sim.workload import Workload

KAPPA = 2.0
CAP = 16384


class Cluster(Protocol):
    """What a policy sees of the simulation."""

    workload: Workload
    now: float
    num_replicas: int

    def room(self, replica: int) -> int:
        """Return how many more sequences the replica can run."""

    def may_start(self, replica: int, sequence: int) -> bool:
        """Return whether the replica's policy version, once it is dry the latest one, is new enough."""

    def start(self, replica: int, sequence: int) -> None:
        """Run a sequence."""

    def version(self, replica: int) -> int:
        """Return the policy version with which the replica would start a sequence now."""

    def needs_version(self, step: int) -> int:
        """Return the oldest policy version that may generate this step."""

    def sequences_of(self, step: int) -> np.ndarray:
        """Return the numbers of a step's sequences, group by group."""


class Policy(Protocol):
    """Starts what it can when a step opens (steps count from 0) and when a replica may have room."""

    def opened(self, step: int, cluster: Cluster) -> None: ...

    def freed(self, replica: int, cluster: Cluster) -> None: ...


class EarlyBinding:
    """Binds every sequence to a replica at once, in the order of submission, as verl's load balancer does.

    Args:
        least_in_flight: to the replica with the fewest sequences bound and not ended (verl's default); or in turn.
    """

    def __init__(self, num_replicas: int, least_in_flight: bool) -> None:
        self._least_in_flight = least_in_flight
        self._queues: list[deque[int]] = [deque() for _ in range(num_replicas)]
        self._turn = 0

    def opened(self, step: int, cluster: Cluster) -> None:
        sequences = cluster.sequences_of(step).tolist()
        if self._least_in_flight:
            running = [len(self._queues[r]) - cluster.room(r) for r in range(cluster.num_replicas)]
            loads = [(load, replica) for replica, load in enumerate(running)]
            heapq.heapify(loads)
            for sequence in sequences:
                load, replica = loads[0]
                self._queues[replica].append(sequence)
                heapq.heapreplace(loads, (load + 1, replica))
        else:
            for sequence in sequences:
                self._queues[self._turn].append(sequence)
                self._turn = (self._turn + 1) % cluster.num_replicas
        for replica in range(cluster.num_replicas):
            self.freed(replica, cluster)

    def freed(self, replica: int, cluster: Cluster) -> None:
        queue = self._queues[replica]
        while queue and cluster.room(replica) and cluster.may_start(replica, queue[0]):
            cluster.start(replica, queue.popleft())


class LongestFirst:
    """Binds a sequence when a replica has room, the longest by prediction first, of the oldest step with any."""

    def __init__(self) -> None:
        self._waiting: list[tuple[float, int]] = []

    def opened(self, step: int, cluster: Cluster) -> None:
        samples = cluster.workload.lengths.shape[2]
        predicted = np.repeat(-cluster.workload.mean[step], samples).tolist()
        for length, sequence in zip(predicted, cluster.sequences_of(step).tolist(), strict=True):
            heapq.heappush(self._waiting, (length, sequence))
        room = [(-cluster.room(replica), replica) for replica in range(cluster.num_replicas)]
        heapq.heapify(room)
        while room and self._waiting:
            free, replica = room[0]
            if free == 0 or not cluster.may_start(replica, self._waiting[0][1]):
                heapq.heappop(room)
                continue
            cluster.start(replica, heapq.heappop(self._waiting)[1])
            heapq.heapreplace(room, (free + 1, replica))

    def freed(self, replica: int, cluster: Cluster) -> None:
        while self._waiting and cluster.room(replica) and cluster.may_start(replica, self._waiting[0][1]):
            cluster.start(replica, heapq.heappop(self._waiting)[1])


class HistoPipe:
    """The planner's budgets, bound late.

    Args:
        fleet: the replicas.
        mode: whether steps overlap.
        perfect: plan with the true lengths of all sequences.
        least_seconds: smallest budget of a replica in a step.
    """

    def __init__(self, fleet: Fleet, mode: Mode, *, perfect: bool, least_seconds: float = 0.0, ready: int = 0, pair: bool = False) -> None:
        self._pair = pair
        self._fleet = fleet
        self._perfect = perfect
        self._binder = LateBinder(fleet, mode, least_seconds=least_seconds, ready_running=ready)

    def opened(self, step: int, cluster: Cluster) -> None:
        if self._pair and step % 2 == 0 and step + 1 < len(cluster.workload.lengths):
            return
        steps = [step - 1, step] if self._pair and step % 2 else [step]
        parts = [self._work(one, cluster.workload) for one in steps]
        work = Work(
            tokens=np.concatenate([one.tokens for one in parts]),
            span_tokens=np.concatenate([one.span_tokens for one in parts]),
            samples=np.concatenate([one.samples for one in parts]),
        )
        sequences = np.concatenate([cluster.sequences_of(one) for one in steps])
        self._binder.open(sequences, work, cluster.now, cluster.needs_version(step))
        for replica in range(cluster.num_replicas):
            self.freed(replica, cluster)

    def _work(self, step: int, workload: Workload) -> Work:
        lengths = workload.lengths[step]
        if self._perfect:
            true = lengths.ravel().astype(np.float64)
            return Work(tokens=true, span_tokens=true, samples=np.ones(true.size, dtype=np.int64))
        samples = np.full(len(lengths), lengths.shape[1], dtype=np.int64)
        span = np.minimum(workload.p50[step] * (workload.p90[step] / workload.p50[step]) ** KAPPA, CAP)
        return Work(tokens=workload.mean[step], span_tokens=np.maximum(span, workload.mean[step]), samples=samples)

    def freed(self, replica: int, cluster: Cluster) -> None:
        running = self._fleet.max_running - cluster.room(replica)
        for sequence in self._binder.take(replica, running, cluster.version(replica), cluster.now):
            cluster.start(replica, sequence)
