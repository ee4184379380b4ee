"""Which batches are rolled out together, and when finished prompts may be seen by the trainer.

Trainers that prefetch (verl's `colocate_async`) stop all rollouts as soon as one batch is complete, train, and resume
what was running with new weights. In mode `pairs` two batches are rolled out as one unit instead, and what is finished
is held back until the whole unit is: the trainer then takes two steps from one rollout, nothing is interrupted, no
answer spans two policy versions, and none is more than one version old. A pure object: the time is passed in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from rhyme_verl.histopipe.dispatcher import Group

PipeMode = Literal["barrier", "pairs", "stream"]

GATHER_SECONDS = 1.0  # after which what waits is opened although no whole pair has come


@dataclass(slots=True, eq=False)
class Unit:
    """Prompts that are rolled out together.

    Attributes:
        groups: the prompts.
        held: finished ones wait for the others.
        training: they are not a validation's.
        unfinished: uids of those that are not finished yet.
    """

    groups: Sequence[Group]
    held: bool
    training: bool
    unfinished: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.unfinished = {group.uid for group in self.groups}


class Intake:
    """Takes batches as the trainer sends them and makes units of them.

    Args:
        mode: `barrier` and `stream`: every batch at once; `pairs`: two batches together. May change between batches.
        batch_size: prompts that the trainer takes at once.
        prefetched: batches that the trainer sends ahead; without any there are no pairs.
    """

    def __init__(self, mode: PipeMode, batch_size: int, prefetched: float) -> None:
        self.mode = mode
        self._batch_size = batch_size
        self._unit_size = batch_size * (2 if prefetched >= 1 else 1)
        self._waiting: dict[str, Group] = {}  # by uid
        self._changed = 0.0  # when the latest of them came
        self._units: dict[str, Unit] = {}  # by the uids of their prompts
        self._available = 0  # finished prompts that the trainer has not taken, as far as is known

    @property
    def waiting(self) -> int:
        """Prompts that are not open."""
        return len(self._waiting)

    def submit(self, groups: Sequence[Group], available: int, now: float) -> Unit | None:
        """Take a training batch; returns what is to be opened now.

        Args:
            groups: its prompts.
            available: prompts that are finished and that the trainer has not taken.
            now: seconds.
        """
        self._waiting.update((group.uid, group) for group in groups)
        self._available, self._changed = available, now
        if self.mode != "pairs":
            return self._open(len(self._waiting))
        return self._open(self._unit_size) if len(self._waiting) >= self._unit_size and self._is_needed() else None

    def submit_validation(self, groups: Sequence[Group]) -> Unit:
        """Take a validation batch, which is opened at once and never held back."""
        return self._make(groups, held=False, training=False)

    def gathered(self, now: float) -> Unit | None:
        """Return what is to be opened because nothing more has come for a while and the trainer may need it."""
        if self._waiting and now - self._changed >= GATHER_SECONDS and self._is_needed():
            return self._open(self._unit_size)
        return None

    def finish(self, uid: str) -> Unit | None:
        """All answers to a prompt have ended, one way or the other; returns its unit if that was the last prompt.

        One that ends while it waits has failed, and is not opened any more.
        """
        if self._waiting.pop(uid, None) is not None:
            return None
        unit = self._units.pop(uid, None)
        if unit is None:
            return None
        unit.unfinished.discard(uid)
        if unit.training and not unit.held:
            self._available += 1
        if unit.unfinished:
            return None
        if unit.held:
            self._available += len(unit.groups)
        return unit

    def is_waiting(self, uid: str) -> bool:
        """Whether a prompt has not been opened yet."""
        return uid in self._waiting

    def is_training(self, uid: str) -> bool:
        """Whether a prompt has been opened for training and has not ended."""
        unit = self._units.get(uid)
        return unit is not None and unit.training

    def is_held(self, uid: str) -> bool:
        """Whether a finished prompt has to wait for the others of its unit."""
        unit = self._units.get(uid)
        return unit is not None and unit.held

    def _is_needed(self) -> bool:
        """Whether the trainer has less than a batch, and nothing runs that will give it one."""
        running = {unit for unit in self._units.values() if unit.training}
        if any(unit.held for unit in running):
            return False
        return self._available + sum(len(unit.unfinished) for unit in running) < self._batch_size

    def _open(self, size: int) -> Unit:
        groups = [self._waiting.pop(uid) for uid in list(self._waiting)[:size]]
        return self._make(groups, held=self.mode == "pairs", training=True)

    def _make(self, groups: Sequence[Group], held: bool, training: bool) -> Unit:
        unit = Unit(groups, held, training)
        self._units.update(dict.fromkeys(unit.unfinished, unit))
        return unit
