"""The table and the result file of a simulation."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from rhyme_verl.sim.experiment import Outcome, Scenario, lower_bound

MODE_TEXT = {
    "sync": "sync",
    "one_step_off": "one step off",
    "colocate_async": "colocate async",
    "separate_async": "separate async",
    "pairs": "pairs",
    "pipelined": "pipelined",
}


def table(outcomes: Sequence[Outcome], scenario: Scenario) -> Table:
    """Return policies by trainer modes, with the lower bound below."""
    steps = len(scenario.workload.lengths)
    result = Table(title=f"{steps} steps on {len(scenario.fleet.speeds)} replicas")
    headings = ("trainer", "policy", "rollout s", "of bound", "makespan s", "steps/h", "x one step off")
    for heading in (*headings, "bubble", "idle", "staleness / max", "spanning", "recompute"):
        text = heading in ("trainer", "policy")
        result.add_column(heading, justify="left" if text else "right", no_wrap=text)
    rivals = [one for one in outcomes if one.mode == "one_step_off" and one.policy == "default"]
    for before, one in zip((None, *outcomes), outcomes, strict=False):
        if before is not None and before.mode != one.mode:
            result.add_section()
        result.add_row(
            MODE_TEXT[one.mode],
            one.policy,
            f"{one.rollout_seconds:,.1f}",
            f"{one.of_bound:.1%}",
            f"{one.makespan:,.1f}",
            f"{one.steps_per_hour:.1f}",
            f"{one.steps_per_hour / rivals[0].steps_per_hour:.2f}" if rivals else "-",
            f"{one.bubble:.0%}",
            f"{one.idle:.0%}",
            f"{one.staleness_mean:.2f} / {one.staleness_max}",
            f"{one.spanning:.0%}" if one.spanning else "-",
            f"{one.recompute_seconds / (one.rollout_seconds * len(scenario.fleet.speeds)):.1%}"
            if one.recompute_seconds
            else "-",
        )
    result.add_section()
    result.add_row("lower bound", "of pairs", f"{lower_bound(scenario, 2):,.1f}", "100.0%")
    result.add_row("lower bound", "of steps", f"{lower_bound(scenario, 1):,.1f}")
    return result


def summary(outcomes: Sequence[Outcome], scenario: Scenario, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the content of the result file."""
    workload = scenario.workload
    return {
        "settings": settings,
        "workload": {
            "steps": workload.lengths.shape[0],
            "groups": workload.lengths.shape[1],
            "samples": workload.lengths.shape[2],
            "tokens": int(workload.lengths.sum()),
            "longest": int(workload.lengths.max()),
            "rank_correlation": workload.rank_correlation,
            "rank_churn": workload.rank_churn,
        },
        "lower_bound_seconds": {"pairs": lower_bound(scenario, 2), "steps": lower_bound(scenario, 1)},
        "outcomes": [asdict(one) for one in outcomes],
    }


def write_summary(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
