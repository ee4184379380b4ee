"""HistoPipe's decisions in one object: units of groups, lanes for their answers, and what is learnt from both.

The router drives it in a job, and the simulator (`rhyme_verl.sim`) drives it on a modelled cluster. Pure: the time is
an argument, there is no I/O. Does not depend on verl, vLLM or Ray. Not thread-safe.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rhyme_verl.histopipe.lanes import VALIDATION_UNIT, Lanes
from rhyme_verl.histopipe.lengths import LengthPredictor
from rhyme_verl.histopipe.messages import Finished, Group, Outbox
from rhyme_verl.histopipe.units import Changes, Units, UnitShape
from rhyme_verl.request_id import AnswerId

FIRST_SHARE = 0.36  # predicted length before any answer is known, as a share of the maximum
PROMPT_SHARE = 0.01  # weight of the latest answer in the running means of prompt and tool tokens


@dataclass(frozen=True, kw_only=True)
class Job:
    """What HistoPipe needs to know about a job."""

    batch_size: int  # number of groups that the trainer takes per step (G)
    max_running: int  # number of lanes per replica
    max_tokens: int  # maximum length of an answer
    max_age: int = 0  # maximum number of weight updates between an answer's first token and its training
    shape: UnitShape | None = None  # of units; None: groups are opened and published at once
    overlaps: bool = False  # batches arrive while earlier ones are generated (`separate_async`)
    shares_prompts: bool = False  # a replica stores the prompt of siblings once (prefix caching)
    total_steps: int | None = None  # number of training steps of the job; None: unknown
    log_folder: str | None = None  # of the schedule; None: no log is written
    checkpoints: str | None = None  # verl's checkpoint folder, with which lengths are saved; None: they are not saved
    resume_from: str | None = None  # checkpoint whose lengths are loaded


@dataclass(slots=True, eq=False)
class _GroupProgress:
    group: Group
    predicted: float = 0.0
    ended: set[int] = field(default_factory=set)
    is_validation: bool = False


@dataclass(slots=True, eq=False)
class _UnitSoFar:
    """Measurements since the current unit began."""

    began: float
    lane_seconds: float
    idle_seconds: float
    answers: list[tuple[int, Finished]] = field(default_factory=list)  # with the keys of their prompts


class Scheduler:
    """Decides which answers run where, and which finished groups the trainer sees.

    `lengths`: length predictor; None: one that learns from the job's own answers only.
    """

    def __init__(self, job: Job, outbox: Outbox, lengths: LengthPredictor | None = None) -> None:
        self.job = job
        self.lengths = LengthPredictor(default_tokens=FIRST_SHARE * job.max_tokens) if lengths is None else lengths
        self.cache_tokens: int | None = None  # that a replica's KV cache holds, if known
        self._outbox = outbox
        self.units = Units(job.batch_size, job.max_age, job.shape, job.total_steps)
        self.lanes = Lanes(job.max_running, outbox, overlaps=job.overlaps)
        self._groups: dict[str, _GroupProgress] = {}
        self._prompt_tokens = self._tool_tokens = 0.0
        self._num_open = self._num_ended = 0  # training groups, counted only without units
        self._so_far = _UnitSoFar(0.0, 0.0, 0.0)
        self._reports: list[dict[str, float]] = []

    # Groups.

    def submit(self, groups: Sequence[Group], available: int, now: float) -> None:
        """Take training groups; `available` is the number of published groups that the trainer has not taken."""
        self._groups.update((group.uid, _GroupProgress(group)) for group in groups)
        self._apply(self.units.submit(groups, available), now)

    def submit_validation(self, groups: Sequence[Group], now: float) -> None:
        """Take validation groups, which get lanes first and are published at once."""
        self._groups.update((group.uid, _GroupProgress(group, is_validation=True)) for group in groups)
        self._open(groups, VALIDATION_UNIT)
        self.lanes.deal(now)

    def publish_more(self, available: int, now: float) -> None:
        """Publish more of a released unit; the trainer has `available` published groups left."""
        self._apply(self.units.publish_more(available), now)

    def end_group(self, uid: str, failed: bool, now: float) -> None:
        """Record that all answers of a group have ended."""
        found = self._groups.pop(uid, None)
        for sample in range(found.group.samples) if found is not None else ():
            self.lanes.end((uid, sample), now)
        if found is not None and found.is_validation:
            self._outbox.publish(uid)
            return
        self._apply(self.units.end(uid, failed), now)
        if found is not None and self.units.shape is None:  # else unknown, or held back when its worker died
            self._num_open -= 1
            self._num_ended += 1
            if not self._num_open or self._num_ended >= self.job.batch_size:
                self._num_ended = 0
                self._report(now)

    # Answers.

    def start(self, answer: AnswerId, now: float) -> None:
        """Record that a request of an answer is sent to its replica."""
        self.lanes.start(answer, now)
        self.units.start(answer[0])

    def finish(self, one: Finished, now: float) -> list[dict[str, Any]]:
        """Record that an answer has ended; return its lines of the log, one for each time that it ran.

        The last one has its tokens.
        """
        spans = self.lanes.end(one.answer, now)
        uid, sample = one.answer
        found = self._groups.get(uid)
        if found is None or sample in found.ended:
            return []
        found.ended.add(sample)
        if one.tokens is None:
            return []
        self._prompt_tokens += PROMPT_SHARE * (one.prompt_tokens - self._prompt_tokens)
        self._tool_tokens += PROMPT_SHARE * (one.tool_tokens - self._tool_tokens)
        if not found.is_validation:
            self._so_far.answers.append((found.group.prompt, one))
        whose = {"uid": uid, "sample": sample, "step": found.group.step, "lanes": self.lanes.max_running}
        lines = [{"replica": replica, "start": start, "end": end, **whose} for replica, start, end in spans]
        if lines:
            lines[-1] |= {"tokens": one.tokens, "predicted": round(found.predicted, 1)}
        return lines

    def take_reports(self) -> list[dict[str, float]]:
        """Return the metrics of the units completed since the last call; unknown values are left out.

        Without units, a step has one report, although groups that replace filtered ones may come after it has ended.
        """
        reports, self._reports = self._reports, []
        if self.units.shape is not None or not reports:
            return reports
        steps = dict.fromkeys(report["step"] for report in reports)
        return [_sum([report for report in reports if report["step"] == step]) for step in steps]

    # Internals.

    def _apply(self, changes: Changes, now: float) -> None:
        for uid in changes.published:
            self._outbox.publish(uid)
        if changes.began or (changes.opened and self.units.shape is None and not self._num_open):
            self._begin_report(now)
        if changes.opened:
            self._open(changes.opened, self.units.number)
            if self.units.shape is None:
                self._num_open += len(changes.opened)
        if changes.began:
            self.lanes.is_paused = False
            self.lanes.unpark(now)
        if changes.released:
            carried = [uid for uid in self._groups if self.units.is_open(uid)]
            self.lanes.is_paused = True
            for uid in carried:
                group = self._groups[uid]
                self.lanes.park([(uid, i) for i in range(group.group.samples) if i not in group.ended], now)
            self._report(now, len(carried))
        elif changes.began or changes.opened:
            self.lanes.deal(now)

    def _open(self, groups: Sequence[Group], unit: int) -> None:
        predicted = self.lengths.predict(np.array([group.prompt for group in groups], dtype=np.uint64))
        predicted = np.clip(predicted, 1.0, self.job.max_tokens)
        for group, tokens in zip(groups, predicted.tolist(), strict=True):
            self._groups[group.uid].predicted = tokens
        self._fit_cache()
        for group, tokens in zip(groups, predicted.tolist(), strict=True):
            found = self._groups[group.uid]
            for sample in range(group.samples):
                if sample not in found.ended:
                    self.lanes.add((group.uid, sample), unit, tokens)

    def _fit_cache(self) -> None:
        """Limit the lanes per replica to as many answers as its KV cache holds completely, once lengths are known."""
        most = self.job.max_running
        if self.cache_tokens is not None and len(self.lengths):
            opened = [found for found in self._groups.values() if found.predicted]
            samples = max(1, sum(found.group.samples for found in opened))
            answer = self._tool_tokens + sum(found.group.samples * found.predicted for found in opened) / samples
            # The answers of a group are spread over the replicas.
            prompts = min(1.0, len(self.lanes.replicas) * len(opened) / samples) if self.job.shares_prompts else 1.0
            most = max(1, min(most, int(self.cache_tokens / max(1.0, prompts * self._prompt_tokens + answer))))
        self.lanes.max_running = most
        self.lanes.grants_ahead = most == self.job.max_running  # else the engine would start them and preempt others

    def _begin_report(self, now: float) -> None:
        self._so_far.began, self._so_far.lane_seconds, self._so_far.idle_seconds = now, *self._loads(now)

    def _loads(self, now: float) -> tuple[float, float]:
        replicas = self.lanes.replicas.values()
        for replica in replicas:
            replica.advance(now, self.lanes.max_running)
        return sum(replica.lane_seconds for replica in replicas), sum(replica.idle_seconds for replica in replicas)

    def _report(self, now: float, carried: int = 0) -> None:
        """Learn the lengths of a unit's answers, and report the unit, by the names of its metrics."""
        so_far, (lane_seconds, idle_seconds) = self._so_far, self._loads(now)
        self._so_far = _UnitSoFar(now, lane_seconds, idle_seconds)
        seconds = max(now - so_far.began, 1e-9)
        capacity = seconds * max(1, len(self.lanes.replicas))
        ended = [one for _, one in so_far.answers]
        prompts = np.array([prompt for prompt, _ in so_far.answers], dtype=np.uint64)
        lengths, truncated = np.array([one.tokens for one in ended]), np.array([one.truncated for one in ended])
        spans = [one.versions[0] < one.versions[1] for one in ended if one.versions is not None]
        report = {
            "step": self.units.step,
            "answers": len(ended),
            "tokens": int(lengths.sum()),
            "makespan_s": seconds,
            "bubble": _share(1.0 - (lane_seconds - so_far.lane_seconds) / (capacity * self.lanes.max_running)),
            "idle": _share((idle_seconds - so_far.idle_seconds) / capacity),
            "carried_groups": carried,
            "predictor_rank_correlation": self.lengths.observe(prompts, lengths, truncated, self.units.step),
            "versions_spanned": sum(spans) / len(spans) if spans else math.nan,
        }
        self._reports.append({name: value for name, value in report.items() if not math.isnan(value)})


def _sum(reports: list[dict[str, float]]) -> dict[str, float]:
    """Return one report of several: sums, shares of their time, and means over their answers."""
    whole = {name: sum(report[name] for report in reports) for name in ("answers", "tokens", "makespan_s")}
    weights = dict.fromkeys(("bubble", "idle"), "makespan_s")
    weights |= dict.fromkeys(("predictor_rank_correlation", "versions_spanned"), "answers")
    for name, weight in weights.items():
        known = [(report[name], report[weight]) for report in reports if name in report]
        total = sum(weight for _, weight in known)
        if total:
            whole[name] = sum(value * weight for value, weight in known) / total
    return reports[-1] | whole


def _share(value: float) -> float:
    return min(1.0, max(0.0, value))
