"""Decides which answer runs on which replica. Lanes go to the oldest unit first, then to the longest prediction.

A lane is one of the `max_num_seqs` sequences that a replica generates concurrently. An answer keeps its lane until it
ends or is parked, and for `KEEP_SECONDS` without a request, for example during a tool call. Pure: the time is an
argument, there is no I/O. Does not depend on verl, vLLM or Ray.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice

from rhyme_verl.histopipe.messages import Outbox
from rhyme_verl.request_id import AnswerId

KEEP_SECONDS = 3.0
MAX_PER_CALL = 2048  # lanes granted or freed in one call, for which all other calls wait; the next call goes on
# Predicted tokens granted beyond a replica's lanes, as a share of those that it holds, so that its engine never waits
# for the next answer; without and with batches that overlap, where an answer that is bound early delays a later batch.
AHEAD, AHEAD_OF_OVERLAP = 0.2, 0.02
VALIDATION_UNIT = -1  # sorts before every training unit

# When an answer had a running request on a replica: its name, start and end.
Span = tuple[str, float, float]


@dataclass(slots=True, eq=False)
class Replica:
    """The load of a replica."""

    name: str
    number: int  # order in which replicas were added
    now: float
    lanes: int = 0  # number of lanes that answers hold; `AHEAD` allows more than `max_running`
    predicted_tokens: float = 0.0  # sum of the predicted lengths of these answers
    pending: int = 0  # number of these answers whose request has not started since they got their lane
    running: int = 0  # number of running requests of known answers
    lane_seconds: float = 0.0  # held lanes, up to `max_running`, integrated over time
    idle_seconds: float = 0.0  # without a held lane

    def advance(self, now: float, max_running: int) -> None:
        elapsed = max(0.0, now - self.now)
        self.lane_seconds += elapsed * min(self.lanes, max_running)
        self.idle_seconds += 0.0 if self.lanes else elapsed
        self.now += elapsed


@dataclass(slots=True, eq=False)
class _Answer:
    id: AnswerId
    unit: int
    predicted: float
    replica: Replica | None = None  # on which it holds a lane or last held one
    holds_lane: bool = False
    is_pending: bool = False  # has started no request since it got its lane
    is_waiting: bool = True
    running_on: Replica | None = None
    requests: int = 0  # number of its running requests; an agent loop may send several at once
    started: float = 0.0  # when the first of them started
    spans: list[Span] = field(default_factory=list)
    idle_since: float = 0.0


class Lanes:
    """Grants lanes to waiting answers, `max_running` per replica; `outbox` receives the decisions.

    `overlaps`: whether batches arrive while earlier ones are generated.
    """

    def __init__(self, max_running: int, outbox: Outbox, *, overlaps: bool = False) -> None:
        self.max_running = max_running
        self.grants_ahead = True
        self._ahead = AHEAD_OF_OVERLAP if overlaps else AHEAD
        self.is_paused = False  # between two units, only validation answers get lanes
        self._outbox = outbox
        self._replicas: dict[str, Replica] = {}
        self._num_added = 0
        self._by_lanes: list[tuple[int, int, Replica]] = []  # heap; entries with another number of lanes are outdated
        self._answers: dict[AnswerId, _Answer] = {}
        self._queue: list[tuple[int, float, int, _Answer]] = []
        self._num_queued = 0  # total so far; ties are broken in the order of arrival
        self._num_waiting = 0
        self._parked: dict[AnswerId, _Answer] = {}
        self._between: dict[AnswerId, _Answer] = {}  # hold a lane but run no request, longest idle first

    @property
    def replicas(self) -> dict[str, Replica]:
        return self._replicas

    @property
    def waiting(self) -> int:
        """Number of answers that wait for a lane, excluding parked ones."""
        return self._num_waiting

    @property
    def held(self) -> int:
        """Number of lanes held on all replicas."""
        return sum(replica.lanes for replica in self._replicas.values())

    def add_replicas(self, names: Iterable[str], now: float) -> None:
        for name in names:
            if name not in self._replicas:
                self._num_added += 1
                self._replicas[name] = replica = Replica(name, self._num_added, now)
                self._sort_in(replica)
        self.deal(now)

    def remove_replicas(self, names: Iterable[str], now: float) -> None:
        """Forget replicas; their answers wait for a lane elsewhere."""
        gone = {self._replicas.pop(name) for name in names if name in self._replicas}
        for answer in list(self._answers.values()):
            if answer.running_on in gone:
                self._end_span(answer, now)
            if answer.replica not in gone:
                continue
            self._between.pop(answer.id, None)
            answer.replica, answer.holds_lane, answer.is_pending = None, False, False
            if not answer.is_waiting and answer.id not in self._parked:
                self._outbox.park(answer.id)
                self._wait(answer)
        self.deal(now)

    def add(self, answer: AnswerId, unit: int, predicted: float) -> None:
        """Queue an answer for a lane; call `deal` after the last one."""
        self._answers[answer] = found = _Answer(answer, unit, predicted, is_waiting=False)
        self._wait(found)

    def deal(self, now: float) -> bool:
        """Grant lanes, each on the replica with the fewest held lanes, while that one has room.

        Returns whether it stopped at `MAX_PER_CALL` lanes.
        """
        for _ in range(MAX_PER_CALL):
            replica = self._emptiest() if self._has_next() else None
            if replica is None or not self._has_room(replica):
                return False
            self._hold(self._next(), replica, now)
        return True

    def start(self, answer: AnswerId, now: float) -> None:
        """Record that a request goes to its answer's replica; an answer that has lost its lane takes it again.

        Call `deal` after the last one, because a replica may have room once its answers have started.
        """
        found = self._answers.get(answer)
        if found is None or found.replica is None:
            return
        found.requests += 1
        if found.running_on is not None:
            found.running_on.running += 1
            return
        if not found.holds_lane and answer not in self._parked and not found.is_waiting:
            self._take_lane(found, found.replica, now)
        self._between.pop(answer, None)
        found.replica.advance(now, self.max_running)
        found.running_on, found.started = found.replica, now
        found.replica.running += 1
        self._clear_pending(found)

    def stop(self, answer: AnswerId, now: float) -> None:
        """Record that a request of an answer has ended."""
        found = self._answers.get(answer)
        if found is None or found.running_on is None:
            return
        found.running_on.running -= 1
        found.requests -= 1
        if not found.requests:
            self._end_span(found, now)
            if found.holds_lane:
                self._between[answer] = found

    def end(self, answer: AnswerId, now: float) -> list[Span]:
        """Record that an answer is complete or has failed, and grant its lane; call `deal` after the last one.

        Returns when and where the answer ran, in order.
        """
        found = self._answers.pop(answer, None)
        if found is None:
            return []
        replica = found.replica
        if found.running_on is not None:
            found.running_on.running -= found.requests
            self._end_span(found, now)
        if found.is_waiting:
            found.is_waiting = False  # `_has_next` drops its queue entry
            self._num_waiting -= 1
        self._parked.pop(answer, None)
        if found.holds_lane:
            self._free(found, now)
            if replica is not None and replica.lanes < self.max_running and self._has_next():
                self._hold(self._next(), replica, now)
        return found.spans

    def park(self, answers: Iterable[AnswerId], now: float) -> None:
        """Take the lanes of these answers: their next requests wait until `unpark`, running requests continue."""
        for answer in answers:
            found = self._answers.get(answer)
            if found is None or answer in self._parked or found.is_waiting:
                continue
            if found.holds_lane:
                self._free(found, now)
            self._parked[answer] = found
            self._outbox.park(answer)

    def unpark(self, now: float) -> None:
        """Let parked answers wait for a lane again; those with a running request keep their replica."""
        parked, self._parked = list(self._parked.values()), {}
        for answer in parked:
            if answer.running_on is not None:
                self._hold(answer, answer.running_on, now)
            else:
                self._wait(answer)

    def expire(self, now: float) -> None:
        """Free the lanes of answers that have run no request for `KEEP_SECONDS`."""
        for answer in list(islice(self._between.values(), MAX_PER_CALL)):
            if now - answer.idle_since <= KEEP_SECONDS:
                break
            self._free(answer, now)
        self.deal(now)

    # Internals.

    def _sort_in(self, replica: Replica) -> None:
        heapq.heappush(self._by_lanes, (replica.lanes, replica.number, replica))
        if len(self._by_lanes) > 64 + 8 * len(self._replicas):
            self._by_lanes = [(one.lanes, one.number, one) for one in self._replicas.values()]
            heapq.heapify(self._by_lanes)

    def _emptiest(self) -> Replica | None:
        """Return the replica with the fewest held lanes."""
        while self._by_lanes:
            lanes, _, replica = self._by_lanes[0]
            if replica.lanes == lanes and self._replicas.get(replica.name) is replica:
                return replica
            heapq.heappop(self._by_lanes)
        return None

    def _has_room(self, replica: Replica) -> bool:
        """Return whether the replica has a lane for the next answer, or so little work that it may queue there.

        An answer that the engine queues cannot move to another replica, so short ones are granted further ahead, and
        none as long as it would overtake an earlier one that has its lane but is not ready.
        """
        if replica.lanes < self.max_running:
            return True
        if not self.grants_ahead or replica.lanes - replica.pending < self.max_running:
            return False
        num_ahead = replica.lanes - self.max_running
        return num_ahead * self._queue[0][3].predicted < self._ahead * replica.predicted_tokens

    def _wait(self, answer: _Answer) -> None:
        answer.is_waiting = True
        self._num_waiting += 1
        self._num_queued += 1
        heapq.heappush(self._queue, (answer.unit, -answer.predicted, self._num_queued, answer))

    def _has_next(self) -> bool:
        while self._queue and not self._queue[0][3].is_waiting:
            heapq.heappop(self._queue)
        return bool(self._queue) and (not self.is_paused or self._queue[0][0] == VALIDATION_UNIT)

    def _next(self) -> _Answer:
        answer = heapq.heappop(self._queue)[3]
        answer.is_waiting = False
        self._num_waiting -= 1
        return answer

    def _hold(self, answer: _Answer, replica: Replica, now: float) -> None:
        self._take_lane(answer, replica, now)
        if answer.running_on is None:
            self._between[answer.id] = answer
            answer.is_pending = True
            replica.pending += 1
        self._outbox.grant(answer.id, replica.name)

    def _take_lane(self, answer: _Answer, replica: Replica, now: float) -> None:
        replica.advance(now, self.max_running)
        replica.lanes += 1
        self._sort_in(replica)
        replica.predicted_tokens += answer.predicted
        answer.replica, answer.holds_lane, answer.idle_since = replica, True, now

    def _free(self, answer: _Answer, now: float) -> None:
        assert answer.replica is not None
        answer.replica.advance(now, self.max_running)
        answer.replica.lanes -= 1
        self._sort_in(answer.replica)
        answer.replica.predicted_tokens -= answer.predicted
        self._clear_pending(answer)
        answer.holds_lane = False
        self._between.pop(answer.id, None)

    @staticmethod
    def _end_span(answer: _Answer, now: float) -> None:
        assert answer.running_on is not None
        answer.spans.append((answer.running_on.name, answer.started, now))
        answer.running_on, answer.requests, answer.idle_since = None, 0, now

    @staticmethod
    def _clear_pending(answer: _Answer) -> None:
        if answer.is_pending and answer.replica is not None:
            answer.replica.pending -= 1
        answer.is_pending = False
