"""Drafters on the same traces in the same run: rhyme, ArcticInference, vLLM's ngram and a clairvoyant oracle.

Recorded traces of real verl runs and synthetic ones of known edit rate are replayed (see drafter_replay.py); modelled
tokens per second add the drafter's measured time to the measured cost of engine steps (step_cost.py). Epochs from the
second on count; of synthetic traces, the last one. Run by `make bench-drafter`.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from benchmarks import drafter_speed
from benchmarks.drafter_replay import Replay, StepCost, Totals, TraceStep, load_trace, width_of
from benchmarks.drafters import ArcticDrafter, NgramDrafter, NoDrafter, RhymeDrafter, preload
from benchmarks.oracle import Oracle
from benchmarks.report import RESULTS, bar, bars_table, console, write_result
from benchmarks.step_cost import RESULT as STEP_COST
from benchmarks.step_cost import StepCostCurve
from benchmarks.synthetic import SyntheticTrace
from rhyme_verl.config import SpecConfig

MAX_DRAFT_TOKENS = SpecConfig().max_draft_tokens  # and what vLLM lets `suffix` draft by default
CONCURRENCIES = (1, 4, 16, 64)
CONCURRENCY = 16  # where only one is replayed
AT = str(CONCURRENCY)  # JSON's keys are strings
BAR_CONCURRENCIES = (4, 16)
EDIT_RATES = (0.01, 0.03, 0.1, 0.3)
SYNTHETIC_EPOCHS = 3  # of which the last is played
BAR_EDIT_RATES = (0.03, 0.1)
FLOORS = (0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)  # of spec.min_acceptance, to draft as much as a peer does

Make = Callable[[list[TraceStep], int], Any]  # (steps, model length) -> drafter
Row = dict[str, Any]

# Arctic's own defaults in vLLM first, then settings that draft more.
ARCTIC: dict[str, dict[str, Any]] = {
    "arctic-24": {},
    "arctic-64": {"max_tree_depth": 64},
    "arctic-64 factor 2": {"max_tree_depth": 64, "max_spec_factor": 2.0},
    "arctic-64 factor 4": {"max_tree_depth": 64, "max_spec_factor": 4.0},
}
ARCTIC_DEFAULT = "arctic-24"
BEST_BUDGET = "rhyme, budget of Arctic's best"
DEFAULT_BUDGET = "rhyme, budget of arctic-24"
# What each setting is worth; with the fixed policy, so that no budget makes up for what is lost.
ABLATIONS: dict[str, dict[str, Any]] = {
    "reward off": {"reward_weight": 0.0},
    "recency off": {"recency_weight": 1.0},
    "agreement off": {"agreement_weight": 0.0},
    "siblings off": {"sibling_weight": 0.0},
    "phrases off": {"phrases": False},
    "rejoin off": {"rejoin": False},
}


def main(
    trace: Annotated[Path, typer.Option(help="Recorded trace: a Parquet file or a folder of them.")] = Path(
        "benchmarks/traces/quickstart.parquet"
    ),
    max_draft_tokens: Annotated[
        int, typer.Option(min=1, max=127, help="Most tokens of a draft, for all.")
    ] = MAX_DRAFT_TOKENS,
    step_cost: Annotated[Path, typer.Option(help="Result of step_cost.py.")] = STEP_COST,
    repeats: Annotated[int, typer.Option(min=1, help="Repeats of timings, in turns.")] = 5,
    quick: Annotated[bool, typer.Option(help="Smaller loads, for development; the bars mean little.")] = False,
    result: Annotated[Path, typer.Option(help="Where the result goes.")] = RESULTS / "drafter.json",
) -> None:
    """Replay, time and compare."""
    curve = StepCostCurve.load(step_cost)
    bench = DrafterBench(max_draft_tokens, curve, repeats=1 if quick else min(repeats, 3))
    recorded_steps = load_trace(trace, max_epoch=3 if quick else None)
    recorded = bench.compare(recorded_steps, CONCURRENCIES, preload_epochs=0)
    console.print(trace_table(f"recorded trace ({trace.name}), epochs from the second on", recorded))
    synthetic = {}
    for rate in EDIT_RATES:
        steps = SyntheticTrace(edit_rate=rate, num_prompts=1 if quick else 2, num_epochs=SYNTHETIC_EPOCHS).steps()
        synthetic[f"{rate:.0%}"] = bench.compare(steps, (CONCURRENCY,), preload_epochs=SYNTHETIC_EPOCHS - 1)
        console.print(trace_table(f"synthetic trace, {rate:.0%} edits, last epoch", synthetic[f"{rate:.0%}"]))
    speed = measure_speed(min(repeats, 2) if quick else repeats, quick)
    console.print(speed_table(speed))
    bars = all_bars(recorded, synthetic, speed)
    console.print(bars_table(bars))
    content = {
        "trace": str(trace),
        "max_draft_tokens": max_draft_tokens,
        "step_cost": json.loads(step_cost.read_text(encoding="utf-8")),
        "bars": bars,
        "recorded": recorded,
        "synthetic": synthetic,
        "speed": speed,
    }
    write_result(result, content)


class DrafterBench:
    """Replays traces through all contenders under one step-cost curve."""

    def __init__(self, max_draft_tokens: int, curve: StepCostCurve, repeats: int) -> None:
        self._max_draft_tokens = max_draft_tokens
        self._curve = curve
        self._repeats = repeats  # of the replays whose modelled tokens/s are compared

    def compare(
        self, steps: list[TraceStep], concurrencies: Iterable[int], preload_epochs: int
    ) -> dict[str, dict[str, Row]]:
        """Return rows by drafter and concurrency. Steps up to epoch `preload_epochs` are given to drafters unplayed."""
        rows: dict[str, dict[str, Row]] = {}
        for concurrency in concurrencies:
            full = concurrency == CONCURRENCY
            contenders = self._contenders(everything=full)
            repeats = self._repeats if concurrency in BAR_CONCURRENCIES and preload_epochs == 0 else 1
            runs: dict[str, list[Row]] = {name: [] for name in contenders}
            for repeat in range(repeats):
                for name in contenders if repeat % 2 == 0 else reversed(contenders):
                    if repeat == 0 or name in ("none", "rhyme", *ARCTIC):
                        runs[name].append(self.play(steps, contenders[name], concurrency, preload_epochs))
            for name, several in runs.items():
                rows.setdefault(name, {})[str(concurrency)] = _merge(several)
            if full:
                self._match_budget(steps, rows, preload_epochs)
        return rows

    def play(self, steps: list[TraceStep], make: Make, concurrency: int, preload_epochs: int) -> Row:
        """Replay a trace once; returns the rates over its epochs from the second on."""
        width = width_of(steps)
        drafter = make(steps, width)
        cost: StepCost = self._curve.plain if isinstance(drafter, NoDrafter) else self._curve
        engine = Replay(drafter, concurrency, width, cost)
        totals = Totals()
        for step in steps:
            if step.epoch <= preload_epochs:
                preload(drafter, step)
                continue
            added = engine.run_step(step)
            if step.epoch >= 2:
                totals += added
        if isinstance(drafter, Oracle | NoDrafter):
            totals.draft_seconds = 0.0  # an ideal, not a drafter
        return totals.summary()

    def _contenders(self, everything: bool) -> dict[str, Make]:
        k = self._max_draft_tokens
        contenders: dict[str, Make] = {
            "none": lambda steps, width: NoDrafter(),
            "ngram": lambda steps, width: NgramDrafter(k, width, max(CONCURRENCIES)),
            "arctic-24": _arctic(k, ARCTIC["arctic-24"]),
            "arctic-64": _arctic(k, ARCTIC["arctic-64"]),
            "rhyme": _rhyme(k, {}),
            "rhyme aimd": _rhyme(k, {"policy": "aimd"}),
            "rhyme fixed": _rhyme(k, {"policy": "fixed"}),
        }
        if everything:
            for name, settings in ARCTIC.items():
                contenders.setdefault(name, _arctic(k, settings))
            for name, settings in ABLATIONS.items():
                contenders[f"rhyme fixed, {name}"] = _rhyme(k, {"policy": "fixed"} | settings)
            contenders["oracle"] = lambda steps, width: Oracle(steps, k, live=False)
            contenders["oracle live"] = lambda steps, width: Oracle(steps, k, live=True)
        return contenders

    def _match_budget(self, steps: list[TraceStep], rows: dict[str, dict[str, Row]], preload_epochs: int) -> None:
        """Add rhyme at the settings that accept most while drafting no more tokens than Arctic: its best, its default.

        Only the floor under a token's acceptance is varied, with the policy `fixed`, which drafts all that is above it;
        where nothing drafts as little, the row that drafts least is taken.
        """
        budgets = {BEST_BUDGET: best_arctic(rows, "accepted_per_verify")[1], DEFAULT_BUDGET: rows[ARCTIC_DEFAULT][AT]}
        tried = []
        for floor in FLOORS:
            make = _rhyme(self._max_draft_tokens, {"policy": "fixed", "min_acceptance": floor})
            row = self.play(steps, make, CONCURRENCY, preload_epochs)
            tried.append({**row, "policy": "fixed", "min_acceptance": floor})
        for name, peer in budgets.items():
            within = [row for row in tried if row["drafted"] <= peer["drafted"]]
            if within:
                chosen = max(within, key=lambda row: row["accepted_per_verify"])
            else:
                chosen = min(tried, key=lambda row: row["drafted"])
            ratio = chosen["accepted_per_verify"] / peer["accepted_per_verify"]
            rows[name] = {AT: {**chosen, "budget": peer["drafted"], "ratio_to_peer": ratio}}


def _arctic(max_draft_tokens: int, settings: dict[str, Any]) -> Make:
    return lambda steps, width: ArcticDrafter(max_draft_tokens, width, **settings)


def _rhyme(max_draft_tokens: int, settings: dict[str, Any]) -> Make:
    return lambda steps, width: RhymeDrafter(max_draft_tokens, width, **settings)


def _merge(runs: list[Row]) -> Row:
    """The median run's rates; the tokens per second of all runs beside it, because they contain measured time."""
    speeds = [run["modelled_tokens_per_s"] for run in runs]
    middle = statistics.median_low(speeds)
    return {**runs[speeds.index(middle)], "modelled_tokens_per_s_runs": speeds}


