"""The table and the result file of a simulation."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from rhyme_verl.sim.experiment import STOCK, Outcome
from rhyme_verl.sim.trainer import Scenario
from rhyme_verl.sim.workload import Workload


def table(outcomes: Sequence[Outcome], scenario: Scenario) -> Table:
    """Return a table with one row per case."""
    result = Table(title=f"steady state of {scenario.steps} steps on {len(scenario.speeds)} replicas")
    result.add_column("trainer, system", no_wrap=True)
    for heading in ("steps/h", "x colocate async", "of bound", "bubble", "age / max", "mixed", "recompute s"):
        result.add_column(heading, justify="right")
    stock = [outcome for outcome in outcomes if outcome.case == STOCK.name]
    for before, outcome in zip((None, *outcomes), outcomes, strict=False):
        if before is not None and before.case.split(",")[0] != outcome.case.split(",")[0]:
            result.add_section()
        result.add_row(
            outcome.case,
            f"{outcome.steps_per_hour:.1f}",
            f"{outcome.steps_per_hour / stock[0].steps_per_hour:.2f}" if stock else "-",
            "-" if math.isnan(outcome.of_bound) else f"{outcome.of_bound:.0%}",
            f"{outcome.bubble:.0%}",
            f"{outcome.age_mean:.2f} / {outcome.age_max}",
            f"{outcome.mixed:.1%}" if outcome.mixed else "-",
            f"{outcome.recompute_seconds:.1f}" if outcome.recompute_seconds else "-",
        )
    return result


def write_summary(path: Path, outcomes: Sequence[Outcome], workload: Workload, settings: dict[str, Any]) -> None:
    """Write the result file."""
    lengths = workload.lengths
    facts = dict(zip(("steps", "groups", "samples"), lengths.shape, strict=True))
    facts |= {"tokens": int(lengths.sum()), "longest": int(lengths.max())}
    facts |= {"rank_correlation": workload.rank_correlation, "rank_churn": workload.rank_churn}
    content = {"settings": settings, "workload": facts, "outcomes": [asdict(outcome) for outcome in outcomes]}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
