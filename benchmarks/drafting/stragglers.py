"""Measures the gain of a budget that favours stragglers: the makespan of single waves, and of `sync` steps on replicas.

A wave has as many answers as the engine has rows: groups of one step of a recorded trace, or the answers that HistoPipe
assigns to a replica. Lengths are predicted from the answers of earlier epochs; step times are published ones. The
drafter's own time, about equal in both cases, is excluded, so results do not depend on the machine.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.drafting.drafters import RhymeDrafter, group_by_prompt, remember_in_rhyme
from benchmarks.drafting.replay import Replay, StepSeconds, Totals, TraceStep, width_of
from rhyme_verl.histopipe.lengths import LengthPredictor
from rhyme_verl.histopipe.messages import Group
from rhyme_verl.histopipe.scheduler import Job, Scheduler


class _Wave(RhymeDrafter):
    """Takes no history after a wave: the answers of a step are added when all its waves have ended."""

    def finish_step(self, step: TraceStep) -> None:
        pass


def makespans(steps: list[TraceStep], step_cost: StepSeconds, rows: int, max_draft_tokens: int) -> dict[str, Any]:
    """Return the median makespan in seconds and the tokens/s of waves, with equal weights and with stragglers first.

    Raises:
        ValueError: no step after the first epoch has at least `rows` answers.
    """
    result: dict[str, Any] = {
        name: _play(steps, step_cost, rows, max_draft_tokens, switches)
        for name, switches in (("equal", ("stragglers_first",)), ("stragglers first", ()))
    }
    equal, first = result["equal"], result["stragglers first"]
    result["makespan_ratio"] = first["median_makespan_s"] / equal["median_makespan_s"]
    result["tokens_per_s_ratio"] = first["tokens_per_s"] / equal["tokens_per_s"]
    return result


def sync_steps(steps: list[TraceStep], step_cost: StepSeconds, rows: int, max_draft_tokens: int) -> dict[str, Any]:
    """Return the seconds of `sync` steps on replicas, with equal weights and with stragglers first.

    HistoPipe assigns the answers to as many replicas as they need; a step ends with its slowest replica.
    """
    result: dict[str, Any] = {}
    for name, switches in (("equal", ("stragglers_first",)), ("stragglers first", ())):
        width = width_of(steps)
        drafter = _Wave(max_draft_tokens, width, switches)
        engine = Replay(drafter, rows, width, step_cost, charge_drafter=False)
        lengths, seconds = LengthPredictor(), []
        for step in steps:
            if step.epoch > 1:
                waves = _dealt(step, rows, lengths)
                seconds.append(max(engine.run_step(wave).model_seconds for wave in waves))
            keys = np.array([one.prompt_key for one in step.answers], dtype=np.uint64)
            sizes = np.array([len(one.tokens) for one in step.answers])
            lengths.observe(keys, sizes, np.zeros(len(sizes), dtype=bool), step.step)
            remember_in_rhyme(drafter.index, step)
        result[name] = {"steps": len(seconds), "mean_s": float(np.mean(seconds)), "median_s": float(np.median(seconds))}
    result["speedup"] = result["equal"]["mean_s"] / result["stragglers first"]["mean_s"]
    return result


class _Deal:
    """An outbox that records the replica of each answer."""

    def __init__(self) -> None:
        self.replica: dict[Any, str] = {}

    def grant(self, answer: Any, replica: str, predicted_tokens: float) -> None:
        self.replica[answer] = replica

    def park(self, answer: Any) -> None: ...

    def publish(self, uid: str) -> None: ...


def _dealt(step: TraceStep, rows: int, lengths: LengthPredictor) -> list[TraceStep]:
    """Return the answers of a step by replica, in the order in which they start."""
    deal, groups = _Deal(), group_by_prompt(step)
    job = Job(batch_size=len(groups), max_running=rows, max_tokens=max(len(one.tokens) for one in step.answers))
    scheduler = Scheduler(job, deal, lengths)
    scheduler.lanes.add_replicas(map(str, range(-(-len(step.answers) // rows))), 0.0)
    scheduler.submit([Group(str(key), key, len(answers), 0) for key, answers in groups.items()], 0, 0.0)
    waves: dict[str, list[Any]] = {}
    for (uid, sample), replica in deal.replica.items():
        waves.setdefault(replica, []).append(groups[int(uid)][sample])
    return [replace(step, answers=answers[:rows]) for answers in waves.values()]


def _play(
    steps: list[TraceStep], step_cost: StepSeconds, rows: int, max_draft_tokens: int, switches: tuple[str, ...]
) -> dict[str, Any]:
    width = width_of(steps)
    drafter = _Wave(max_draft_tokens, width, switches)
    engine = Replay(drafter, rows, width, step_cost, charge_drafter=False)
    rng = np.random.default_rng(0)
    spans, totals = [], Totals()
    for step in steps:
        if step.epoch > 1:
            for wave in _waves(step, rows, rng):
                played = engine.run_step(wave)
                spans.append(played.model_seconds)
                totals += played
        remember_in_rhyme(drafter.index, step)
    if not spans:
        raise ValueError(f"no step after the first epoch has {rows} answers")
    return {
        "waves": len(spans),
        "median_makespan_s": float(np.median(spans)),
        "mean_makespan_s": float(np.mean(spans)),
        "tokens_per_s": totals.tokens / totals.model_seconds,
    }


def _waves(step: TraceStep, rows: int, rng: np.random.Generator) -> list[TraceStep]:
    """Return waves of groups of a step in random order; each wave's last group is cut off at the number of rows."""
    groups = list(group_by_prompt(step).values())
    waves, wave = [], []
    for index in rng.permutation(len(groups)):
        wave += groups[index]
        if len(wave) >= rows:
            waves.append(replace(step, answers=wave[:rows]))
            wave = []
    return waves
