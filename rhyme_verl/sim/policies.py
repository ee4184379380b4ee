"""Who runs what: verl's default and its simple rivals, and HistoPipe. A policy starts sequences through the cluster."""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import replace
from typing import Literal, Protocol

import numpy as np

from rhyme_verl.histopipe.binder import LateBinder
from rhyme_verl.histopipe.migration import seconds_saved
from rhyme_verl.histopipe.planner import Mode
from rhyme_verl.histopipe.ranges import Fleet, Work
from rhyme_verl.sim.workload import Workload

Layout = Literal["shared", "halves", "mirrored"]
LOOK_SECONDS = 1.0  # between two looks for answers that outlive their prediction, on each replica
OUTLIER_SCORES = 2.5  # standard deviations at which an answer has outlived its prediction


class Cluster(Protocol):
    """What a policy sees of the simulation."""

    workload: Workload
    now: float
    num_replicas: int
    recompute_seconds_per_token: float

    def room(self, replica: int) -> int:
        """Return how many more sequences the replica can run."""

    def may_start(self, replica: int, sequence: int) -> bool:
        """Return whether the replica's policy version, once it is dry the latest one, is new enough."""

    def start(self, replica: int, sequence: int) -> None:
        """Run a sequence."""

    def version(self, replica: int) -> int:
        """Return the policy version with which the replica would start a sequence now."""

    def running(self, replica: int) -> list[tuple[int, float]]:
        """Return the replica's sequences and the tokens that each has."""

    def move(self, sequence: int, source: int, target: int) -> None:
        """Abort a sequence and resume it elsewhere."""

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
    """Binds a sequence when a replica has room, the longest by prediction first.

    Args:
        oldest_first: those of the oldest step come first; or of all that the same policy version may generate.
    """

    def __init__(self, *, oldest_first: bool = False) -> None:
        self._oldest_first = oldest_first
        self._waiting: list[tuple[int, float, int]] = []  # turn, predicted length below 0, sequence

    def opened(self, step: int, cluster: Cluster) -> None:
        samples = cluster.workload.lengths.shape[2]
        predicted = np.repeat(-cluster.workload.mean[step], samples).tolist()
        turn = step if self._oldest_first else cluster.needs_version(step)
        for length, sequence in zip(predicted, cluster.sequences_of(step).tolist(), strict=True):
            heapq.heappush(self._waiting, (turn, length, sequence))
        room = [(-cluster.room(replica), replica) for replica in range(cluster.num_replicas)]
        heapq.heapify(room)
        while room and self._waiting:
            free, replica = room[0]
            if free == 0 or not cluster.may_start(replica, self._waiting[0][2]):
                heapq.heappop(room)
                continue
            cluster.start(replica, heapq.heappop(self._waiting)[2])
            heapq.heapreplace(room, (free + 1, replica))

    def freed(self, replica: int, cluster: Cluster) -> None:
        while self._waiting and cluster.room(replica) and cluster.may_start(replica, self._waiting[0][2]):
            cluster.start(replica, heapq.heappop(self._waiting)[2])


class HistoPipe:
    """The planner's budgets, bound late.

    Args:
        fleet: the replicas.
        layout: `shared`: all replicas work on what is planned together, a step, or with `pairs` two of them. `halves`:
            every second step goes to the same half of the replicas. `mirrored`: the paper's two tiers, budgets that
            fall linearly along the replicas, the other way round in every second step.
        perfect: plan with the true lengths of all sequences.
        pairs: plan two steps that open together as one.
        migrate: move answers that outlive their prediction.
    """

    def __init__(
        self, fleet: Fleet, layout: Layout, *, perfect: bool, pairs: bool = False, migrate: bool = False
    ) -> None:
        self._fleet = fleet
        self._perfect = perfect
        self._migrate = migrate and not perfect
        self._moved: set[int] = set()
        self._spans: dict[int, float] = {}
        self._last_look = [-LOOK_SECONDS] * len(fleet.speeds)
        self._pairs = pairs
        by_speed = np.argsort(fleet.speeds, kind="stable")
        parts = [by_speed[0::2], by_speed[1::2]] if layout == "halves" else [np.arange(len(fleet.speeds))]
        mode: Mode = "pipelined" if layout == "mirrored" else "barrier"
        self._binders = [LateBinder(replace(fleet, speeds=fleet.speeds[part]), mode) for part in parts]
        self._parts = [part.tolist() for part in parts]
        self._place = {replica: (i, j) for i, part in enumerate(self._parts) for j, replica in enumerate(part)}

    def opened(self, step: int, cluster: Cluster) -> None:
        steps = [step]
        if self._pairs:
            if step % 2 == 0 and step + 1 < len(cluster.workload.lengths):
                return  # the other one opens now, too
            steps = [step - step % 2, step] if step % 2 else [step]
        work = Work.joined([self._work(one, cluster.workload) for one in steps])
        sequences = np.concatenate([cluster.sequences_of(one) for one in steps])
        if self._migrate:
            spans = np.repeat(work.spans(OUTLIER_SCORES), work.samples).tolist()
            self._spans.update(zip(sequences.tolist(), spans, strict=True))
        part = step % len(self._binders)
        self._binders[part].open(sequences, work, cluster.now, cluster.needs_version(step))
        for place in self._binders[part].turn_order:
            self.freed(self._parts[part][place], cluster)

    def freed(self, replica: int, cluster: Cluster) -> None:
        running = self._fleet.max_running - cluster.room(replica)
        part, place = self._place[replica]
        for sequence in self._binders[part].take(place, running, cluster.version(replica), cluster.now):
            cluster.start(replica, sequence)
        if self._migrate and cluster.now >= self._last_look[replica] + LOOK_SECONDS:
            self._last_look[replica] = cluster.now
            self._move_outliers(replica, part, cluster)

    def _move_outliers(self, replica: int, part: int, cluster: Cluster) -> None:
        outliers = [one for one in cluster.running(replica) if one[1] > self._spans[one[0]]]
        if not outliers:
            return
        refuges = [
            (self._fleet.max_running - cluster.room(other), other)
            for other in self._parts[part]
            if self._moved.issuperset(sequence for sequence, _ in cluster.running(other))
        ]
        heapq.heapify(refuges)
        for sequence, tokens in outliers:
            here = self._fleet.max_running - cluster.room(replica)
            if not refuges:
                break
            there, target = refuges[0]
            saved = seconds_saved(tokens, here, there, self._fleet.cost, cluster.recompute_seconds_per_token)
            if target == replica or saved <= 0.0:
                break
            cluster.move(sequence, replica, target)
            self._moved.add(sequence)
            heapq.heapreplace(refuges, (there + 1, target))

    def _work(self, step: int, workload: Workload) -> Work:
        lengths = workload.lengths[step]
        if self._perfect:
            return Work.certain(lengths.ravel().astype(np.float64))
        return Work(
            tokens=workload.mean[step],
            p50=workload.p50[step],
            p90=workload.p90[step],
            samples=np.full(len(lengths), lengths.shape[1], dtype=np.int64),
            max_tokens=workload.max_tokens,
        )
