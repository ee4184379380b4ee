"""Decides which groups are generated together, and when the trainer sees finished groups: units with a carried tail.

A unit is `batches` training batches that are generated with the same weights and released together. The trainer then
takes as many steps without waiting; it sees one batch at a time, the oldest answers first. The `carried` slowest groups
do not delay the release: the new weights interrupt them, and they continue in the next unit. In the terms of the
RhymeRL paper, a unit is the second tier, cross-step pairing, and the carried tail is the work that the paper defers or
migrates. docs/worked-example.md has an example.

The age of an answer is the number of weight updates between its first token and the step that trains on it. Pure: no
clock, no I/O. Does not depend on verl, vLLM or Ray.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from rhyme_verl.histopipe.messages import Group

YIELD_STEPS = 8  # number of latest steps over which the share of usable groups is measured
MIN_YIELD = 0.05  # lower bound of this share


@dataclass(frozen=True, slots=True)
class UnitShape:
    """The size of a unit."""

    batches: int  # number of training batches that are generated and released together (U)
    carried: int  # number of groups that continue under the next weights (C)

    def __str__(self) -> str:
        return f"units of {self.batches} batches, {self.carried} groups carried over"


@dataclass(slots=True)
class Changes:
    """What a call to `Units` has changed."""

    opened: list[Group] = field(default_factory=list)  # their answers may start
    published: list[str] = field(default_factory=list)  # uids of groups that the trainer may see
    began: bool = False  # a unit has begun, so that carried groups continue
    released: bool = False  # the unit has been released, so that unfinished groups wait for the next one


@dataclass(slots=True, eq=False)
class _OpenedGroup:
    group: Group
    birth: float = math.inf  # training step in which its first answer started


class Units:
    """Opens and publishes groups by count, so replacements and incomplete batches are no special cases.

    The arguments are those of `scheduler.Job`.
    """

    def __init__(self, batch_size: int, max_age: int, shape: UnitShape | None, total_steps: int | None = None) -> None:
        self.shape = shape
        self.number = 0  # of the current or latest unit
        self.step = 0  # latest training step in which groups were submitted
        self._batch_size = batch_size
        self._max_age = max_age
        self._total_steps = math.inf if total_steps is None else total_steps
        self._waiting: dict[str, Group] = {}  # not opened yet, in the order of submission
        self._open: dict[str, _OpenedGroup] = {}
        self._finished: list[_OpenedGroup] = []  # finished, but their unit is not released
        self._withheld: list[_OpenedGroup] = []  # of a released unit, published one batch at a time
        self._available = 0  # published groups that the trainer has not taken
        self._target = 0  # number of finished groups that complete the current unit
        self._carried = 0  # number of groups that the current unit opens in addition
        self._is_between = True  # no unit is in progress
        self._num_published = 0
        self._history: deque[tuple[int, int, int]] = deque(maxlen=YIELD_STEPS)  # step, groups published, filtered
        self._first_step: int | None = None
        self._unseen_at_start = 0  # number of groups of an earlier run that were available at the start

    @property
    def waiting(self) -> int:
        """Number of groups that have been submitted and not opened."""
        return len(self._waiting)

    def is_open(self, uid: str) -> bool:
        return uid in self._open

    @property
    def awaited(self) -> list[str]:
        """The groups that are not finished in the unit in progress, in the order in which they were opened."""
        return [] if self._is_between else list(self._open)

    def submit(self, groups: Sequence[Group], available: int) -> Changes:
        """Take groups from the trainer, a batch or replacements for groups that it has filtered.

        It has not taken `available` published groups.
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
        """Record that the first answer of a group has started, with the weights of the current step."""
        found = self._open.get(uid)
        if found is not None:
            found.birth = min(found.birth, self.step)

    def end(self, uid: str, failed: bool) -> Changes:
        """Record that all answers of a group have ended; publish a failed group at once, because verl replaces it."""
        changes = Changes()
        self._waiting.pop(uid, None)
        found = self._open.pop(uid, None)
        if found is None or failed or self.shape is None:
            self._finished = [entry for entry in self._finished if entry.group.uid != uid]
            self._withheld = [entry for entry in self._withheld if entry.group.uid != uid]
            changes.published.append(uid)
        else:
            self._finished.append(found)
        return changes if self.shape is None else self._advance(self._available, changes)

    def publish_more(self, available: int) -> Changes:
        """Publish more of a released unit; the trainer has `available` published groups left."""
        changes = Changes()
        if self._withheld:
            self._available = available
            self._publish(changes)
        return changes

    @property
    def is_withholding(self) -> bool:
        """Whether groups of a released unit wait until the trainer has taken the batch before them."""
        return bool(self._withheld)

    # Internals.

    def _advance(self, available: int, changes: Changes) -> Changes:
        self._available = available
        self._publish(changes)
        if self._available >= self._batch_size:
            return changes
        if self._is_between:
            assert self.shape is not None
            self._is_between, changes.began = False, True
            self.number += 1
            self._target = self._groups_to_publish()
            is_last = self.step + self.shape.batches > self._total_steps  # the job ends with this unit
            self._carried = 0 if is_last else self.shape.carried
        self._target = max(self._target, self._batch_size - self._available)  # the trainer may have filtered some since
        self._open_groups(self._target + self._carried - len(self._open) - len(self._finished), changes)
        if self._finished and (len(self._finished) >= self._target or not self._open) and not self._is_blocked():
            self._finished.sort(key=lambda entry: entry.birth)
            self._withheld, self._finished = self._finished[: self._target], self._finished[self._target :]
            self._is_between = changes.released = True
            self._publish(changes)
        return changes

    def _open_groups(self, num: int, changes: Changes) -> None:
        for uid in list(self._waiting)[: max(0, num)]:
            self._open[uid] = _OpenedGroup(self._waiting.pop(uid))
            changes.opened.append(self._open[uid].group)

    def _groups_to_publish(self) -> int:
        """Return how many groups complete the unit that begins.

        If the trainer filters groups, the number is higher, but never so high that an answer could become too old if
        the trainer filters none of them.
        """
        assert self.shape is not None
        batches = int(max(1, min(self.shape.batches, self._total_steps - self.step + 1)))
        usable, wanted = self._usable(), batches * self._batch_size - self._available
        margin = 2.0 * math.sqrt(batches * self._batch_size * (1.0 - usable))
        limit = (self._max_age + 1) * self._batch_size - self._available - self.shape.carried
        return max(1, min(math.ceil((wanted + margin) / usable), max(limit, wanted)))

    def _is_blocked(self) -> bool:
        """Return whether an unfinished group would be too old at its training if the unit were released without it."""
        num_left = len(self._open) + max(0, len(self._finished) - self._target)
        num_before = self._available + min(self._target, len(self._finished))
        trained = self.step + math.ceil((num_before + num_left) / self._batch_size) - 1
        return any(trained - entry.birth > self._max_age for entry in self._open.values())

    def _publish(self, changes: Changes) -> None:
        """Publish the oldest groups of a released unit, enough for one batch together with the available groups.

        Never publish more, because the trainer picks groups by the step of their submission, regardless of their age.
        """
        num = max(0, self._batch_size - self._available)
        published, self._withheld = self._withheld[:num], self._withheld[num:]
        changes.published += [entry.group.uid for entry in published]
        self._num_published += len(published)
        self._available += len(published)

    def _count_filtered(self, available: int) -> None:
        """Measure how many published groups the trainer has filtered, at the first submission of each step."""
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
    """Return a shape that respects the age limit; half a batch is carried (docs/concepts.md compares other shares)."""
    if max_age < 2:
        return UnitShape(batches=max_age + 1, carried=0)
    return UnitShape(batches=max_age, carried=batch_size // 2)
