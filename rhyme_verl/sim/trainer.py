"""verl's trainer on a simulated cluster: when groups are submitted, sampled and trained, and what is interrupted.

Training step k (from 0) turns policy version k into k + 1. The age of an answer is the version that is trained on it
minus the version that generated its first token. Polling intervals and verl's pause before it resumes a request are
not modelled.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np

from rhyme_verl.sim.cluster import Fleet, Replica, replicas_of
from rhyme_verl.sim.replica_cost import PREFILL_SECONDS_PER_TOKEN
from rhyme_verl.sim.workload import Workload

TrainerMode = Literal["sync", "one_step_off", "colocate_async", "separate_async", "pipelined"]


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """How rollout and training alternate.

    Attributes:
        mode: verl's modes are `sync` (rollout and training alternate), `colocate_async` (when a batch of groups is
            finished, all requests are aborted, a step is trained, and the requests continue with the new weights) and
            `separate_async` (rollout continues during training; new weights interrupt it). `one_step_off` generates a
            batch while the previous one is trained, with a barrier after each. `pipelined` generates two batches at a
            time; a replica takes new weights between two batches, without interruptions (the paper's pipeline).
        train_seconds: duration of a step, including the transfer of weights.
        warmup_batches: number of batches that are submitted ahead (verl's `num_warmup_batches`).
        wait_threshold: verl's `max_off_policy_strategy=wait`: no step is trained while an unfinished group was
            submitted this many steps ago, the current step included; None: off.
        filtered: share of finished groups that the trainer filters and replaces (dynamic sampling).
    """

    mode: TrainerMode
    train_seconds: float = 0.0
    warmup_batches: int = 1
    wait_threshold: int | None = None
    filtered: float = 0.0


class System(Protocol):
    """Decides where answers run, and when the trainer sees finished groups."""

    def submit(self, groups: Sequence[int], available: int) -> None:
        """Take groups; `available` is the number of published groups that the trainer has not taken."""

    def taken(self, available: int) -> None:
        """Note that the trainer has taken a batch, and that `available` published groups are left."""

    def ended(self, answer: int) -> None:
        """Note that an answer is complete."""

    def interrupted(self, answers: Sequence[int]) -> None:
        """Note that the requests of these answers were aborted."""

    def resumed(self, answers: Sequence[int]) -> None:
        """Send aborted requests again, because the replicas have new weights."""


@dataclass(kw_only=True)
class Run:
    """What happened in a simulation; arrays are int64 [submitted answers].

    Attributes:
        seconds: second at which the last step was trained.
        trained: second at which each step was trained.
        age: age at training; -1: not trained.
        trained_in: training step; -1: not trained.
        versions_spanned: number of policy versions that generated the answer.
        lengths: number of tokens.
        segments: (replica, answer, start, end) of each time that an answer ran on a replica.
        replicas: the engines, with their counters.
        interrupted: total number of aborted requests.
    """

    seconds: float = 0.0
    trained: list[float] = field(default_factory=list)
    age: np.ndarray
    trained_in: np.ndarray
    versions_spanned: np.ndarray
    lengths: np.ndarray
    segments: list[tuple[int, int, float, float]] = field(default_factory=list)
    replicas: list[Replica]
    interrupted: int = 0


class Simulation:
    """Simulates a trainer on a fleet. Use once: set `system`, then call `run`.

    Args:
        workload: its groups are submitted in order, repeatedly.
        steps: number of steps to train.
        recompute_seconds_per_token: prefill time of a request that is resumed.
        seed: seed of the trainer's filter.
    """

    system: System

    def __init__(
        self,
        workload: Workload,
        fleet: Fleet,
        trainer: Trainer,
        *,
        steps: int,
        recompute_seconds_per_token: float = PREFILL_SECONDS_PER_TOKEN,
        seed: int = 0,
    ) -> None:
        self.workload = workload
        self.fleet = fleet
        self.now = 0.0
        self.version = 0
        self.trainer = trainer
        self._steps = steps
        self._recompute = recompute_seconds_per_token
        self._rng = np.random.default_rng(seed)
        self._num_steps, self.batch_size, self.samples = workload.lengths.shape
        self._all_lengths = workload.lengths.reshape(-1, self.samples)
        self._replicas = replicas_of(fleet)
        self._lengths: list[int] = []  # per answer
        self._tokens: list[int] = []  # per answer: tokens at its last abort
        self._birth: list[int] = []
        self._last_version: list[int] = []
        self._spans: list[int] = []
        self._submitted: list[int] = []  # per group: step of submission
        self._left: list[int] = []  # per group: unfinished answers
        self._unfinished: set[int] = set()  # groups; only kept with `wait_threshold`
        self._unseen: list[tuple[int, int]] = []  # published groups: step of submission, group
        self._available: list[tuple[int, int]] = []  # the same, of groups that are not filtered
        self._taken: list[list[int]] = []  # groups of each training step
        self._training = False
        self._aborted: list[int] = []
        self._events: list[tuple[float, int, int]] = []  # second, replica (-1: end of training), stamp
        self._stamps = [0] * len(self._replicas)
        self._changed: set[int] = set()
        self._run = Run(
            age=np.zeros(0), trained_in=np.zeros(0), versions_spanned=np.zeros(0), lengths=np.zeros(0),
            replicas=self._replicas,
        )  # fmt: skip

    def run(self) -> Run:
        """Run the simulation to its end."""
        ahead = {"sync": 0, "one_step_off": 0, "pipelined": 1}.get(self.trainer.mode, self.trainer.warmup_batches)
        if ahead:
            self._submit(ahead * self.batch_size)
        self._submit(self.batch_size)
        self._sample()
        self._reschedule()
        while len(self._run.trained) < self._steps:
            if not self._events:
                raise RuntimeError("the system left groups behind")
            self.now, replica, stamp = heapq.heappop(self._events)
            if replica < 0:
                self._trained()
            elif stamp == self._stamps[replica]:
                self._ended(replica)
            self._reschedule()
        return self._result()

    # Used by systems.

    @property
    def num_replicas(self) -> int:
        return len(self._replicas)

    def length(self, answer: int) -> int:
        return self._lengths[answer]

    def row(self, group: int) -> tuple[int, int]:
        """Return a group's step in the workload, and its index within the step."""
        found: tuple[int, int] = divmod(group % len(self._all_lengths), self.batch_size)
        return found

    def step_of(self, group: int) -> int:
        """Return the training step in which a group was submitted."""
        return self._submitted[group]

    def run_on(self, answer: int, replica: int) -> None:
        """Send an answer's request to a replica."""
        tokens = self._tokens[answer]
        if self._birth[answer] < 0:
            self._birth[answer] = self.version
        elif self._last_version[answer] != self.version:
            self._spans[answer] += 1
        self._last_version[answer] = self.version
        left = float(self._lengths[answer] - tokens)
        recompute = tokens * self._recompute
        self._replicas[replica].start(answer, left, self.now, before=tokens, recompute=recompute)
        self._changed.add(replica)

    def publish(self, group: int) -> None:
        """Let the trainer see a finished group."""
        self._unseen.append((self._submitted[group], group))

    # Events.

    def _submit(self, num: int) -> None:
        groups = range(len(self._submitted), len(self._submitted) + num)
        for group in groups:
            lengths = self._all_lengths[group % len(self._all_lengths)].tolist()
            self._lengths += lengths
            self._submitted.append(self.version)
            self._left.append(self.samples)
            if self.trainer.wait_threshold is not None:
                self._unfinished.add(group)
        more = num * self.samples
        self._tokens += [0] * more
        self._birth += [-1] * more
        self._last_version += [-1] * more
        self._spans += [1] * more
        self.system.submit(groups, len(self._available) + len(self._unseen))

    def _ended(self, replica: int) -> None:
        self._changed.add(replica)
        for answer, start in self._replicas[replica].pop_ended(self.now):
            self._run.segments.append((replica, answer, start, self.now))
            group = answer // self.samples
            self._left[group] -= 1
            if not self._left[group]:
                self._unfinished.discard(group)
            self.system.ended(answer)
        self._sample()

    def _sample(self) -> None:
        """Train as soon as a batch is available."""
        while not self._training:
            if self._filter():
                continue
            if len(self._available) < self.batch_size or self._must_wait():
                return
            self._available.sort()
            self._taken.append([group for _, group in self._available[: self.batch_size]])
            del self._available[: self.batch_size]
            self._training = True
            self.system.taken(len(self._available) + len(self._unseen))
            if self.trainer.mode == "colocate_async":
                self._interrupt()
            elif self.trainer.mode == "one_step_off":
                self._submit(self.batch_size)
            heapq.heappush(self._events, (self.now + self.trainer.train_seconds, -1, 0))

    def _filter(self) -> int:
        """Filter some of the newly finished groups, submit as many new ones, and return their number."""
        unseen, self._unseen = self._unseen, []
        kept = [entry for entry in unseen if self._rng.random() >= self.trainer.filtered]
        self._available += kept
        num = len(unseen) - len(kept)
        if num:
            self._submit(num)
        return num

    def _must_wait(self) -> bool:
        threshold = self.trainer.wait_threshold
        if threshold is None:
            return False
        return any(self.version - self._submitted[group] + 1 >= threshold for group in self._unfinished)

    def _trained(self) -> None:
        self._training = False
        self.version += 1
        self._run.trained.append(self.now)
        if len(self._run.trained) == self._steps:
            return
        if self.trainer.mode == "separate_async":
            self._interrupt()
        if self.trainer.mode in ("colocate_async", "separate_async"):
            self._resume()
        if self.trainer.mode != "one_step_off":
            self._submit(self.batch_size)
        self._sample()

    def _interrupt(self) -> None:
        self._aborted = []
        for index, replica in enumerate(self._replicas):
            for answer, tokens, start in replica.interrupt(self.now):
                self._tokens[answer] = tokens
                self._aborted.append(answer)
                if start is not None:
                    self._run.segments.append((index, answer, start, self.now))
            self._changed.add(index)
        self._run.interrupted += len(self._aborted)
        self.system.interrupted(self._aborted)

    def _resume(self) -> None:
        for answer in self._aborted:
            if not self._tokens[answer]:
                self._birth[answer] = -1
        self.system.resumed(self._aborted)

    def _reschedule(self) -> None:
        for replica in self._changed:
            self._stamps[replica] += 1
            end = self._replicas[replica].next_end()
            if end < float("inf"):
                heapq.heappush(self._events, (end, replica, self._stamps[replica]))
        self._changed.clear()

    def _result(self) -> Run:
        run = self._run
        run.seconds = self.now
        run.lengths, birth = np.array(self._lengths), np.array(self._birth)
        run.versions_spanned = np.array(self._spans)
        run.age, run.trained_in = np.full(len(birth), -1), np.full(len(birth), -1)
        for step, groups in enumerate(self._taken[: self._steps]):
            answers = (np.array(groups)[:, None] * self.samples + np.arange(self.samples)).ravel()
            run.trained_in[answers] = step
            run.age[answers] = step - birth[answers]
        return run
