"""Late binding: waiting sequences are handed out as replicas get room, by the planner's budgets.

An idle replica takes the longest waiting work, as much of it as it can finish within the budget of its
turn; lanes that get free take fillers. In the planner's `pipelined` mode budgets fall from turn to turn, and replicas
ask in the order in which they ended the step before, so the one with the short range there takes the long range here,
whatever the predictions were worth. A pure object: `now` is passed in, nothing is started here. Not thread-safe.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

import numpy as np

from rhyme_verl.histopipe.planner import Mode, schedule
from rhyme_verl.histopipe.ranges import Budgets, Fleet, Ranges, Work

LEAST_LATE = 8  # sequences that a replica takes at least, of those that wait after everybody's turn


USABLE = 0.7  # share of a dense replica's time that goes to fillers, rather than to the range it began with


@dataclass(slots=True)
class _Waiting:
    """What waits of a step, longest first: ranges from `head` to `head_end`, fillers from `filler` to `tail`."""

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
    turns: int = 0  # taken by replicas
    dense_rate: float = 0.0  # tokens per second of replicas that hold nothing back
    spare_tokens: float = 0.0  # of the others

    def __len__(self) -> int:
        return self.head_end - self.head + self.tail - self.filler


@dataclass(slots=True)
class _Share:
    """What a replica may still take into lanes that get free."""

    dense: bool = False  # its range is a whole wave: nothing is held back there
    spare_tokens: float = 0.0
    deadline: float = 0.0


class LateBinder:
    """Decides which waiting sequences a replica starts.

    Args:
        fleet: the replicas.
        mode: `barrier` if what is opened at once is all that the fleet does until it is over, a step or a pair of
            steps; `pipelined` if the next step is opened before.
    """

    def __init__(self, fleet: Fleet, mode: Mode) -> None:
        order = np.argsort(-fleet.speeds, kind="stable")
        self.turn_order: list[int] = order.tolist()  # in which idle replicas should ask when a step begins
        self._fleet = replace(fleet, speeds=fleet.speeds[order])
        self._speeds: list[float] = fleet.speeds.tolist()
        self._step_seconds: list[float] = fleet.cost.seconds.tolist()
        self._mode: Mode = mode
        self._steps: deque[_Waiting] = deque()
        self._shares = [_Share() for _ in self._speeds]

    def __len__(self) -> int:
        """Return the number of sequences that no replica has started."""
        return sum(len(step) for step in self._steps)

    def waiting(self) -> list[int]:
        """Return the sequences that no replica has started; when replicas come or go, open them in a new binder."""
        return [
            sequence
            for step in self._steps
            for sequence in step.sequences[step.head : step.head_end] + step.sequences[step.filler : step.tail]
        ]

    def open(self, sequences: np.ndarray, work: Work, now: float, needs_version: int = 0) -> None:
        """Let a step's sequences be handed out.

        Args:
            sequences: int64 [sequences], what to hand out, group by group.
            work: their groups, in the same order.
            now: seconds.
            needs_version: oldest policy version that a replica may generate them with.
        """
        plan = schedule(work, self._fleet, self._mode)
        fillers = round(plan.cut.ends[-1])
        self._steps.append(
            _Waiting(
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

    def take(self, replica: int, running: int, version: int, now: float) -> list[int]:
        """Return the sequences that `replica`, with `running` sequences of policy `version`, starts at `now`."""
        step = self._step_for(version)
        if step is None:
            return []
        share = self._shares[replica]
        taken = [] if running else self._take_range(step, replica, share, now)
        return taken + self._fill(step, replica, share, running + len(taken), now)

    def _step_for(self, version: int) -> _Waiting | None:
        while self._steps and not self._steps[0]:
            self._steps.popleft()
        step = next((step for step in self._steps if step), None)
        return step if step is not None and step.needs_version <= version else None

    def _take_range(self, step: _Waiting, replica: int, share: _Share, now: float) -> list[int]:
        in_ranges = step.head < step.head_end
        head, end = (step.head, step.head_end) if in_ranges else (step.filler, step.tail)
        if head == end:
            return []
        seconds, least = self._turn(step, head, now)
        capacity = step.ranges.capacity(seconds * self._speeds[replica], step.spans[head], step.budgets)
        end = min(max(round(step.ranges.range_end(head, capacity)), head + least), end)
        share.spare_tokens = capacity - (step.ranges.tokens_before(end) - step.ranges.tokens_before(head))
        share.deadline = now + seconds
        share.dense = end - head >= self._fleet.max_running
        if share.dense:
            step.dense_rate += self._fleet.max_running * self._speeds[replica] / self._step_seconds[-1]
        else:
            step.spare_tokens += share.spare_tokens
        if in_ranges:
            step.head = end
        else:
            step.filler = end
        return step.sequences[head:end]

    def _turn(self, step: _Waiting, head: int, now: float) -> tuple[float, int]:
        """Return the seconds of the next turn and how many sequences are taken in it at least.

        After everybody's turn the predictions have been too short: what waits is shared out evenly.
        """
        num = len(self._shares)
        step.turns += 1
        if step.turns <= num:
            return float(step.budgets.of_rank(step.turns - 1, num)), 1
        left = step.ranges.tokens_before(step.tail) - step.ranges.tokens_before(head)
        even = self._fleet.cost.replica_seconds(left / num, step.spans[head], self._fleet.max_running)
        return max(step.end - now, float(even)), min(LEAST_LATE, self._fleet.max_running)

    def _behind(self, step: _Waiting, now: float) -> bool:
        """Return whether more waits than the fleet will do in time, so that no lane may stay free."""
        waiting = step.ranges.tokens_before(step.tail) - step.ranges.tokens_before(step.filler)
        possible = step.spare_tokens + USABLE * step.dense_rate * max(0.0, step.end - now)
        return step.turns >= len(self._shares) and waiting > possible

    def _fill(self, step: _Waiting, replica: int, share: _Share, running: int, now: float) -> list[int]:
        """Take fillers into free lanes: the longest if it ends before the replica's deadline, or else the shortest.

        A replica with few long sequences takes none that would hold these up beyond its deadline.
        """
        taken: list[int] = []
        dense = share.dense or self._behind(step, now)
        left = (share.deadline - now) * self._speeds[replica]
        while running < self._fleet.max_running and step.filler < step.tail:
            running += 1
            longest = left / self._step_seconds[running]
            if dense or (step.tokens[step.filler] <= share.spare_tokens and step.spans[step.filler] <= longest):
                index = step.filler
                step.filler += 1
            elif step.tokens[step.tail - 1] <= share.spare_tokens and step.spans[step.tail - 1] <= longest:
                step.tail -= 1
                index = step.tail
            else:
                break
            share.spare_tokens -= step.tokens[index]
            if not share.dense:
                step.spare_tokens -= step.tokens[index]
            taken.append(step.sequences[index])
        return taken
