"""The scheduling systems: verl's load balancer, HistoPipe's production code, and the order of the RhymeRL paper."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence

import numpy as np

from rhyme_verl.histopipe.lengths import LengthPredictor
from rhyme_verl.histopipe.messages import Finished, Group
from rhyme_verl.histopipe.scheduler import Job, Scheduler
from rhyme_verl.histopipe.units import UnitShape
from rhyme_verl.request_id import AnswerId
from rhyme_verl.sim.trainer import Simulation


class _Groups:
    """Counts the unfinished answers of groups, and publishes each complete group at once."""

    def __init__(self, cluster: Simulation) -> None:
        self.cluster = cluster
        self._left: dict[int, int] = {}

    def submit(self, groups: Sequence[int], available: int) -> None:
        self._left.update((group, self.cluster.samples) for group in groups)

    def taken(self, available: int) -> None: ...

    def ended(self, answer: int) -> None:
        group = answer // self.cluster.samples
        self._left[group] -= 1
        if not self._left[group]:
            del self._left[group]
            self.cluster.publish(group)

    def answers(self, groups: Sequence[int]) -> list[int]:
        samples = self.cluster.samples
        return [group * samples + sample for group in groups for sample in range(samples)]


class VerlBalancer(_Groups):
    """verl's load balancer: sends each request at once to the replica with the fewest; resumed ones stay on theirs.

    Args:
        in_turn: whether to send requests to the replicas in turn instead.
    """

    def __init__(self, cluster: Simulation, *, in_turn: bool = False) -> None:
        super().__init__(cluster)
        self._loads = [(0, replica) for replica in range(cluster.num_replicas)]
        self._load = [0] * cluster.num_replicas
        self._replica: dict[int, int] = {}
        self._in_turn = in_turn
        self._turn = 0

    def submit(self, groups: Sequence[int], available: int) -> None:
        super().submit(groups, available)
        loads = [(load, replica) for replica, load in enumerate(self._load)]
        heapq.heapify(loads)
        for answer in self.answers(groups):
            load, replica = loads[0]
            if self._in_turn:
                replica, self._turn = self._turn, (self._turn + 1) % self.cluster.num_replicas
            heapq.heapreplace(loads, (load + 1, replica))
            self._load[replica] += 1
            self._replica[answer] = replica
            self.cluster.run_on(answer, replica)

    def ended(self, answer: int) -> None:
        self._load[self._replica.pop(answer)] -= 1
        super().ended(answer)

    def interrupted(self, answers: Sequence[int]) -> None: ...

    def resumed(self, answers: Sequence[int]) -> None:
        for answer in answers:
            self.cluster.run_on(answer, self._replica[answer])


class TwoTier(_Groups):
    """The order of the RhymeRL paper: each replica takes a range of the batch sorted by predicted length, in reverse
    order in every second batch. A replica begins its next range when it has finished the previous one.
    """

    def __init__(self, cluster: Simulation) -> None:
        super().__init__(cluster)
        self._ranges: list[deque[list[int]]] = [deque() for _ in range(cluster.num_replicas)]
        self._running = [0] * cluster.num_replicas
        self._replica: dict[int, int] = {}  # of running answers
        self._batches: deque[list[int]] = deque()
        self._num_batches = 0

    def submit(self, groups: Sequence[int], available: int) -> None:
        super().submit(groups, available)
        workload = self.cluster.workload
        ranked = sorted(groups, key=lambda group: -workload.mean[self.cluster.row(group)])
        if self._num_batches % 2:
            ranked.reverse()
        self._num_batches += 1
        self._batches.append(list(groups))
        for replica, part in enumerate(np.array_split(np.array(self.answers(ranked)), self.cluster.num_replicas)):
            self._ranges[replica].append(part.tolist())
            self._begin(replica)

    def ended(self, answer: int) -> None:
        replica, group = self._replica.pop(answer), answer // self.cluster.samples
        self._left[group] -= 1
        while self._batches and not any(self._left[group] for group in self._batches[0]):
            for complete in self._batches.popleft():
                self.cluster.publish(complete)
        self._running[replica] -= 1
        self._begin(replica)

    def interrupted(self, answers: Sequence[int]) -> None: ...

    def resumed(self, answers: Sequence[int]) -> None: ...

    def _begin(self, replica: int) -> None:
        if not self._running[replica] and self._ranges[replica]:
            part = self._ranges[replica].popleft()
            self._running[replica] = len(part)
            for answer in part:
                self._replica[answer] = replica
                self.cluster.run_on(answer, replica)


class HistoPipe:
    """The production `Scheduler`, with the workload's predictions.

    Args:
        max_age: like `pipe.max_age`.
        shape: shape of units; None: groups are opened and published at once.
        perfect: whether predictions are the mean true lengths of the groups.
    """

    def __init__(
        self, cluster: Simulation, *, max_age: int = 0, shape: UnitShape | None = None, perfect: bool = False
    ) -> None:
        self.cluster = cluster
        job = Job(
            batch_size=cluster.batch_size,
            max_running=cluster.fleet.max_running,
            max_tokens=int(cluster.workload.max_tokens),
            max_age=max_age,
            shape=shape,
            overlaps=cluster.trainer.mode == "separate_async",
        )
        lengths = cluster.workload.lengths.mean(axis=2) if perfect else cluster.workload.mean
        self.scheduler = Scheduler(job, self, lengths=_KnownLengths(lengths.ravel()))
        self.scheduler.lanes.add_replicas([str(replica) for replica in range(cluster.num_replicas)], 0.0)
        self._replica: dict[int, int] = {}  # of answers that hold a lane
        self._running: set[int] = set()
        self._started: list[int] = []  # the scheduler has not been told
        self._left: dict[int, int] = {}

    def submit(self, groups: Sequence[int], available: int) -> None:
        samples, steps = self.cluster.samples, len(self.cluster.workload.lengths)
        self._left.update((group, samples) for group in groups)
        size = steps * self.cluster.batch_size
        wanted = [Group(str(group), group % size, samples, self.cluster.step_of(group)) for group in groups]
        self.scheduler.submit(wanted, available, self.cluster.now)
        self._tell_starts()

    def taken(self, available: int) -> None:
        self.scheduler.publish_more(available, self.cluster.now)
        self._tell_starts()

    def ended(self, answer: int) -> None:
        group, sample = divmod(answer, self.cluster.samples)
        self._running.discard(answer)
        self._replica.pop(answer, None)
        finished = Finished((str(group), sample), self.cluster.length(answer))
        self.scheduler.finish(finished, self.cluster.now)
        self._left[group] -= 1
        if not self._left[group]:
            del self._left[group]
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

    def grant(self, answer: AnswerId, replica: str, predicted_tokens: float) -> None:
        number = int(answer[0]) * self.cluster.samples + answer[1]
        self._replica[number] = int(replica)
        if number not in self._running:
            self._run(number)

    def park(self, answer: AnswerId) -> None:
        self._replica.pop(int(answer[0]) * self.cluster.samples + answer[1], None)

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
