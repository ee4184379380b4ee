"""Late binding: waiting sequences are handed out as replicas get room, by the planner's budgets.

A replica that has run dry takes the longest work that waits, as much of it as it can finish within the budget of its
turn: the n-th replica to ask in a step gets the budget of rank n. Replicas ask in the order in which they ended the
step before, so the one with the short range there takes the long range here, whatever the predictions were worth.
A pure object: `now` is passed in, nothing is started here. Not thread-safe.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rhyme_verl.histopipe.planner import Budgets, Fleet, Mode, Ranges, Work, schedule


@dataclass(slots=True)
class _Step:
    """A step whose sequences wait, longest first: ranges are taken at `head`, fillers between `filler` and `tail`."""

    needs_version: int
    ranges: Ranges
    budgets: Budgets
    end: float  # second at which it should be over
    sequences: list[int]
    tokens: list[float]
    spans: list[float]
    head: int
    head_end: int
    filler: int
    tail: int
    num_takers: int = 0

    @property
    def waiting(self) -> int:
        return self.head_end - self.head + self.tail - self.filler


@dataclass(slots=True)
class _Share:
    """What a replica may still take into idle lanes."""

    spare_tokens: float = 0.0
    deadline: float = 0.0


class LateBinder:
    """Decides which waiting sequences a replica starts.

    Args:
        fleet: the replicas.
        mode: whether steps overlap; see `planner`.
        least_seconds: smallest budget of a replica in a step.
        ready_running: a replica with at most this many sequences is as good as dry and takes its next range.
    """

    def __init__(self, fleet: Fleet, mode: Mode, *, least_seconds: float = 0.0, ready_running: int = 0) -> None:
        self._fleet = fleet
        self._mode: Mode = mode
        self._least_seconds = least_seconds
        self._ready_running = ready_running
        self._steps: deque[_Step] = deque()
        self._shares = [_Share() for _ in fleet.speeds]

    def open(self, sequences: np.ndarray, work: Work, now: float, needs_version: int = 0) -> None:
        """Let a step's sequences (int64 [sequences], group by group) be handed out.

        Args:
            sequences: names to hand out.
            work: their groups.
            now: seconds.
            needs_version: oldest policy version that a replica may generate them with.
        """
        plan = schedule(work, self._fleet, self._mode, least_seconds=self._least_seconds)
        fillers = round(plan.cut.ends[-1])
        self._steps.append(
            _Step(
                needs_version=needs_version,
                ranges=plan.ranges,
                budgets=plan.budgets,
                end=now + plan.budgets.first,
                sequences=sequences[plan.sequences].tolist(),
                tokens=np.repeat(work.tokens, work.samples)[plan.sequences].tolist(),
                spans=np.repeat(plan.spans, work.samples)[plan.sequences].tolist(),
                head=0,
                head_end=fillers,
                filler=fillers,
                tail=len(sequences),
            )
        )

    def take(self, replica: int, running: int, version: int, now: float) -> Sequence[int]:
        """Return the sequences that `replica`, with `running` sequences of policy `version`, starts at `now`."""
        step = self._step_for(version)
        if step is None:
            return []
        share = self._shares[replica]
        taken: list[int] = []
        if running <= self._ready_running:
            taken = self._take_range(step, replica, share, now)
        room = self._fleet.max_running - running - len(taken)
        return taken + self._fill(step, replica, share, running + len(taken), room, now)

    def _step_for(self, version: int) -> _Step | None:
        while self._steps and not self._steps[0].waiting:
            self._steps.popleft()
        for step in self._steps:
            if step.waiting:
                return step if step.needs_version <= version else None
        return None

    def _take_range(self, step: _Step, replica: int, share: _Share, now: float) -> list[int]:
        num = len(self._shares)
        in_ranges = step.head < step.head_end
        head, limit = (step.head, step.head_end) if in_ranges else (step.filler, step.tail)
        if head == limit:
            return []
        least = 1
        if step.num_takers < num:
            seconds = float(step.budgets.of_rank(step.num_takers, num))
        else:
            left = step.ranges.tokens_before(step.tail) - step.ranges.tokens_before(head)
            fair = self._fleet.cost.replica_seconds(left / num, step.spans[head], self._fleet.max_running)
            seconds = max(step.end - now, float(fair))
            least = 8
        step.num_takers += 1
        capacity = step.ranges.capacity(seconds * self._fleet.speeds[replica], step.spans[head], step.budgets)
        end = min(max(round(step.ranges.range_end(head, capacity)), head + least), limit)
        share.spare_tokens = capacity - (step.ranges.tokens_before(end) - step.ranges.tokens_before(head))
        share.deadline = now + seconds
        if in_ranges:
            step.head = end
        else:
            step.filler = end
        return step.sequences[head:end]

    def _fill(self, step: _Step, replica: int, share: _Share, running: int, room: int, now: float) -> list[int]:
        """Take waiting work into idle lanes, if it ends before the replica's deadline: the longest fillers, or the shortest."""
        taken: list[int] = []
        per_token = self._fleet.cost.seconds / self._fleet.speeds[replica]
        left = share.deadline - now
        while len(taken) < room and step.filler < step.tail:
            seconds = per_token[running + len(taken) + 1]
            if step.tokens[step.filler] <= share.spare_tokens and step.spans[step.filler] * seconds <= left:
                index = step.filler
                step.filler += 1
            elif step.tokens[step.tail - 1] <= share.spare_tokens and step.spans[step.tail - 1] * seconds <= left:
                step.tail -= 1
                index = step.tail
            else:
                break
            share.spare_tokens -= step.tokens[index]
            taken.append(step.sequences[index])
        return taken
