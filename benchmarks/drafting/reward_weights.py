"""Accepted tokens per verification if rewarded answers weigh more in the history, as in the RhymeRL paper.

The recorded traces are replayed with the policy `fixed`, which drafts regardless of cost, from the second epoch on.
"""

from __future__ import annotations

import statistics
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.common.result_files import RESULTS, console, write_result
from benchmarks.drafting.bench import CONCURRENCY, FIRST_COUNTED_EPOCH, MAX_DRAFT_TOKENS, load_recorded
from benchmarks.drafting.drafters import RhymeDrafter, remember_in_rhyme
from benchmarks.drafting.replay import Replay, Totals, TraceStep, named_traces, width_of


class RewardedDrafter(RhymeDrafter):
    """Remembers rewarded answers twice, so that they weigh twice as much: the paper's weighting by reward."""

    COPY = 1 << 16  # added to the number of the second copy's sample

    def finish_step(self, step: TraceStep) -> None:
        super().finish_step(step)
        rewarded = [replace(one, sample=one.sample + self.COPY) for one in step.answers if one.reward > 0]
        remember_in_rhyme(self.index, replace(step, answers=rewarded))


def main(
    quick: Annotated[bool, typer.Option(help="Use smaller loads, for development.")] = False,
    result: Annotated[Path, typer.Option(help="Path of the result file.")] = RESULTS / "reward_weights.json",
) -> None:
    """Replay all recorded traces with both weightings."""
    traces = {}
    for name, path in named_traces([]).items():
        steps = load_recorded(path, quick)
        rewards = [answer.reward > 0 for step in steps for answer in step.answers]
        traces[name] = {
            "rewarded": statistics.mean(rewards),
            "equal": accepted_per_verify(RhymeDrafter, steps),
            "rewarded twice": accepted_per_verify(RewardedDrafter, steps),
        }
        console.print(name, traces[name])
    write_result(result, {"concurrency": CONCURRENCY, "traces": traces})


def accepted_per_verify(kind: type[RhymeDrafter], steps: list[TraceStep]) -> float:
    """Return the accepted tokens per verification of a drafter in the counted epochs of a trace."""
    width = width_of(steps)
    engine = Replay(kind(MAX_DRAFT_TOKENS, width, policy="fixed"), CONCURRENCY, width)
    counted = Totals()
    for step in steps:
        played = engine.run_step(step)
        if step.epoch >= FIRST_COUNTED_EPOCH:
            counted += played
    return counted.accepted / counted.verifies


if __name__ == "__main__":
    typer.run(main)
