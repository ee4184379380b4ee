"""What a budget that favours stragglers is worth: the makespan of single waves, as in an RL step of one wave.

A wave has as many answers as the engine has rows, groups of one step of a recorded trace. Lengths are predicted from
the answers of earlier epochs; step times are published ones. The drafter's own time, which is about the same for both,
is left out, so results do not depend on the machine.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.drafter_replay import Replay, StepCost, Totals, TraceStep, width_of
from benchmarks.drafters import RhymeDrafter, group_by_prompt, remember_in_rhyme


class _Wave(RhymeDrafter):
    """Takes no history by itself: a step's answers are given to it when all of its waves are over."""

    def finish_step(self, step: TraceStep) -> None:
        pass


def makespans(steps: list[TraceStep], step_cost: StepCost, rows: int, max_draft_tokens: int) -> dict[str, Any]:
    """Return the median makespan in seconds and the tokens/s of waves with equal and with weighted requests.

    Raises:
        ValueError: no step has as many answers as there are rows.
    """
    result: dict[str, Any] = {
        name: _play(steps, step_cost, rows, max_draft_tokens, switches)
        for name, switches in (("equal", ("stragglers_first",)), ("stragglers first", ()))
    }
    equal, first = result["equal"], result["stragglers first"]
    result["makespan_ratio"] = first["median_makespan_s"] / equal["median_makespan_s"]
    result["tokens_per_s_ratio"] = first["tokens_per_s"] / equal["tokens_per_s"]
    return result


def _play(
    steps: list[TraceStep], step_cost: StepCost, rows: int, max_draft_tokens: int, switches: tuple[str, ...]
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
        raise ValueError(f"no step of an epoch after the first has {rows} answers")
    return {
        "waves": len(spans),
        "median_makespan_s": float(np.median(spans)),
        "mean_makespan_s": float(np.mean(spans)),
        "tokens_per_s": totals.tokens / totals.model_seconds,
    }


def _waves(step: TraceStep, rows: int, rng: np.random.Generator) -> list[TraceStep]:
    """Groups of a step, in random order, as many as fill the rows; of the last one, as many answers as fit."""
    groups = list(group_by_prompt(step).values())
    waves, wave = [], []
    for index in rng.permutation(len(groups)):
        wave += groups[index]
        if len(wave) >= rows:
            waves.append(replace(step, answers=wave[:rows]))
            wave = []
    return waves
