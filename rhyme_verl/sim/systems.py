"""The scheduling systems: verl's load balancer, HistoPipe's production code, and the order of the RhymeRL paper."""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Sequence

import numpy as np

from rhyme_verl.histopipe.lengths import LengthPredictor
from rhyme_verl.histopipe.messages import Finished, Group
from rhyme_verl.histopipe.scheduler import Job, Scheduler
from rhyme_verl.histopipe.units import UnitShape
from rhyme_verl.request_id import AnswerId
from rhyme_verl.sim.trainer import Simulation, System


class VerlBalancer(System):
    """verl's load balancer: sends each request at once to the replica with the fewest; resumed ones stay on theirs.

    Args:
        in_turn: whether to send requests to the replicas in turn instead.
    """

    def __init__(self, cluster: Simulation, *, in_turn: bool = False) -> None:
        super().__init__(cluster)
        self._load = [0] * len(cluster.replicas)
        self._replica: dict[int, int] = {}
        self._turns = itertools.cycle(range(len(cluster.replicas))) if in_turn else None

    def submit(self, groups: Sequence[int]) -> None:
        loads = [(load, replica) for replica, load in enumerate(self._load)]
        heapq.heapify(loads)
        for answer in self.cluster.answers_of(groups):
            load, replica = loads[0]
            heapq.heapreplace(loads, (load + 1, replica))
            if self._turns is not None:
                replica = next(self._turns)
            self._load[replica] += 1
            self._replica[answer] = replica
            self.cluster.run_on(answer, replica)

    def ended(self, answer: int) -> None:
        self._load[self._replica.pop(answer)] -= 1
        group = answer // self.cluster.samples
        if group not in self.cluster.unfinished:
            self.cluster.publish(group)

    def resumed(self, answers: Sequence[int]) -> None:
        for answer in answers:
            self.cluster.run_on(answer, self._replica[answer])


class TwoTier(System):
    """The order of the RhymeRL paper: each replica takes a range of the batch sorted by predicted length, in reverse
    order in every second batch. A replica begins its next range when it has finished the previous one.
    """

    def __init__(self, cluster: Simulation) -> None:
        super().__init__(cluster)
        self._ranges: list[deque[list[int]]] = [deque() for _ in range(len(cluster.replicas))]
        self._running = [0] * len(cluster.replicas)
        self._replica: dict[int, int] = {}  # of running answers
        self._batches: deque[Sequence[int]] = deque()
        self._is_reversed = itertools.cycle((False, True))

    def submit(self, groups: Sequence[int]) -> None:
        predicted = self.cluster.workload.mean.ravel()
        ranked = sorted(groups, key=lambda group: -predicted[self.cluster.prompt(group)])
        if next(self._is_reversed):
            ranked.reverse()
        self._batches.append(groups)
        parts = np.array_split(np.array(self.cluster.answers_of(ranked)), len(self.cluster.replicas))
        for replica, part in enumerate(parts):
            self._ranges[replica].append(part.tolist())
            self._begin(replica)

    def ended(self, answer: int) -> None:
        while self._batches and self.cluster.unfinished.keys().isdisjoint(self._batches[0]):
            for complete in self._batches.popleft():
                self.cluster.publish(complete)
        replica = self._replica.pop(answer)
        self._running[replica] -= 1
        self._begin(replica)

    def _begin(self, replica: int) -> None:
        if not self._running[replica] and self._ranges[replica]:
            part = self._ranges[replica].popleft()
            self._running[replica] = len(part)
            for answer in part:
                self._replica[answer] = replica
                self.cluster.run_on(answer, replica)


class HistoPipe(System):
    """The production `Scheduler`, with the workload's predictions.

    Args:
        max_age: like `pipe.max_age`.
        shape: shape of units; None: groups are opened and published at once.
        perfect: whether predictions are the mean true lengths of the groups.
    """

    def __init__(
        self, cluster: Simulation, *, max_age: int = 0, shape: UnitShape | None = None, perfect: bool = False
    ) -> None:
        super().__init__(cluster)
        job = Job(
            batch_size=cluster.batch_size,
            max_running=cluster.scenario.max_running,
            max_tokens=int(cluster.workload.max_tokens),
            max_age=max_age,
            shape=shape,
            overlaps=cluster.mode == "separate_async",
        )
        lengths = cluster.workload.lengths.mean(axis=2) if perfect else cluster.workload.mean
        self.scheduler = Scheduler(job, self, lengths=_KnownLengths(lengths.ravel()))
        self.scheduler.lanes.add_replicas([str(replica) for replica in range(len(cluster.replicas))], 0.0)
        self._replica: dict[int, int] = {}  # of answers that hold a lane
        self._running: set[int] = set()
        self._started: list[int] = []  # the scheduler has not been told

    def submit(self, groups: Sequence[int]) -> None:
        cluster = self.cluster
        wanted = [Group(str(one), cluster.prompt(one), cluster.samples, cluster.submitted[one]) for one in groups]
        self.scheduler.submit(wanted, cluster.num_available, cluster.now)
        self._tell_starts()

    def taken(self) -> None:
        self.scheduler.publish_more(self.cluster.num_available, self.cluster.now)
        self._tell_starts()

    def ended(self, answer: int) -> None:
        self._running.discard(answer)
        self._replica.pop(answer, None)
        self.scheduler.finish(Finished(self._id(answer), self.cluster.length(answer)), self.cluster.now)
        group = answer // self.cluster.samples
        if group not in self.cluster.unfinished:
            self.scheduler.end_group(str(group), False, self.cluster.now)
        self._tell_starts()

    def interrupted(self, answers: Sequence[int]) -> None:
        for answer in answers:
            self._running.discard(answer)
            self.scheduler.lanes.stop(self._id(answer), self.cluster.now)

    def resumed(self, answers: Sequence[int]) -> None:
        for answer in answers:
            if answer in self._replica:
                self._run(answer)
        self._tell_starts()

    # The scheduler's outbox.

    def grant(self, answer: AnswerId, replica: str) -> None:
        number = self._number(answer)
        self._replica[number] = int(replica)
        if number not in self._running:
            self._run(number)

    def park(self, answer: AnswerId) -> None:
        self._replica.pop(self._number(answer), None)

    def publish(self, uid: str) -> None:
        self.cluster.publish(int(uid))

    def _run(self, answer: int) -> None:
        self._running.add(answer)
        self.cluster.run_on(answer, self._replica[answer])
        self._started.append(answer)

    def _tell_starts(self) -> None:
        """Report started requests after the call that granted their lanes, as workers do."""
        while True:
            started, self._started = self._started, []
            for answer in started:
                self.scheduler.start(self._id(answer), self.cluster.now)
            self.scheduler.lanes.deal(self.cluster.now)
            if not self._started:
                return

    def _id(self, answer: int) -> AnswerId:
        group, sample = divmod(answer, self.cluster.samples)
        return str(group), sample

    def _number(self, answer: AnswerId) -> int:
        return int(answer[0]) * self.cluster.samples + answer[1]


class _KnownLengths(LengthPredictor):
    """Returns predictions that were made beforehand."""

    def __init__(self, mean: np.ndarray) -> None:
        super().__init__()
        self._mean = mean

    def predict(self, prompt_keys: np.ndarray) -> np.ndarray:
        found: np.ndarray = self._mean[prompt_keys.astype(np.int64)]
        return found

    def observe(self, prompt_keys: np.ndarray, lengths: np.ndarray, truncated: np.ndarray, step: int) -> float:
        return float("nan")
