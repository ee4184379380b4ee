"""The simulation: when a step's prompts are let in, when it is trained, and with which policy versions it was made.

Training step k (from 0) turns policy version k into k + 1; a sequence's staleness is the version that is trained on it
less the one that generated it.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from rhyme_verl.histopipe.ranges import Fleet
from rhyme_verl.histopipe.step_cost import PREFILL_SECONDS_PER_TOKEN
from rhyme_verl.sim.cluster import Replica, replicas_of
from rhyme_verl.sim.policies import Policy
from rhyme_verl.sim.workload import Workload

TrainerMode = Literal["sync", "one_step_off", "colocate_async", "separate_async", "pairs", "pipelined"]
RESUMING: tuple[TrainerMode, ...] = ("colocate_async", "separate_async")  # verl's: answers outlive a change of weights


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """How rollout and training take turns.

    Attributes:
        mode: `sync`: rollout, training, rollout. `one_step_off`: a step is rolled out while the one before is trained.
            `separate_async`: prompts are let in up to `steps_ahead` steps ahead, a step's worth of finished groups is
            trained as soon as there is one, those of the oldest step first, and all replicas go on with the new weights
            in the midst of sequences. `colocate_async`: the same, but replicas sleep during training. `pairs`: two
            steps are rolled out with the same weights. `pipelined`: a step is let in as soon as the last but one is
            trained, and each replica takes the new weights when it has run dry.
        train_seconds: of one step, the transfer of weights included.
        steps_ahead: of verl's asynchronous modes, there `num_warmup_batches`.
        whole_pairs: of `colocate_async`: finished groups are held back until all those of two steps are finished, so
            that both are trained after one rollout and nothing is interrupted.
    """

    mode: TrainerMode
    train_seconds: float = 0.0
    steps_ahead: int = 1
    whole_pairs: bool = False

    @property
    def resumes(self) -> bool:
        """Whether weights change in the midst of sequences."""
        return self.mode in RESUMING and not self.whole_pairs


@dataclass(kw_only=True)
class Run:
    """What happened.

    Attributes:
        seconds: from the start to the end of the last rollout.
        trained: second at which each step was trained.
        opened: second at which each step's prompts were let in.
        rolled_out: second at which the last sequence of each step ended.
        staleness: int64 [sequences].
        trained_in: int64 [sequences], step.
        versions_spanned: int64 [sequences], policy versions that generated it; 1 where the trainer resumes nothing.
        segments: a row for each stay of a sequence on a replica: (replica, sequence, start, end).
        replicas: the engines, with their counters.
        moved: sequences taken from one replica to another.
    """

    seconds: float = 0.0
    trained: list[float] = field(default_factory=list)
    opened: list[float] = field(default_factory=list)
    rolled_out: list[float] = field(default_factory=list)
    staleness: np.ndarray
    trained_in: np.ndarray
    versions_spanned: np.ndarray
    segments: list[tuple[int, int, float, float]] = field(default_factory=list)
    replicas: list[Replica]
    moved: int = 0


class Simulation:
    """Plays a workload on a fleet under a policy and a trainer. Use once.

    Args:
        workload: the steps.
        fleet: the replicas.
        policy: who runs what.
        trainer: when.
        recompute_seconds_per_token: cost of recomputing the prefix of a sequence that is resumed.
    """

    def __init__(
        self,
        workload: Workload,
        fleet: Fleet,
        policy: Policy,
        trainer: Trainer,
        *,
        recompute_seconds_per_token: float = PREFILL_SECONDS_PER_TOKEN,
    ) -> None:
        self.workload = workload
        self.now = 0.0
        self.num_replicas = len(fleet.speeds)
        self._policy = policy
        self._trainer = trainer
        self.recompute_seconds_per_token = recompute_seconds_per_token
        self._replicas = replicas_of(fleet.cost, fleet.speeds, fleet.max_running)
        self._num_steps, groups, self._samples = workload.lengths.shape
        self._step_size = groups * self._samples
        self._lengths: list[int] = workload.lengths.ravel().tolist()
        self._version = 0
        self._training = False
        self._left_in_step = [self._step_size] * self._num_steps
        self._left_in_group = [self._samples] * (self._num_steps * groups)
        self._complete_groups: list[int] = []  # and not trained, in the order of completion
        self._born = [0] * len(self._lengths)  # version that started each sequence
        self._events: list[tuple[float, int, int]] = []  # (second, replica, stamp); replica -1: training is over
        self._stamps = [0] * self.num_replicas
        self._changed: set[int] = set()
        self._run = Run(
            staleness=np.zeros(len(self._lengths), dtype=np.int64),
            trained_in=np.zeros(len(self._lengths), dtype=np.int64),
            versions_spanned=np.ones(len(self._lengths), dtype=np.int64),
            replicas=self._replicas,
        )

    def run(self) -> Run:
        """Play it to the end."""
        self._proceed()
        self._reschedule()
        while self._events:
            self.now, replica, stamp = heapq.heappop(self._events)
            if replica < 0:
                self._trained()
            elif stamp == self._stamps[replica]:
                self._ended(replica)
            self._reschedule()
        assert self._version == self._num_steps, "the policy left sequences behind"
        self._run.seconds = max(self._run.rolled_out)
        return self._run

    # What policies use.

    def room(self, replica: int) -> int:
        engine = self._replicas[replica]
        return engine.max_running - len(engine)

    def version(self, replica: int) -> int:
        engine = self._replicas[replica]
        return engine.version if len(engine) else self._version

    def needs_version(self, step: int) -> int:
        if self._trainer.resumes:
            return 0
        mode = self._trainer.mode
        ago = {"sync": 0, "one_step_off": 1, "pipelined": 1, "pairs": step % 2, "colocate_async": step % 2}[mode]
        return max(0, step - ago)

    def may_start(self, replica: int, sequence: int) -> bool:
        return self.version(replica) >= self.needs_version(sequence // self._step_size)

    def sequences_of(self, step: int) -> np.ndarray:
        return np.arange(step * self._step_size, (step + 1) * self._step_size)

    def start(self, replica: int, sequence: int) -> None:
        engine = self._replicas[replica]
        engine.version = self.version(replica)
        self._born[sequence] = engine.version
        assert len(engine) < engine.max_running
        engine.start(sequence, self._lengths[sequence], self.now)
        self._changed.add(replica)

    def running(self, replica: int) -> list[tuple[int, float]]:
        engine = self._replicas[replica]
        engine.advance(self.now)
        return [(sequence, engine.tokens_of(sequence)) for sequence in engine.sequences]

    def move(self, sequence: int, source: int, target: int) -> None:
        """Abort a sequence and resume it elsewhere, where its prefix is recomputed."""
        if not len(self._replicas[target]):
            self._replicas[target].version = self._replicas[source].version
        assert self._replicas[target].version == self._replicas[source].version, "one answer, one policy version"
        tokens, start = self._replicas[source].remove(sequence, self.now)
        self._run.segments.append((source, sequence, start, self.now))
        self._run.moved += 1
        left = self._lengths[sequence] - tokens
        recompute = tokens * self.recompute_seconds_per_token
        self._replicas[target].start(sequence, left, self.now, before=tokens, recompute_seconds=recompute)
        self._changed.update((source, target))

    # What happens.

    def _ended(self, replica: int) -> None:
        self._changed.add(replica)
        for sequence, start in self._replicas[replica].pop_ended(self.now):
            self._run.segments.append((replica, sequence, start, self.now))
            step, group = sequence // self._step_size, sequence // self._samples
            self._left_in_step[step] -= 1
            self._left_in_group[group] -= 1
            if not self._left_in_group[group]:
                self._complete_groups.append(group)
        self._proceed()
        if not self._asleep:
            self._policy.freed(replica, self)

    @property
    def _asleep(self) -> bool:
        return self._training and self._trainer.mode == "colocate_async"

    def _trained(self) -> None:
        self._training = False
        self._version += 1
        self._run.trained.append(self.now)
        if self._trainer.resumes:
            self._swap_weights()
        opened = len(self._run.opened)
        self._proceed()
        if len(self._run.opened) == opened:  # opening a step asks all replicas already
            for replica, engine in enumerate(self._replicas):
                if not len(engine) or self._trainer.resumes:
                    self._policy.freed(replica, self)

    def _proceed(self) -> None:
        """Begin to train and let in prompts wherever that is due."""
        done = self._run.rolled_out
        while len(done) < self._num_steps and not self._left_in_step[len(done)]:
            done.append(self.now)
        self._train_next()
        while len(self._run.opened) < self._num_steps and self._may_open(len(self._run.opened)):
            self._run.opened.append(self.now)
            self._policy.opened(len(self._run.opened) - 1, self)

    def _may_open(self, step: int) -> bool:
        if self._trainer.resumes:
            return self._version >= step - self._trainer.steps_ahead
        if self._trainer.mode == "one_step_off" and len(self._run.rolled_out) < step:
            return False
        return self._version >= self.needs_version(step)

    def _train_next(self) -> None:
        if self._training or self._version == self._num_steps:
            return
        step = self._version
        if self._trainer.resumes:
            groups = self._step_size // self._samples
            if len(self._complete_groups) < groups:
                return
            # What was let in at the start is all of one age to verl's sampler.
            self._complete_groups.sort(key=lambda group: max(group // groups, self._trainer.steps_ahead))
            chosen = np.array(self._complete_groups[:groups])
            del self._complete_groups[:groups]
            sequences = (chosen[:, None] * self._samples + np.arange(self._samples)).ravel()
        else:
            last = min(step + (step + 1) % 2, self._num_steps - 1) if self._trainer.whole_pairs else step
            if len(self._run.rolled_out) <= last:
                return
            sequences = self.sequences_of(step)
        self._run.staleness[sequences] = step - np.array(self._born)[sequences]
        self._run.trained_in[sequences] = step
        self._training = True
        heapq.heappush(self._events, (self.now + self._trainer.train_seconds, -1, 0))
        if self._asleep:
            for replica, engine in enumerate(self._replicas):
                engine.pause(self._trainer.train_seconds, self.now)
                self._changed.add(replica)

    def _swap_weights(self) -> None:
        """Put new weights into all replicas at once, in the midst of sequences, whose prefixes are then recomputed."""
        for replica, engine in enumerate(self._replicas):
            engine.advance(self.now)
            engine.version = self._version
            running = engine.sequences
            self._run.versions_spanned[running] += 1
            if running:
                engine.stall(sum(engine.tokens_of(sequence) for sequence in running) * self.recompute_seconds_per_token)
            self._changed.add(replica)

    def _reschedule(self) -> None:
        for replica in self._changed:
            self._stamps[replica] += 1
            end = self._replicas[replica].next_end()
            if end < float("inf"):
                heapq.heappush(self._events, (end, replica, self._stamps[replica]))
        self._changed.clear()
