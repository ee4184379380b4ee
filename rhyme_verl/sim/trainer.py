"""verl's trainer on a simulated cluster: when groups are submitted, sampled and trained, and what is interrupted.

Training step k (from 0) turns policy version k into k + 1. The age of an answer is the version that is trained on it
minus the version that generated its first token. Polling intervals and verl's pause before it resumes a request are
not modelled.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from rhyme_verl.sim.cluster import PREFILL_SECONDS_PER_TOKEN, Replica
from rhyme_verl.sim.workload import Workload

# verl's modes are `sync` (rollout and training alternate), `colocate_async` (when a batch of groups is finished, all
# requests are aborted, a step is trained, and the requests continue with the new weights) and `separate_async` (rollout
# continues during training; new weights interrupt it). `one_step_off` generates a batch while the previous one is
# trained, with a barrier after each. `pipelined` generates two batches at a time; a replica takes new weights between
# two batches, without interruptions (the paper's pipeline).
TrainerMode = Literal["sync", "one_step_off", "colocate_async", "separate_async", "pipelined"]


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """The conditions that all compared schedulers share.

    Attributes:
        workload: its groups are submitted in order, repeatedly.
        speeds: float64 [replicas], relative to `step_seconds`.
        step_seconds: float64 [max_running + 1], of an engine step on a replica of speed 1, by running sequences.
        steps: number of training steps.
        train_seconds: duration of one training step, including the transfer of weights.
        tokens_per_step: mean tokens per engine step per answer; more than 1 with HistoSpec.
        recompute_seconds_per_token: prefill time of an answer that continues after an interruption.
        filtered: share of finished groups that the trainer filters and replaces (dynamic sampling).
        seed: seed of the filter.
    """

    workload: Workload
    speeds: np.ndarray
    step_seconds: np.ndarray
    steps: int
    train_seconds: float = 0.0
    tokens_per_step: float = 1.0
    recompute_seconds_per_token: float = PREFILL_SECONDS_PER_TOKEN
    filtered: float = 0.0
    seed: int = 0

    @property
    def seconds_per_token(self) -> np.ndarray:
        """Seconds in which each running answer gets a token on a replica of speed 1, by number of running answers."""
        return self.step_seconds / self.tokens_per_step

    @property
    def max_running(self) -> int:
        return len(self.step_seconds) - 1


class System:
    """Decides where answers run, and when the trainer sees finished groups. All answers of a group are consecutive."""

    def __init__(self, cluster: Simulation) -> None:
        self.cluster = cluster

    def submit(self, groups: Sequence[int]) -> None:
        """Take groups."""
        raise NotImplementedError

    def ended(self, answer: int) -> None:
        """Note that an answer is complete."""
        raise NotImplementedError

    def taken(self) -> None:
        """Note that the trainer has taken a batch."""

    def interrupted(self, answers: Sequence[int]) -> None:
        """Note that the requests of these answers were aborted."""

    def resumed(self, answers: Sequence[int]) -> None:
        """Send aborted requests again, because the replicas have new weights."""


@dataclass(slots=True)
class _Answer:
    length: int
    tokens: int = 0  # at its last abort
    birth: int = -1  # version that generated the first token
    last_version: int = -1
    versions: int = 1  # number of versions that generated it
    trained_in: int = -1


class Simulation:
    """Simulates a trainer in a scenario. Use once: set `system`, call `run`, and read what has happened.

    Args:
        warmup_batches: number of batches that are submitted ahead (verl's `num_warmup_batches`).
        wait_threshold: verl's `max_off_policy_strategy=wait`: no step is trained while an unfinished group was
            submitted this many steps ago, the current step included; None: off.

    Attributes:
        now: in seconds.
        version: policy version that the trainer has.
        submitted: training step in which each group was submitted.
        unfinished: unfinished answers of each group that has any.
        replicas: the engines, with their counters.
        trained: second at which each step was trained.
        segments: (replica, answer, start, end) of each time that an answer ran on a replica.
        interrupted: total number of aborted requests.
        trained_in, age: training step and age at training of each answer; -1: not trained.
        lengths, versions_spanned: tokens of each answer, and number of policy versions that generated it.
    """

    system: System

    def __init__(
        self, scenario: Scenario, mode: TrainerMode, *, warmup_batches: int = 1, wait_threshold: int | None = None
    ) -> None:
        self.scenario, self.mode = scenario, mode
        self.workload = scenario.workload
        self.now = 0.0
        self.version = 0
        self.submitted: list[int] = []
        self.unfinished: dict[int, int] = {}
        self.trained: list[float] = []
        self.segments: list[tuple[int, int, float, float]] = []
        self.interrupted = 0
        self._ahead = {"sync": 0, "one_step_off": 0, "pipelined": 1}.get(mode, warmup_batches)
        self._wait_threshold = wait_threshold
        self._rng = np.random.default_rng(scenario.seed)
        self.batch_size: int = self.workload.lengths.shape[1]
        self.samples: int = self.workload.lengths.shape[2]
        self._all_lengths = self.workload.lengths.reshape(-1, self.samples)
        self.replicas = [Replica((scenario.seconds_per_token / speed).tolist()) for speed in scenario.speeds]
        self._answers: list[_Answer] = []
        self._unseen: list[int] = []  # published groups that are not filtered yet
        self._available: list[int] = []  # groups that have passed the filter
        self._training = False
        self._aborted: list[int] = []
        self._events: list[tuple[float, int]] = []  # second, replica (-1: end of training)
        self._changed: set[int] = set()

    def run(self) -> None:
        """Run the simulation to its end.

        Raises:
            RuntimeError: the system does not generate or publish some groups.
        """
        if self._ahead:
            self._submit(self._ahead * self.batch_size)
        self._submit(self.batch_size)
        self._sample()
        self._reschedule()
        while len(self.trained) < self.scenario.steps:
            if not self._events:
                raise RuntimeError("the system left groups behind")
            self.now, replica = heapq.heappop(self._events)
            if replica < 0:
                self._end_training()
            elif self.replicas[replica].next_end() == self.now:  # otherwise it has been rescheduled
                self._ended(replica)
            self._reschedule()
        answers = [(one.length, one.birth, one.trained_in, one.versions) for one in self._answers]
        self.lengths, birth, self.trained_in, self.versions_spanned = np.array(answers).T
        self.age = np.where(self.trained_in < 0, -1, self.trained_in - birth)

    # Used by systems.

    @property
    def num_available(self) -> int:
        """Number of published groups that the trainer has not taken."""
        return len(self._available) + len(self._unseen)

    def answers_of(self, groups: Sequence[int]) -> list[int]:
        return [group * self.samples + sample for group in groups for sample in range(self.samples)]

    def length(self, answer: int) -> int:
        return self._answers[answer].length

    def prompt(self, group: int) -> int:
        """Return a group's index in the workload, over all steps."""
        return group % len(self._all_lengths)

    def run_on(self, answer: int, replica: int) -> None:
        """Send an answer's request to a replica."""
        one = self._answers[answer]
        if one.birth < 0:
            one.birth = self.version
        elif one.last_version != self.version:
            one.versions += 1
        one.last_version = self.version
        recompute = one.tokens * self.scenario.recompute_seconds_per_token
        left = float(one.length - one.tokens)
        self.replicas[replica].start(answer, left, self.now, before=one.tokens, recompute=recompute)
        self._changed.add(replica)

    def publish(self, group: int) -> None:
        """Let the trainer see a finished group."""
        self._unseen.append(group)

    # Events.

    def _submit(self, num: int) -> None:
        groups = range(len(self.submitted), len(self.submitted) + num)
        for group in groups:
            self._answers += map(_Answer, self._all_lengths[self.prompt(group)].tolist())
            self.submitted.append(self.version)
            self.unfinished[group] = self.samples
        self.system.submit(groups)

    def _ended(self, replica: int) -> None:
        self._changed.add(replica)
        for answer, start in self.replicas[replica].pop_ended(self.now):
            self.segments.append((replica, answer, start, self.now))
            group = answer // self.samples
            self.unfinished[group] -= 1
            if not self.unfinished[group]:
                del self.unfinished[group]
            self.system.ended(answer)
        self._sample()

    def _sample(self) -> None:
        """Train as soon as a batch is available."""
        if self._training:
            return
        while self._unseen:  # a filtered group is replaced by a new one
            unseen, self._unseen = self._unseen, []
            kept = [group for group in unseen if self._rng.random() >= self.scenario.filtered]
            self._available += kept
            if len(kept) < len(unseen):
                self._submit(len(unseen) - len(kept))
        if len(self._available) < self.batch_size:
            return
        if self._wait_threshold is not None:
            oldest = min((self.submitted[group] for group in self.unfinished), default=self.version)
            if self.version - oldest + 1 >= self._wait_threshold:
                return
        self._available.sort()
        batch, self._available = self._available[: self.batch_size], self._available[self.batch_size :]
        for answer in self.answers_of(batch):
            self._answers[answer].trained_in = self.version
        self._training = True
        self.system.taken()
        if self.mode == "colocate_async":
            self._interrupt()
        elif self.mode == "one_step_off":
            self._submit(self.batch_size)
        heapq.heappush(self._events, (self.now + self.scenario.train_seconds, -1))

    def _end_training(self) -> None:
        self._training = False
        self.version += 1
        self.trained.append(self.now)
        if self.version == self.scenario.steps:
            return
        if self.mode == "separate_async":
            self._interrupt()
        if self.mode in ("colocate_async", "separate_async"):
            for answer in self._aborted:
                if not self._answers[answer].tokens:
                    self._answers[answer].birth = -1
            self.system.resumed(self._aborted)
        if self.mode != "one_step_off":
            self._submit(self.batch_size)
        self._sample()

    def _interrupt(self) -> None:
        self._aborted = []
        for index, replica in enumerate(self.replicas):
            for answer, tokens, start in replica.interrupt(self.now):
                self._answers[answer].tokens = tokens
                self._aborted.append(answer)
                if start is not None:
                    self.segments.append((index, answer, start, self.now))
            self._changed.add(index)
        self.interrupted += len(self._aborted)
        self.system.interrupted(self._aborted)

    def _reschedule(self) -> None:
        for replica in self._changed:
            end = self.replicas[replica].next_end()
            if end < float("inf"):
                heapq.heappush(self._events, (end, replica))
        self._changed.clear()
