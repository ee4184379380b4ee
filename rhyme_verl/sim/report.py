"""The table and the result file of a simulation."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from rhyme_verl.sim.experiment import STOCK, Outcome, Scenario


def table(outcomes: Sequence[Outcome], scenario: Scenario) -> Table:
    """Return a row per case."""
    result = Table(title=f"steady state of {scenario.steps} steps on {len(scenario.fleet.speeds)} replicas")
    for heading in (
        "trainer, system",
        "steps/h",
        "x colocate async",
        "of bound",
        "bubble",
        "age / max",
        "mixed",
        "recompute s",
    ):
        is_text = heading == "trainer, system"
        result.add_column(heading, justify="left" if is_text else "right", no_wrap=is_text)
    stock = [one for one in outcomes if one.case == STOCK.name]
    for before, one in zip((None, *outcomes), outcomes, strict=False):
        if before is not None and before.case.split(",")[0] != one.case.split(",")[0]:
            result.add_section()
        result.add_row(
            one.case,
            f"{one.steps_per_hour:.1f}",
            f"{one.steps_per_hour / stock[0].steps_per_hour:.2f}" if stock else "-",
            "-" if math.isnan(one.of_bound) else f"{one.of_bound:.0%}",
            f"{one.bubble:.0%}",
            f"{one.age_mean:.2f} / {one.age_max}",
            f"{one.mixed:.1%}" if one.mixed else "-",
            f"{one.recompute_seconds:.1f}" if one.recompute_seconds else "-",
        )
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
        "outcomes": [asdict(one) for one in outcomes],
    }


def write_summary(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