def best_arctic(rows: dict[str, dict[str, Row]], rate: str, concurrency: int = CONCURRENCY) -> tuple[str, Row]:
    """Return name and row of Arctic's best setting by a rate."""
    played = {name: rows[name][str(concurrency)] for name in ARCTIC if str(concurrency) in rows.get(name, {})}
    name = max(played, key=lambda one: played[one][rate])
    return name, played[name]


def measure_speed(repeats: int, quick: bool) -> dict[str, Any]:
    """Return what the drafters' calls cost (drafter_speed.py)."""
    num_prompts = 4 if quick else 32
    ingested = drafter_speed.speed_trace(max(1, num_prompts // 8), drafter_speed.INGEST_EPOCHS)
    num_steps = 8 if quick else 24
    remembering = drafter_speed.REMEMBERING
    return {
        "num_prompts": num_prompts,
        "draft_us": drafter_speed.draft_seconds(drafter_speed.ALL, num_prompts, num_steps, repeats),
        "ingest_tokens_per_s": drafter_speed.ingest(remembering, ingested, repeats, one_by_one=False),
        "ingest_one_by_one_tokens_per_s": drafter_speed.ingest(
            {"rhyme": remembering["rhyme"]}, ingested, repeats, one_by_one=True
        ),
        "memory": {name: drafter_speed.memory(make, num_prompts // 2) for name, make in remembering.items()},
    }


def all_bars(recorded: dict, synthetic: dict, speed: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the bars of the drafter, as `bar` gives them."""
    bars = {"recorded: accepted per verify / Arctic's best, no more drafted": _matched_bar(recorded, 1.3)}
    for concurrency in BAR_CONCURRENCIES:
        _, arctic = best_arctic(recorded, "modelled_tokens_per_s", concurrency)
        ours = recorded["rhyme"][str(concurrency)]["modelled_tokens_per_s"]
        bars[f"recorded: modelled tokens/s / Arctic's best at {concurrency}"] = bar(
            ours / arctic["modelled_tokens_per_s"], at_least=1.4
        )
    for rate in BAR_EDIT_RATES:
        name = f"synthetic {rate:.0%}: accepted per verify / Arctic's best, no more drafted"
        bars[name] = _matched_bar(synthetic[f"{rate:.0%}"], 2.0)
    memory = speed["memory"]["rhyme"]
    bars["draft + update, us per request at batch 256"] = bar(speed["draft_us"]["rhyme"][256]["median"], at_most=2.0)
    bars["ingest, M tokens/s per core"] = bar(speed["ingest_tokens_per_s"]["rhyme"]["median"] / 1e6, at_least=5.0)
    most = max(memory["rss_bytes_per_token"], memory["own_bytes_per_token"])
    bars["bytes per history token, growth of the process or own count"] = bar(most, at_most=20.0)
    return bars


def _matched_bar(rows: dict[str, dict[str, Row]], target: float) -> dict[str, Any]:
    matched = rows[BEST_BUDGET][AT]
    entry = bar(matched["ratio_to_peer"], at_least=target)
    return {**entry, "holds": entry["holds"] and matched["drafted"] <= matched["budget"]}


def trace_table(title: str, rows: dict[str, dict[str, Row]]) -> Table:
    oracle = rows["oracle live"][AT]["accepted_per_verify"]
    concurrencies = list(rows["rhyme"])
    table = Table(title=f"{title}, concurrency {AT}")
    headings = ("acc/verify", "oracle", "tok/step", "accept", "prop/acc", "us")
    table.add_column("drafter", no_wrap=True)
    for heading in (*headings, *(f"tok/s @{c}" for c in concurrencies)):
        table.add_column(heading, justify="right")
    for name, played in rows.items():
        row = played[AT]
        speeds = [f"{played[c]['modelled_tokens_per_s']:,.0f}" if c in played else "" for c in concurrencies]
        table.add_row(
            name,
            f"{row['accepted_per_verify']:.2f}",
            f"{row['accepted_per_verify'] / oracle:.0%}",
            f"{row['tokens_per_step']:.2f}",
            f"{row['acceptance_rate']:.0%}",
            f"{row['proposed_per_accepted']:.2f}",
            f"{row['draft_us_per_verify']:.2f}",
            *speeds,
        )
    return table


def speed_table(speed: dict[str, Any]) -> Table:
    batches = drafter_speed.BATCHES
    table = Table(title="us per request and step, by batch; 64k tokens of history a prompt")
    table.add_column("drafter")
    for heading in (*map(str, batches), "ingest tok/s", "one by one", "B/token (own)", "B/token (process)"):
        table.add_column(heading, justify="right")
    for name, row in speed["draft_us"].items():
        cells = [f"{row[batch]['median']:.2f}" for batch in batches]
        if name in speed["memory"]:
            memory = speed["memory"][name]
            one_by_one = speed["ingest_one_by_one_tokens_per_s"].get(name)  # others take no more than one at a time
            cells.append(f"{speed['ingest_tokens_per_s'][name]['median']:,.0f}")
            cells.append(f"{one_by_one['median']:,.0f}" if one_by_one else "")
            cells += [f"{memory['own_bytes_per_token']:.1f}", f"{memory['rss_bytes_per_token']:.1f}"]
        else:
            cells += [""] * 4
        table.add_row(name, *cells)
    return table


if __name__ == "__main__":
    typer.run(main)
