"""Which replica generates which answer, from a batch's arrival to its last answer: the state behind the router.

A trajectory holds a lane of its replica from the moment it is bound to it until it ends; between its requests (tool
calls, or an abort and its resumption) the lane stays its own for `KEEP_SECONDS`. A pure object: the time is passed in,
nothing is started here. Knows nothing of verl, vLLM or Ray. Not thread-safe.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

import numpy as np

from rhyme_verl.histopipe.binder import LateBinder
from rhyme_verl.histopipe.lengths import LengthPrediction, LengthPredictor, PredictionError
from rhyme_verl.histopipe.meter import FleetMeter
from rhyme_verl.histopipe.migration import seconds_saved
from rhyme_verl.histopipe.queue import LongestFirst
from rhyme_verl.histopipe.ranges import P90_SCORE, Work
from rhyme_verl.histopipe.request_id import Trajectory
from rhyme_verl.histopipe.step_cost import StepCost

logger = logging.getLogger(__name__)

KEEP_SECONDS = 3.0
RESUME_SECONDS = 1.0  # after which verl resumes an aborted request
AHEAD_RISE, AHEAD_FALL = 0.7, 0.1  # share of the latest observation in what is on its way: an idle place costs more
LATE = 0.1  # share of a replica's places bound to trajectories that do not come
MAX_AHEAD = 1.0  # of a replica's places
AHEAD_SECONDS = 3.0  # for which a replica always has work: workers stall as long
RATE_SHARE = 0.5  # of the latest unit in the rate at which replicas end answers
COMPARED = 8  # replicas, when an answer that is bound to a full one asks
PROMPT_SHARE = 0.01  # of the latest answer in the mean of prompts' lengths
OUTLIER_SCORES = 2.5  # standard deviations of log length at which an answer has outlived its prediction


@dataclass(frozen=True)
class Group:
    """A prompt and the answers that are wanted to it.

    Attributes:
        uid: verl's name of this rollout of the prompt.
        prompt: names the prompt in all epochs (uint64).
        samples: answers.
        step: training step that it was dispatched for.
    """

    uid: str
    prompt: int
    samples: int
    step: int


@dataclass(frozen=True, kw_only=True)
class Finished:
    """One answer, for the log of schedules.

    Attributes:
        replica: that gave its last token.
        uid, sample: which.
        step: it was dispatched for.
        start, end: seconds, on the clock of the calls.
        tokens: generated.
        predicted: tokens that were expected.
        lanes: of its replica.
    """

    replica: str
    uid: str
    sample: int
    step: int
    start: float
    end: float
    tokens: int
    predicted: float
    lanes: int


@dataclass(frozen=True, kw_only=True)
class UnitReport:
    """What was opened together, when its last answer has ended.

    Attributes:
        step: training step that the oldest part was dispatched for.
        answers: that ended, and `tokens` in them.
        tokens: generated.
        seconds: from the opening to the last answer.
        bubble: share of lanes that were free, over all replicas and `seconds`.
        idle: share of replica-seconds without any answer running.
        lost: share of `seconds` beyond what all tokens take on replicas that are full throughout.
        error: how right the predictions were.
    """

    step: int
    answers: int
    tokens: int
    seconds: float
    bubble: float
    idle: float
    lost: float
    error: PredictionError


@dataclass(slots=True, eq=False)
class _Replica:
    name: str
    lanes: int = 0  # held by trajectories
    unasked: int = 0  # of these, trajectories whose first request has not come
    others: int = 0  # requests that belong to no trajectory known here
    now: float = 0.0
    lane_seconds: float = 0.0  # integral of `lanes`
    idle_seconds: float = 0.0

    def advance(self, now: float) -> None:
        self.lane_seconds += self.lanes * (now - self.now)
        self.idle_seconds += (now - self.now) if not self.lanes else 0.0
        self.now = now


@dataclass(slots=True, eq=False)
class _Unit:
    step: int
    opened: float
    left: int
    before: dict[str, tuple[float, float]]  # lane and idle seconds of each replica when it opened
    learn: bool
    prompts: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    truncated: list[bool] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Sequence:
    trajectory: Trajectory
    group: Group
    unit: _Unit
    tokens: float
    p50: float
    p90: float
    replica: _Replica | None = None  # latest
    holds_lane: bool = False
    unasked: bool = False  # it holds one, and its first request has not come
    requests: int = 0  # at the replica now
    idle_since: float = 0.0
    first_start: float | None = None
    turn_start: float = 0.0
    turn_lane_seconds: float = 0.0
    busy_seconds: float = 0.0
    lane_seconds: float = 0.0  # of its replicas while it was generated
    moved: bool = False  # to other replicas than its first
    target: _Replica | None = None  # to be moved to at its next request


class Dispatcher:
    """Binds trajectories to replicas, late, by predicted length.

    Args:
        max_running: sequences that run at once on a replica.
        max_tokens: cap on the length of an answer.
        step_cost: measured, if it was; otherwise it is learnt.
    """

    def __init__(self, *, max_running: int, max_tokens: int, step_cost: StepCost | None = None) -> None:
        self.predictor = LengthPredictor(default_tokens=max_tokens / 4.0)
        self.meter = FleetMeter(max_running, step_cost)
        self.cache_tokens: int | None = None  # that a replica's cache holds, if known
        self._most_running = max_running
        self._max_running = max_running  # as the cache allows for the latest unit
        self._ahead = 0.0  # places of a replica that are on their way from one answer to the next
        self._rate = 0.0  # answers that a replica ends in a second
        self._max_tokens = max_tokens
        self._prompt_tokens = 0.0  # recent mean per prompt
        self._replicas: dict[str, _Replica] = {}
        self._names: list[str] = []  # of replicas
        self._random = random.Random(0)
        self._sequences: dict[Trajectory, _Sequence] = {}
        self._numbers: dict[int, _Sequence] = {}  # as binder and queue know them
        self._next_number = 0
        self._plan: LateBinder | None = None
        self._planned: list[str] = []  # replicas in the plan's order
        self._place: dict[str, int] = {}
        self._queue = LongestFirst(max_running)
        self._between: dict[Trajectory, _Sequence] = {}  # hold a lane and have no request, the longest so first
        self._lanes = 0  # held in all
        self._latest_step = 0
        self._has_failed = False
        self.migrations = 0  # answers moved, ever

    # Replicas.

    @property
    def replicas(self) -> list[str]:
        return list(self._replicas)

    def add_replicas(self, names: Iterable[str], now: float) -> list[Trajectory]:
        for name in names:
            self._replicas.setdefault(name, _Replica(name, now=now))
        self._names = list(self._replicas)
        self._replan(now)
        return self._offer_all(now)

    def remove_replicas(self, names: Iterable[str], now: float) -> list[Trajectory]:
        """Forget replicas; what they ran, or were to run, goes elsewhere as soon as it asks."""
        all_gone = [self._replicas.pop(name) for name in names if name in self._replicas]
        if not all_gone:
            return []
        for gone in all_gone:
            for sequence in self._sequences.values():
                if sequence.target is gone:
                    sequence.target = None
                if sequence.replica is gone:
                    self._end_turn(sequence, now)
                    self._free(sequence, now)
        self._names = list(self._replicas)
        self._replan(now)
        return self._offer_all(now)

    def knows(self, trajectory: Trajectory) -> bool:
        """Whether it has been opened and has not ended."""
        return trajectory in self._sequences

    def replica_of(self, trajectory: Trajectory) -> str | None:
        """Return where a trajectory is, if it is bound."""
        sequence = self._sequences.get(trajectory)
        return None if sequence is None or sequence.replica is None else sequence.replica.name

    def least_loaded(self) -> str:
        """Return the replica with the fewest answers and requests.

        Raises:
            RuntimeError: there is none.
        """
        if not self._replicas:
            raise RuntimeError("No available servers in load balancer")  # the words that verl's client waits upon
        return min(self._replicas.values(), key=lambda one: one.lanes + one.others).name

    def requests_at(self, name: str) -> int:
        """Return how many requests a replica has."""
        replica = self._replicas[name]
        return replica.others + sum(one.requests for one in self._sequences.values() if one.replica is replica)

    # Work.

    def open(self, groups: Sequence[Group], *, planned: bool, learn: bool = True, now: float) -> list[Trajectory]:
        """Let the answers to these prompts be bound.

        Args:
            groups: prompts.
            planned: plan them as all that the replicas do until it is over; otherwise they go where room is.
            learn: lengths are learnt from them (not from those of a validation).
            now: seconds.
        """
        for replica in self._replicas.values():
            replica.advance(now)
        unit = _Unit(
            step=min(group.step for group in groups),
            opened=now,
            left=sum(group.samples for group in groups),
            before={name: (one.lane_seconds, one.idle_seconds) for name, one in self._replicas.items()},
            learn=learn,
        )
        prediction = self._predict(groups)
        self._fit_cache(float(np.mean(prediction.mean)))
        first = self._next_number
        for index, group in enumerate(groups):
            for sample in range(group.samples):
                sequence = _Sequence(
                    (group.uid, sample),
                    group,
                    unit,
                    tokens=float(prediction.mean[index]),
                    p50=float(prediction.p50[index]),
                    p90=float(prediction.p90[index]),
                )
                self._sequences[sequence.trajectory] = sequence
                self._numbers[self._next_number] = sequence
                self._next_number += 1
        numbers = np.arange(first, self._next_number)
        samples = np.array([group.samples for group in groups], dtype=np.int64)
        if planned and self._replicas and not self._busy() and self._open_plan(numbers, samples, prediction, now):
            return self._offer_all(now)
        for group, group_numbers, tokens in zip(
            groups, np.split(numbers, np.cumsum(samples)[:-1]), prediction.mean, strict=True
        ):
            self._queue.open(group_numbers, np.full(group.samples, tokens), group.step)
        return self._offer_all(now)

    def ask(self, trajectory: Trajectory, now: float) -> str:
        """Return the replica that a known trajectory's next request goes to now.

        That is the one it is bound to, or was at its last request. A trajectory that asks before it is bound, or whose
        replica is gone, gets the one with the fewest, whether there is room or not: whoever has started is not stopped.

        Raises:
            RuntimeError: there is no replica.
        """
        sequence = self._sequences[trajectory]
        if sequence.target is not None and not sequence.requests:
            self._free(sequence, now)
            sequence.replica, sequence.moved, self.migrations = sequence.target, True, self.migrations + 1
            sequence.target = None
        if not sequence.holds_lane:
            known = sequence.replica is not None and self._is_here(sequence.replica)
            sequence.moved = sequence.moved or (sequence.replica is not None and not known)
            self._hold(sequence, sequence.replica if known else self._replicas[self.least_loaded()], now)
        elif sequence.unasked:
            self._leave_full(sequence, now)
        self._has_asked(sequence)
        replica = sequence.replica
        assert replica is not None
        if sequence.requests == 0:
            replica.advance(now)
            sequence.turn_start, sequence.turn_lane_seconds = now, replica.lane_seconds
            if sequence.first_start is None:
                sequence.first_start = now
        sequence.requests += 1
        self._between.pop(trajectory, None)
        return replica.name

    def start_other(self, replica: str) -> None:
        """A request of no known trajectory goes to a replica."""
        self._replicas[replica].others += 1

    def release(self, trajectory: Trajectory | None, replica: str, now: float) -> None:
        """A request has ended; its trajectory, if it has one, keeps the lane for a while."""
        sequence = None if trajectory is None else self._sequences.get(trajectory)
        if sequence is not None and sequence.requests and sequence.replica is self._replicas.get(replica):
            sequence.requests -= 1
            if not sequence.requests:
                self._end_turn(sequence, now)
        elif sequence is None and replica in self._replicas:
            self._replicas[replica].others = max(0, self._replicas[replica].others - 1)

    def finish(
        self, trajectory: Trajectory, tokens: int | None, truncated: bool, now: float, prompt_tokens: int = 0
    ) -> tuple[list[Trajectory], Finished | None, UnitReport | None]:
        """A trajectory has ended.

        Args:
            trajectory: which.
            tokens: generated; None if it failed.
            truncated: it was cut off at the cap.
            now: seconds.
            prompt_tokens: of its prompt.

        Returns:
            What is bound in its place, what it was, and what is to say of its unit if it was the last of it.
        """
        sequence = self._sequences.pop(trajectory, None)
        if sequence is None:
            return [], None, None
        self._end_turn(sequence, now)
        replica, unit = sequence.replica, sequence.unit
        finished = None
        if tokens is not None and replica is not None and sequence.first_start is not None:
            finished = Finished(
                replica=replica.name, uid=trajectory[0], sample=trajectory[1], step=sequence.group.step,
                start=sequence.first_start, end=now, tokens=tokens, predicted=sequence.tokens, lanes=self._max_running,
            )  # fmt: skip
            self._prompt_tokens += PROMPT_SHARE * (prompt_tokens - self._prompt_tokens)
            unit.prompts.append(sequence.group.prompt)
            unit.lengths.append(tokens)
            unit.truncated.append(truncated)
            if not sequence.moved and sequence.busy_seconds > 0.0:
                running = max(1.0, sequence.lane_seconds / sequence.busy_seconds)
                self.meter.observe(replica.name, tokens, sequence.busy_seconds, running)
        self._free(sequence, now)
        bound = self._offer([replica], now) if replica is not None else []
        unit.left -= 1
        return bound, finished, self._close(unit, now) if not unit.left else None

    def expire(self, now: float) -> list[Trajectory]:
        """Take the lanes of trajectories that have not asked for long."""
        stale = list(takewhile(lambda one: now - one.idle_since > KEEP_SECONDS, self._between.values()))
        for sequence in stale:
            self._free(sequence, now)
        return self._offer_all(now) if stale else []

    def outliers(self, recompute_seconds_per_token: float, now: float) -> list[Trajectory]:
        """Choose answers that have far outlived their predictions and that would end sooner on a replica with less to
        do, although their prefix is recomputed there. Whoever aborts one sees it resumed on that replica.

        Args:
            recompute_seconds_per_token: measured cost of a prefix.
            now: seconds.
        """
        if self.waiting or len(self._replicas) < 2:
            return []
        cost = self.meter.cost()
        lanes = {name: replica.lanes for name, replica in self._replicas.items()}
        for sequence in self._sequences.values():
            if sequence.target is not None:  # it is on its way
                lanes[sequence.target.name] += 1
                if sequence.holds_lane and sequence.replica is not None:
                    lanes[sequence.replica.name] -= 1
        chosen = []
        for sequence in self._sequences.values():
            if not sequence.requests or sequence.moved or sequence.target is not None or sequence.replica is None:
                continue
            here = sequence.replica.name
            seconds = sequence.busy_seconds + now - sequence.turn_start
            tokens = min(seconds / float(cost.at(max(1, lanes[here]))), float(self._max_tokens))
            p50 = max(sequence.p50, 1.0)
            if tokens <= p50 * max(sequence.p90 / p50, 1.0) ** (OUTLIER_SCORES / P90_SCORE):
                continue
            there = min(lanes, key=lambda name: lanes[name])
            saved = seconds_saved(tokens, lanes[here], lanes[there], cost, recompute_seconds_per_token)
            if there == here or saved <= RESUME_SECONDS:
                continue
            sequence.target = self._replicas[there]
            lanes[here], lanes[there] = lanes[here] - 1, lanes[there] + 1
            chosen.append(sequence.trajectory)
        return chosen

    def lanes_of(self, name: str) -> int:
        """Return how many trajectories hold a place on a replica."""
        return self._replicas[name].lanes if name in self._replicas else 0

    def observe_transit(self, places: float) -> None:
        """Learn how many of a replica's places are on their way: an answer has ended there, and the next one has not
        come. So many more trajectories are bound, so that a replica has work meanwhile.
        """
        change = min(max(places, 0.0), MAX_AHEAD * self._max_running) - self._ahead
        self._ahead += (AHEAD_RISE if change > 0 else AHEAD_FALL) * change

    def forget_places(self) -> int:
        """Let trajectories between two requests go on anywhere; returns how many."""
        between = list(self._between.values())
        for sequence in between:
            self._free(sequence, sequence.idle_since)
            sequence.replica = None
        return len(between)

    @property
    def waiting(self) -> int:
        """Trajectories that have no replica."""
        return (len(self._plan) if self._plan else 0) + len(self._queue)

    # How.

    def _is_here(self, replica: _Replica) -> bool:
        """Whether it has not been removed; one that comes back under its name is another one."""
        return self._replicas.get(replica.name) is replica

    def _busy(self) -> bool:
        return self.waiting > 0 or self._lanes > 0

    def _fit_cache(self, tokens: float) -> None:
        """Let no more answers of this mean length run on a replica than its cache holds to their ends."""
        self._max_running = self._most_running
        if self.cache_tokens is not None:
            fitting = int(self.cache_tokens / (self._prompt_tokens + tokens))
            self._max_running = max(1, min(self._most_running, fitting))
        self._queue.max_running = self._max_running

    def _predict(self, groups: Sequence[Group]) -> LengthPrediction:
        try:
            return self.predictor.predict(np.array([group.prompt for group in groups], dtype=np.uint64))
        except Exception as error:  # an even deal is always possible
            self._say_failed("predict lengths", error)
            unknown = np.full(len(groups), self._max_tokens / 4.0)
            return LengthPrediction(p50=unknown, p90=unknown, mean=unknown)

    def _open_plan(self, numbers: np.ndarray, samples: np.ndarray, prediction: LengthPrediction, now: float) -> bool:
        """Plan them; False if that failed."""
        work = Work(
            tokens=np.clip(prediction.mean, 1.0, self._max_tokens),
            p50=np.clip(prediction.p50, 1.0, self._max_tokens),
            p90=np.clip(np.maximum(prediction.p90, prediction.p50), 1.0, self._max_tokens),
            samples=samples,
            max_tokens=float(self._max_tokens),
        )
        try:
            names = list(self._replicas)
            binder = LateBinder(self.meter.fleet(names, self._max_running), "barrier")
            binder.open(numbers, work, now)
        except Exception as error:
            self._say_failed("plan a step", error)
            return False
        self._plan, self._planned = binder, names
        self._place = {name: index for index, name in enumerate(names)}
        return True

    def _say_failed(self, what: str, error: Exception) -> None:
        if not self._has_failed:
            self._has_failed = True
            logger.error("HistoPipe could not %s; answers go where room is: %s", what, error, exc_info=error)

    def _replan(self, now: float) -> None:
        """Let what waits go where room is if replicas are at work, as a plan counts on idle ones; else plan it anew."""
        if self._plan is None or not len(self._plan):
            return
        numbers = np.array(self._plan.waiting(), dtype=np.int64)
        self._plan = None
        waiting = [self._numbers[number] for number in numbers.tolist()]
        prediction = LengthPrediction(
            p50=np.array([one.p50 for one in waiting]),
            p90=np.array([one.p90 for one in waiting]),
            mean=np.array([one.tokens for one in waiting]),
        )
        ones = np.ones(len(numbers), dtype=np.int64)
        if self._replicas and not self._lanes and self._open_plan(numbers, ones, prediction, now):
            return
        for sequence, number in zip(waiting, numbers, strict=True):
            self._queue.open(np.array([number]), np.array([sequence.tokens]), sequence.group.step)

    def _offer_all(self, now: float) -> list[Trajectory]:
        if not self.waiting:
            return []
        if self._plan is not None:
            return self._offer([self._replicas[self._planned[index]] for index in self._plan.turn_order], now)
        return self._offer(sorted(self._replicas.values(), key=lambda one: one.lanes), now)

    def top_up(self, now: float) -> list[Trajectory]:
        """Bind more to replicas that still wait for much of what is bound to them: its workers are not ready yet."""
        if not self.waiting:
            return []
        late = [one for one in self._replicas.values() if one.unasked > LATE * self._max_running]
        return self._offer(late, now, instead_of_late=True)

    def _offer(self, replicas: Sequence[_Replica], now: float, *, instead_of_late: bool = False) -> list[Trajectory]:
        """Bind what waits to these replicas, in this order, as far as they have room."""
        bound: list[Trajectory] = []
        for replica in replicas:
            if not self._is_here(replica):
                continue
            ahead = self._places_ahead()
            if instead_of_late:
                ahead = max(ahead, min(replica.unasked, round(MAX_AHEAD * self._max_running)))
            for _ in range(2):  # one that has nothing fills its places first, then what is ahead
                for number in self._take(replica, ahead, now):
                    self._bind(self._numbers.pop(number), replica, now, bound)
        if self._plan is not None and not len(self._plan):
            self._plan = None
        return bound

    def _places_ahead(self) -> int:
        """Return how many answers a replica gets beyond its places."""
        if self._max_running < self._most_running:  # it would begin them, although its cache does not hold them
            return round(self._ahead)
        left = self.waiting // len(self._replicas)  # the last ones go to whoever is free first
        return max(round(self._ahead), min(round(self._rate * AHEAD_SECONDS), left))

    def _take(self, replica: _Replica, ahead: int, now: float) -> list[int]:
        """Take from what waits what a replica is to begin, as if `ahead` of what it has were done."""
        running = max(1, replica.lanes - ahead) if replica.lanes else 0
        taken: list[int] = []
        if self._plan is not None:
            taken = self._plan.take(self._place[replica.name], running, 0, now)
        if len(self._queue):
            lanes = max(0, self._lanes - ahead * len(self._replicas))
            taken = taken + self._queue.take(running + len(taken), lanes + len(taken), len(self._replicas))
        return taken

    def _bind(self, sequence: _Sequence, replica: _Replica, now: float, bound: list[Trajectory]) -> None:
        if sequence.trajectory not in self._sequences or sequence.replica is not None:
            return  # it failed while it waited, or did not wait
        self._hold(sequence, replica, now)
        sequence.unasked = True
        replica.unasked += 1
        bound.append(sequence.trajectory)

    def _hold(self, sequence: _Sequence, replica: _Replica | None, now: float) -> None:
        assert replica is not None
        replica.advance(now)
        replica.lanes += 1
        self._lanes += 1
        sequence.replica, sequence.holds_lane, sequence.idle_since = replica, True, now

    def _leave_full(self, sequence: _Sequence, now: float) -> None:
        """More come to a replica than it has places if its workers, late before, have caught up: go where room is."""
        here = sequence.replica
        assert here is not None
        if here.lanes - here.unasked < self._max_running + self._places_ahead():
            return
        some = self._random.sample(self._names, min(COMPARED, len(self._names)))
        there = min((self._replicas[name] for name in some), key=lambda one: one.lanes)
        if there.lanes + 1 < here.lanes:
            self._free(sequence, now)
            self._hold(sequence, there, now)

    def _has_asked(self, sequence: _Sequence) -> None:
        if sequence.unasked and sequence.replica is not None:
            sequence.unasked = False
            sequence.replica.unasked -= 1

    def _free(self, sequence: _Sequence, now: float) -> None:
        if sequence.holds_lane and sequence.replica is not None:
            sequence.replica.advance(max(now, sequence.replica.now))
            sequence.replica.lanes -= 1
            self._lanes -= 1
            self._has_asked(sequence)
        sequence.holds_lane, sequence.requests = False, 0
        self._between.pop(sequence.trajectory, None)

    def _end_turn(self, sequence: _Sequence, now: float) -> None:
        """Note how long a sequence's requests took, once all of them have ended."""
        replica = sequence.replica
        if replica is None or sequence.first_start is None or sequence.turn_start == float("inf"):
            return
        replica.advance(now)
        sequence.busy_seconds += now - sequence.turn_start
        sequence.lane_seconds += replica.lane_seconds - sequence.turn_lane_seconds
        sequence.turn_start, sequence.idle_since, sequence.requests = float("inf"), now, 0
        if sequence.holds_lane:
            self._between[sequence.trajectory] = sequence

    def _close(self, unit: _Unit, now: float) -> UnitReport:
        seconds = max(now - unit.opened, 1e-9)
        lane_seconds, idle_seconds = 0.0, 0.0
        for replica in self._replicas.values():
            replica.advance(now)
            lanes_before, idle_before = unit.before.get(replica.name, (0.0, 0.0))
            lane_seconds += replica.lane_seconds - lanes_before
            idle_seconds += replica.idle_seconds - idle_before
        num = max(1, len(self._replicas))
        tokens = sum(unit.lengths)
        if unit.learn and len(unit.lengths) > num * self._max_running:  # some had to wait
            rate = len(unit.lengths) / seconds / num
            self._rate += (RATE_SHARE if self._rate else 1.0) * (rate - self._rate)
        full = float(self.meter.cost().seconds[self._max_running]) / self._max_running / num
        error = PredictionError(rank_correlation=np.nan, below_p50=np.nan, below_p90=np.nan)
        if unit.learn:
            error = self._learn(unit, error)
        return UnitReport(
            step=unit.step,
            answers=len(unit.lengths),
            tokens=tokens,
            seconds=seconds,
            bubble=float(np.clip(1.0 - lane_seconds / (seconds * num * self._max_running), 0.0, 1.0)),
            idle=float(np.clip(idle_seconds / (seconds * num), 0.0, 1.0)),
            lost=float(np.clip(1.0 - tokens * full / seconds, 0.0, 1.0)),
            error=error,
        )

    def _learn(self, unit: _Unit, unknown: PredictionError) -> PredictionError:
        self._latest_step = max(self._latest_step, unit.step)
        prompts, lengths = np.array(unit.prompts, dtype=np.uint64), np.array(unit.lengths)
        try:
            return self.predictor.observe(prompts, lengths, np.array(unit.truncated), self._latest_step)
        except Exception as failure:
            self._say_failed("learn lengths", failure)
            return unknown
