"""Which groups are generated together, and when the trainer sees finished groups: units with a carried tail.

A unit is `batches` training batches that are generated with the same weights and released together, after which the
trainer takes as many steps without waiting; it sees one batch at a time, those with the oldest answers first. The
`carried` slowest groups do not hold the unit up: they are interrupted by the new weights and go on in the next unit. In
the words of the RhymeRL paper, a unit is the second tier (it chains steps), and the carried tail is the work that the
paper defers or migrates.

    max_age 2, batches of 4 groups, UnitShape(batches=2, carried=1):
    step 1   9 groups are open; 8 finish and are released, 1 is carried; the trainer takes 4
    step 2   the trainer takes the other 4 at once; nothing runs
    step 3   8 groups more are open, the carried one goes on: it is trained in step 3 at the earliest, its age is 2

The age of an answer is the number of weight updates between its first token and the step that trains on it. Pure: no
clock, no I/O. Knows nothing of verl, vLLM or Ray.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from rhyme_verl.histopipe.messages import Group

YIELD_STEPS = 8  # latest steps from which the share of usable groups is measured
MIN_YIELD = 0.05


@dataclass(frozen=True, slots=True)
class UnitShape:
    """How much is generated together.

    Attributes:
        batches: training batches that are published together (U).
        carried: groups that go on under the next weights (C).
    """

    batches: int
    carried: int

    def __str__(self) -> str:
        return f"units of {self.batches} batches, {self.carried} groups carried over"


@dataclass(slots=True)
class Changes:
    """What a call to `Units` has changed.

    Attributes:
        opened: groups that may start.
        published: uids of groups that the trainer may see.
        began: a unit has begun: what was carried goes on.
        released: a unit is complete: what is unfinished waits for the next one.
    """

    opened: list[Group] = field(default_factory=list)
    published: list[str] = field(default_factory=list)
    began: bool = False
    released: bool = False


@dataclass(slots=True, eq=False)
class _Open:
    group: Group
    birth: int | None = None  # training step in which its first answer started


class Units:
    """Opens and publishes groups by count, so refills and short last batches are no special cases.

    Args:
        batch_size: groups that the trainer takes per step (G).
        max_age: weight updates that an answer may see between its first token and its training.
        shape: of the units; None: groups are opened and published at once (verl's `sync` and `separate_async`).
        total_steps: of the job; None: unknown.
    """

    def __init__(self, batch_size: int, max_age: int, shape: UnitShape | None, total_steps: int | None = None) -> None:
        self.shape = shape
        self.number = 0  # of the latest unit
        self.step = 0  # of the trainer
        self._batch_size = batch_size
        self._max_age = max_age
        self._total_steps = total_steps
        self._waiting: dict[str, Group] = {}  # not open, in the order of submission
        self._open: dict[str, _Open] = {}
        self._finished: list[_Open] = []  # and not published
        self._withheld: list[_Open] = []  # of a released unit, to be published when the trainer takes the next batch
        self._available = 0  # published groups that the trainer has not taken
        self._target = 0  # groups that complete the current unit
        self._is_between = True  # a unit has been released, and none has begun since
        self._num_published = 0
        self._history: deque[tuple[int, int, int]] = deque(maxlen=YIELD_STEPS)  # step, groups published, and filtered
        self._first_step: int | None = None
        self._unseen_at_start = 0  # groups of an earlier run that were available at the start

    @property
    def waiting(self) -> int:
        """Groups that have been submitted and not opened."""
        return len(self._waiting)

    @property
    def in_flight(self) -> int:
        """Groups that are open and unfinished."""
        return len(self._open)

    def is_open(self, uid: str) -> bool:
        return uid in self._open

    def submit(self, groups: Sequence[Group], available: int) -> Changes:
        """Take groups from the trainer.

        Args:
            groups: a batch, or replacements of groups that the trainer has filtered.
            available: published groups that the trainer has not taken.
        """
        changes = Changes()
        self.step = max([self.step, *(group.step for group in groups)])
        self._waiting.update((group.uid, group) for group in groups)
        if self.shape is None:
            self.number += 1
            self._open_groups(len(groups), changes)
            return changes
        self._count_filtered(available)
        return self._advance(available, changes)

    def start(self, uid: str) -> None:
        """The first answer of a group has started, with the weights of the current step."""
        found = self._open.get(uid)
        if found is not None and found.birth is None:
            found.birth = self.step

    def end(self, uid: str, failed: bool) -> Changes:
        """All answers of a group have ended; one that failed is published at once, as verl replaces it."""
        changes = Changes()
        self._waiting.pop(uid, None)
        found = self._open.pop(uid, None)
        if found is None or failed or self.shape is None:
            self._finished = [one for one in self._finished if one.group.uid != uid]
            self._withheld = [one for one in self._withheld if one.group.uid != uid]
            changes.published.append(uid)
        else:
            self._finished.append(found)
        return changes if self.shape is None else self._advance(self._available, changes)

    def publish_more(self, available: int) -> Changes:
        """Publish more of a released unit, as the trainer has only so many published groups left."""
        changes = Changes()
        if self._withheld:
            self._available = available
            self._publish(changes)
        return changes

    @property
    def is_withholding(self) -> bool:
        """Whether groups of a released unit wait until the trainer has taken those before them."""
        return bool(self._withheld)

    # How.

    def _advance(self, available: int, changes: Changes) -> Changes:
        self._available = available
        self._publish(changes)
        if self._available >= self._batch_size:
            return changes
        if self._is_between:
            self._is_between, changes.began = False, True
            self.number += 1
            self._target = self._groups_to_publish()
        assert self.shape is not None
        wanted = self._target + self.shape.carried - len(self._open) - len(self._finished)
        self._open_groups(min(wanted, self._target) if self._is_last() else wanted, changes)
        if self._finished and (len(self._finished) >= self._target or not self._open) and not self._is_blocked():
            self._finished.sort(key=_birth)
            self._withheld, self._finished = self._finished[: self._target], self._finished[self._target :]
            self._is_between = changes.released = True
            self._publish(changes)
        return changes

    def _open_groups(self, num: int, changes: Changes) -> None:
        for uid in list(self._waiting)[: max(0, num)]:
            self._open[uid] = _Open(self._waiting.pop(uid))
            changes.opened.append(self._open[uid].group)

    def _groups_to_publish(self) -> int:
        """Return how many groups complete the unit that begins.

        More than the trainer takes if it filters some, but never so many that an answer could become too old if it
        filters none.
        """
        assert self.shape is not None
        batches = self.shape.batches
        if self._total_steps is not None:
            batches = max(1, min(batches, self._total_steps - self.step + 1))
        usable, wanted = self._usable(), batches * self._batch_size - self._available
        margin = 2.0 * math.sqrt(batches * self._batch_size * (1.0 - usable))
        limit = (self._max_age + 1) * self._batch_size - self._available - self.shape.carried
        return max(1, min(math.ceil((wanted + margin) / usable), max(limit, wanted)))

    def _is_blocked(self) -> bool:
        """Whether an unfinished group would be too old at its training if the unit were released without it."""
        num_left = len(self._open) + max(0, len(self._finished) - self._target)
        num_before = self._available + min(self._target, len(self._finished))
        trained = self.step + math.ceil((num_before + num_left) / self._batch_size) - 1
        return any(one.birth is not None and trained - one.birth > self._max_age for one in self._open.values())

    def _publish(self, changes: Changes) -> None:
        """Publish the oldest groups of a released unit, as many as make a batch with those that are available.

        Never more, as the trainer chooses by the step of submission, whatever the age.
        """
        num = max(0, self._batch_size - self._available)
        published, self._withheld = self._withheld[:num], self._withheld[num:]
        changes.published += [one.group.uid for one in published]
        self._num_published += len(published)
        self._available += len(published)

    def _is_last(self) -> bool:
        """Whether the job ends with the current unit."""
        assert self.shape is not None
        return self._total_steps is not None and self.step + self.shape.batches > self._total_steps

    def _count_filtered(self, available: int) -> None:
        """Learn how many of the published groups the trainer has filtered, at the first submission of each step."""
        if self._first_step is None:
            self._first_step, self._unseen_at_start = self.step, available
        if self._history and self._history[-1][0] == self.step:
            return
        taken = (self.step - self._first_step) * self._batch_size
        filtered = self._unseen_at_start + self._num_published - taken - available
        self._history.append((self.step, self._num_published, max(0, filtered)))

    def _usable(self) -> float:
        """Return the share of published groups that the trainer does not filter."""
        (_, published_before, filtered_before), (_, published, filtered) = self._history[0], self._history[-1]
        num = published - published_before
        return 1.0 if not num else min(1.0, max(MIN_YIELD, 1.0 - (filtered - filtered_before) / num))


def default_shape(max_age: int, batch_size: int) -> UnitShape:
    """Return the shape for a job whose lengths are not known yet."""
    if max_age < 2:
        return UnitShape(batches=max_age + 1, carried=0)
    return UnitShape(batches=max_age, carried=batch_size // 4)


def _birth(one: _Open) -> float:
    return math.inf if one.birth is None else one.birth
