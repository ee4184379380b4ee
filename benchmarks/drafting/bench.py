"""Compares drafters on the same traces in one run: rhyme, ArcticInference, vLLM's ngram and a clairvoyant oracle.

Recorded traces of real verl runs and synthetic traces with known edit rates are replayed (replay.py). Modelled tokens
per second use published times of engine steps on an accelerator (rhyme_verl/sim/step_times.py) plus the host time for
which it waits: the drafter's, measured on this machine, and the rest from a table (host_gap.py). An engine without a
drafter has none. *Device only* tokens per second leave all host time out. Prefill is excluded. Results cover epochs
from the second on, and of synthetic traces only the last. Run by `make bench-drafter`.
"""

from __future__ import annotations

import json
import math
import shutil
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from benchmarks.common.machine import commit
from benchmarks.common.result_files import RESULTS, bar, bars_table, console, write_result
from benchmarks.drafting import long_answers
from benchmarks.drafting import speed as drafter_speed
from benchmarks.drafting.drafters import ArcticDrafter, NgramDrafter, NoDrafter, RhymeDrafter, WindowDrafter, preload
from benchmarks.drafting.host_gap import HOST_RESULT, HostGap, HostGaps, host_gaps
from benchmarks.drafting.oracle import GreedyDrafter, Oracle, greedy_ceiling
from benchmarks.drafting.replay import Replay, StepSeconds, Totals, TraceStep, load_trace, named_traces, width_of
from benchmarks.drafting.synthetic import SyntheticTrace
from benchmarks.engines.device_time import DeviceTime
from rhyme_verl.config import SpecConfig

MAX_DRAFT_TOKENS = SpecConfig().max_draft_tokens  # equal to vLLM's default for `suffix`
STEP_TIME_MODEL = "qwen2.5-7b"
OTHER_MODELS, OTHER_MODELS_AT = ("llama-3.1-8b", "qwen2.5-14b"), (64, 256)
STEP_TIMES = f"published A100 step times ({STEP_TIME_MODEL})"
CONCURRENCIES = (1, 4, 16, 64, 128, 256)
CONCURRENCY = 16  # replays all contenders; the others replay ESSENTIAL and KNOWN_COST
AT = str(CONCURRENCY)  # JSON's keys are strings
FIRST_COUNTED_EPOCH = 2  # the first epoch has no history
EDIT_RATES = (0.01, 0.03, 0.1, 0.3)
SYNTHETIC_EPOCHS = 3  # the last one is replayed, the others are history
BAR_EDIT_RATES = (0.03, 0.1)
# Values of spec.min_acceptance that are tried to match the number of tokens that a peer drafts.
FLOORS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)

Make = Callable[[list[TraceStep], int], Any]  # (steps, model length) -> drafter
Row = dict[str, Any]

# vLLM's defaults for Arctic first, then settings that draft less, and more.
ARCTIC: dict[str, dict[str, Any]] = {
    "arctic-24": {},
    "arctic-24 probability 0.3": {"min_token_prob": 0.3},
    "arctic-24 factor 0.5": {"max_spec_factor": 0.5},
    "arctic-24 factor 2": {"max_spec_factor": 2.0},
    "arctic-64": {"max_tree_depth": 64},
    "arctic-64 factor 2": {"max_tree_depth": 64, "max_spec_factor": 2.0},
    "arctic-64 factor 4": {"max_tree_depth": 64, "max_spec_factor": 4.0},
}
ARCTIC_DEFAULT = "arctic-24"
ARCTIC_TUNED = "arctic tuned"  # found by `DrafterBench.tune`, for each recorded text and number of rows
TUNED_OVER: dict[str, tuple[Any, ...]] = {
    "num_speculative_tokens": (MAX_DRAFT_TOKENS, 32, 16, 8, 4),
    "max_spec_factor": (1.0, 0.5, 2.0, 4.0),
    "min_token_prob": (0.1, 0.3, 0.5),
    "max_tree_depth": (24, 64),
}
TUNED_EPOCHS = 3  # epochs that are replayed to find them, but for the first, which is history
ESSENTIAL = ("none", ARCTIC_DEFAULT, "rhyme")
IDEALS = (NoDrafter, Oracle, GreedyDrafter)  # no host time is charged
BEST_BUDGET = "rhyme, budget of Arctic's best"
DEFAULT_BUDGET = "rhyme, budget of arctic-24"
ABLATIONS = ("siblings", "common", "rejoin")  # with the fixed policy, so that no budget compensates for the loss
FORGETFUL = {  # nor does it for the loss of what is remembered of a prompt, and of everything but the siblings
    "rhyme fixed, no history": {"remembers": False},
    "rhyme fixed, siblings only": {"remembers": False, "switches": ("common",)},
}
KNOWN_COST = "rhyme, step cost known"
KNOWN_COST_AT = (16, 64, 128)
FIRST_EPOCH_ROWS = 64
CALIBRATION_TOLERANCE = 0.03  # in addition to two standard errors


@dataclass(frozen=True)
class Targets:
    """Bars of a recorded trace, relative to Arctic's best setting unless stated otherwise.

    Attributes:
        accepted: accepted tokens per verification, with no more tokens drafted.
        speed: modelled tokens/s, by number of rows.
        undrafted: modelled tokens/s relative to no drafting, by number of rows.
        ceiling: accepted tokens per verification as a share of the greedy ceiling.
        first_epoch: accepted tokens per verification in the first epoch, at FIRST_EPOCH_ROWS.
    """

    accepted: float = 1.25
    speed: Mapping[int, float] = field(
        default_factory=lambda: {1: 1.15, 4: 1.15, 16: 1.15, 64: 1.3, 128: 1.3, 256: 1.3}
    )
    undrafted: Mapping[int, float] = field(default_factory=dict)
    ceiling: float | None = None
    first_epoch: float | None = None


TARGETS = {
    "gsm8k": Targets(ceiling=0.38, first_epoch=0.8),
    "gsm8k-noisy": Targets(accepted=1.05),
    "longtail": Targets(accepted=1.5, undrafted={16: 2.2, 64: 1.5, 128: 1.15}),
    "quickstart": Targets(accepted=1.4),
}


def main(
    trace: Annotated[
        list[Path] | None,
        typer.Option(
            help="Recorded trace: a Parquet file or a folder of them (repeatable). Default: all in benchmarks/traces."
        ),
    ] = None,
    max_draft_tokens: Annotated[
        int, typer.Option(min=1, max=127, help="Maximum tokens per draft, for all drafters.")
    ] = MAX_DRAFT_TOKENS,
    repeats: Annotated[int, typer.Option(min=1, help="Repeats of each timing, interleaved.")] = 5,
    quick: Annotated[bool, typer.Option(help="Use smaller loads, for development; ignore the bars.")] = False,
    host: Annotated[Path, typer.Option(help="Result of bench-host, for the host time.")] = HOST_RESULT,
    out: Annotated[
        Path, typer.Option(help="Folder of finished parts, which are not replayed again at the same clean commit.")
    ] = Path("runs/drafter"),
    result: Annotated[Path, typer.Option(help="Path of the result file.")] = RESULTS / "drafter.json",
) -> None:
    """Replay traces, time the drafters and compare them."""
    parts = Parts(out / f"{commit()}-{max_draft_tokens}-{repeats}-{quick}")
    try:
        recorded = {name: load_recorded(path, quick) for name, path in named_traces(trace or []).items()}
        gaps = host_gaps(host)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    step_cost = DeviceTime(STEP_TIME_MODEL).seconds
    bench = DrafterBench(max_draft_tokens, step_cost, 1 if quick else min(repeats, 3), gaps)
    traces, first_epoch = {}, {}
    for name, steps in recorded.items():
        rows = (
            parts.once(f"{name} at {at}", partial(bench.compare, name, steps, (at,), preload_epochs=0))
            for at in CONCURRENCIES
        )
        traces[name] = joined_rows(rows)
        first_epoch[name] = bench.first_epoch(steps)
        console.print(trace_table(f"recorded trace {name}, epochs from the second on", traces[name]))
        console.print(f"first epoch, {FIRST_EPOCH_ROWS} rows: {first_epoch[name]:.2f} accepted per verification")
    models = {
        model: {
            name: parts.once(f"{name} with {model}", partial(bench.of_model, model, recorded[name], rows))
            for name, rows in traces.items()
        }
        for model in OTHER_MODELS
    }
    synthetic = {}
    for rate in EDIT_RATES:
        steps = SyntheticTrace(edit_rate=rate, num_prompts=1 if quick else 2, num_epochs=SYNTHETIC_EPOCHS).steps()
        name = f"synthetic {rate:.0%}"
        compare = partial(bench.compare, name, steps, (CONCURRENCY,), preload_epochs=SYNTHETIC_EPOCHS - 1)
        synthetic[f"{rate:.0%}"] = parts.once(name, compare)
        console.print(trace_table(f"synthetic trace, {rate:.0%} edits, last epoch", synthetic[f"{rate:.0%}"]))
    started = time.monotonic()
    speed = measure_speed(min(repeats, 2) if quick else repeats, quick)
    console.print(f"drafters' calls: timed in {time.monotonic() - started:.0f} s")
    console.print(speed_table(speed))
    long = long_answers.measure_all(quick)
    console.print(long_table(long))
    bars = all_bars(traces, synthetic, speed, first_epoch) | long_answers.bars(long)
    console.print(bars_table(bars))
    content = {
        "step_times": STEP_TIMES,
        "host_gaps": {"source": gaps.source, "synchronous": asdict(gaps.synchronous), "rhyme": asdict(gaps.rhyme)},
        "max_draft_tokens": max_draft_tokens,
        "bars": bars,
        "greedy_ceiling": {name: ceiling_of(steps, max_draft_tokens) for name, steps in recorded.items()},
        "traces": traces,
        "models": models,
        "first_epoch_accepted_per_verify": first_epoch,
        "synthetic": synthetic,
        "speed": speed,
        "long_answers": long_answers.as_content(long),
    }
    write_result(result, content)


class Parts:
    """Keeps what has been measured, so that an interrupted benchmark goes on. Without a clean commit it is dropped."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        if "-dirty" in folder.name or folder.name.startswith("None"):
            shutil.rmtree(folder, ignore_errors=True)

    def once(self, name: str, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return what is kept under this name, or else measure and keep it."""
        path = self._folder / f"{name}.json"
        if path.is_file():
            return json.loads(path.read_text(encoding="utf-8"))
        found = measure()
        self._folder.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(found), encoding="utf-8")
        return found


def joined_rows(parts: Iterable[dict[str, dict[str, Row]]]) -> dict[str, dict[str, Row]]:
    """Return the rows of several concurrencies by drafter."""
    found: dict[str, dict[str, Row]] = {}
    for rows in parts:
        for name, by_concurrency in rows.items():
            found.setdefault(name, {}).update(by_concurrency)
    return found


def load_recorded(path: Path, quick: bool) -> list[TraceStep]:
    """Return a recorded trace with at least two epochs; raises ValueError as `load_trace` does."""
    steps = load_trace(path, max_epoch=3 if quick else None)
    if all(step.epoch < FIRST_COUNTED_EPOCH for step in steps):
        raise ValueError(f"{path}: one epoch only; the comparison covers epochs from the second on")
    return steps


def ceiling_of(steps: list[TraceStep], max_draft_tokens: int) -> float | None:
    """Return the greedy ceiling of the epochs from the second on, or None without recorded greedy bits."""
    return greedy_ceiling((step for step in steps if step.epoch >= FIRST_COUNTED_EPOCH), max_draft_tokens)


class DrafterBench:
    """Replays traces through all contenders with the same cost of engine steps, and the host time of each."""

    def __init__(
        self, max_draft_tokens: int, step_cost: StepSeconds, repeats: int, gaps: HostGaps | None = None
    ) -> None:
        self._max_draft_tokens = max_draft_tokens
        self.step_cost = step_cost
        self._gaps = gaps
        self._repeats = repeats  # of the replays whose modelled tokens/s have bars

    def compare(
        self, title: str, steps: list[TraceStep], concurrencies: Iterable[int], preload_epochs: int
    ) -> dict[str, dict[str, Row]]:
        """Return rows by drafter and concurrency. Epochs up to `preload_epochs` become history without a replay."""
        rows: dict[str, dict[str, Row]] = {}
        ceiling = ceiling_of(steps, self._max_draft_tokens)
        for concurrency in concurrencies:
            started = time.monotonic()
            contenders = self._contenders(concurrency, has_ceiling=ceiling is not None)
            joined = joined_steps(steps, concurrency)
            runs = {name: [self.play(joined, make, concurrency, preload_epochs)] for name, make in contenders.items()}
            settings: dict[str, Any] = {}
            if preload_epochs == 0:
                first = max((name for name in ARCTIC if name in runs), key=lambda name: _speed(runs[name][0]))
                settings = self.tune(joined, concurrency, ARCTIC[first])
                contenders[ARCTIC_TUNED], runs[ARCTIC_TUNED] = _arctic(self._max_draft_tokens, settings), []
                compared = [ARCTIC_TUNED, "rhyme", *([KNOWN_COST] if KNOWN_COST in runs else [])]
                for number in range(self._repeats):
                    for name in compared if number else (ARCTIC_TUNED,):
                        runs[name].append(self.play(joined, contenders[name], concurrency, preload_epochs))
                    compared.reverse()
            for name, several in runs.items():
                rows.setdefault(name, {})[str(concurrency)] = _merge(several)
            if settings:
                rows[ARCTIC_TUNED][str(concurrency)]["settings"] = settings
            if concurrency == CONCURRENCY:
                self._match_budget(steps, rows, preload_epochs)
            console.print(f"{title}, concurrency {concurrency}: replayed in {time.monotonic() - started:.0f} s")
        add_shares(rows, ceiling)
        return rows

    def tune(self, steps: list[TraceStep], concurrency: int, first: dict[str, Any]) -> dict[str, Any]:
        """Return the settings of `suffix` with the most modelled tokens/s that a search finds.

        The search begins with the settings `first` and changes one at a time to the fastest of its values, until no
        change is faster.
        """
        steps = [step for step in steps if step.epoch <= TUNED_EPOCHS]
        best = {name: values[0] for name, values in TUNED_OVER.items()} | first
        known: dict[tuple[Any, ...], float] = {}

        def speed_of(settings: dict[str, Any]) -> float:
            key = tuple(settings.values())
            if key not in known:
                known[key] = _speed(self.play(steps, _arctic(self._max_draft_tokens, settings), concurrency, 1))
            return known[key]

        while True:
            before = best
            for name, values in TUNED_OVER.items():
                best = max((best | {name: value} for value in values), key=speed_of)
            if best == before:
                return best

    def of_model(
        self, model: str, steps: list[TraceStep], rows: dict[str, dict[str, Row]]
    ) -> dict[str, dict[str, Row]]:
        """Return rows of no drafter, `suffix` as tuned before, and rhyme, with the step times of another model."""
        bench = DrafterBench(self._max_draft_tokens, DeviceTime(model).seconds, self._repeats, self._gaps)
        found: dict[str, dict[str, Row]] = {}
        for concurrency in OTHER_MODELS_AT:
            tuned = _arctic(self._max_draft_tokens, rows[ARCTIC_TUNED][str(concurrency)]["settings"])
            contenders = bench._contenders(concurrency, has_ceiling=False)
            joined = joined_steps(steps, concurrency)
            for name, make in {"none": contenders["none"], ARCTIC_TUNED: tuned, "rhyme": contenders["rhyme"]}.items():
                found.setdefault(name, {})[str(concurrency)] = bench.play(joined, make, concurrency, 0)
        return found

    def play(self, steps: list[TraceStep], make: Make, concurrency: int, preload_epochs: int) -> Row:
        """Replay a trace once and return the rates over its epochs from the second on."""
        width = width_of(steps)
        drafter = make(steps, width)
        engine = Replay(drafter, concurrency, width, self.step_cost, host_gap=self._gap_of(drafter))
        totals = Totals()
        for step in steps:
            if step.epoch <= preload_epochs:
                preload(drafter, step)
                continue
            added = engine.run_step(step)
            if step.epoch >= FIRST_COUNTED_EPOCH:
                totals += added
        if isinstance(drafter, IDEALS):
            totals.draft_seconds = totals.host_seconds = 0.0
        summary: Row = totals.summary()
        if isinstance(drafter, RhymeDrafter):
            summary["calibration"] = drafter.calibration()
        return summary

    def _gap_of(self, drafter: Any) -> HostGap | None:
        if self._gaps is None or isinstance(drafter, IDEALS):
            return None
        return self._gaps.rhyme if isinstance(drafter, RhymeDrafter) else self._gaps.synchronous

    def first_epoch(self, steps: list[TraceStep]) -> float:
        """Return the accepted tokens per verification of the first epoch, which has no history."""
        width = width_of(steps)
        drafter = RhymeDrafter(self._max_draft_tokens, width, policy="fixed")
        engine = Replay(drafter, FIRST_EPOCH_ROWS, width, self.step_cost)
        played = sum((engine.run_step(step) for step in steps if step.epoch < FIRST_COUNTED_EPOCH), Totals())
        return played.accepted / played.verifies if played.verifies else 0.0

    def _contenders(self, concurrency: int, has_ceiling: bool) -> dict[str, Make]:
        """Return all contenders at CONCURRENCY, otherwise ESSENTIAL and, at KNOWN_COST_AT, KNOWN_COST."""
        k = self._max_draft_tokens
        contenders: dict[str, Make] = {
            "none": lambda steps, width: NoDrafter(),
            "ngram": lambda steps, width: NgramDrafter(k, width, max(CONCURRENCIES)),
            **{name: _arctic(k, settings) for name, settings in ARCTIC.items()},
            "rhyme": _rhyme(k, {}),
            KNOWN_COST: lambda steps, width: self._taught(steps, width, concurrency),
            "rhyme fixed": _rhyme(k, {"policy": "fixed"}),
            "rhyme fixed, the paper's window": lambda steps, width: WindowDrafter(k, width, policy="fixed"),
            **{f"rhyme fixed, {name} off": _rhyme(k, {"policy": "fixed", "switches": (name,)}) for name in ABLATIONS},
            **{name: _rhyme(k, {"policy": "fixed", **settings}) for name, settings in FORGETFUL.items()},
            "oracle": lambda steps, width: Oracle(steps, k, live=False),
            "oracle live": lambda steps, width: Oracle(steps, k, live=True),
        }
        if has_ceiling:
            contenders["greedy"] = lambda steps, width: GreedyDrafter(k)
        if concurrency == CONCURRENCY:
            return contenders
        chosen = (*ESSENTIAL, KNOWN_COST) if concurrency in KNOWN_COST_AT else ESSENTIAL
        return {name: contenders[name] for name in chosen}

    def _taught(self, steps: list[TraceStep], width: int, concurrency: int) -> RhymeDrafter:
        """Return rhyme with a budget that knows all step times of a full batch from the start."""
        drafter = RhymeDrafter(self._max_draft_tokens, width)

        def seconds(rows: int, num_tokens: int, *others: Any, **named: Any) -> float:
            gap = self._gap_of(drafter)
            waited = 0.0 if gap is None else gap.seconds(min(num_tokens, concurrency), num_tokens)
            return waited + self.step_cost(rows, num_tokens, *others, **named)

        contexts = [len(answer.prompt) + len(answer.tokens) / 2 for step in steps for answer in step.answers]
        drafter.teach_step_cost(seconds, statistics.fmean(contexts))
        return drafter

    def _match_budget(self, steps: list[TraceStep], rows: dict[str, dict[str, Row]], preload_epochs: int) -> None:
        """Add rhyme at the settings that accept most while drafting no more tokens than Arctic's best and its default.

        Only `spec.min_acceptance` varies, with the policy `fixed`, which drafts every token above it. If every setting
        drafts more than the peer, the one that drafts least is taken.
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


def joined_steps(steps: list[TraceStep], num_rows: int) -> list[TraceStep]:
    """Join consecutive steps of an epoch until each has at least so many answers, except the last of an epoch."""
    found: list[TraceStep] = []
    for step in steps:
        last = found[-1] if found else None
        if last is not None and last.epoch == step.epoch and len(last.answers) < num_rows:
            found[-1] = replace(last, answers=last.answers + step.answers)
        else:
            found.append(step)
    return found


def _arctic(max_draft_tokens: int, settings: dict[str, Any]) -> Make:
    return lambda steps, width: ArcticDrafter(max_draft_tokens, width, **settings)


def _rhyme(max_draft_tokens: int, settings: dict[str, Any]) -> Make:
    return lambda steps, width: RhymeDrafter(max_draft_tokens, width, **settings)


def _speed(row: Row) -> float:
    return row["modelled_tokens_per_s"]


def _merge(runs: list[Row]) -> Row:
    """Return the median run, with the tokens per second of all runs because these contain measured time."""
    speeds = [run["modelled_tokens_per_s"] for run in runs]
    middle = statistics.median_low(speeds)
    return {**runs[speeds.index(middle)], "modelled_tokens_per_s_runs": speeds}


def add_shares(rows: dict[str, dict[str, Row]], ceiling: float | None) -> None:
    """Add each row's share of the greedy ceiling, if known, and of the clairvoyant oracle, if it was replayed."""
    oracle = rows.get("oracle live", {})
    for played in rows.values():
        for concurrency, row in played.items():
            accepted = row["accepted_per_verify"]
            row["share_of_ceiling"] = accepted / ceiling if ceiling else None
            best = oracle.get(concurrency, {}).get("accepted_per_verify")
            row["share_of_oracle"] = accepted / best if best else None


def best_arctic(rows: dict[str, dict[str, Row]], rate: str, concurrency: int = CONCURRENCY) -> tuple[str, Row]:
    """Return the name and the row of the Arctic setting with the highest `rate`."""
    at = str(concurrency)
    played = {name: rows[name][at] for name in (*ARCTIC, ARCTIC_TUNED) if at in rows.get(name, {})}
    name = max(played, key=lambda one: played[one][rate])
    return name, played[name]


def measure_speed(repeats: int, quick: bool) -> dict[str, Any]:
    """Return the cost of the drafters' calls (speed.py)."""
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


def all_bars(
    traces: dict, synthetic: dict, speed: dict[str, Any], first_epoch: dict[str, float]
) -> dict[str, dict[str, Any]]:
    """Return the bars of the drafter, as `bar` gives them."""
    bars = {}
    for name, rows in traces.items():
        bars |= {f"{name}: {what}": entry for what, entry in trace_bars(rows, TARGETS.get(name, Targets())).items()}
        target = TARGETS.get(name, Targets()).first_epoch
        if target is not None:
            what = f"{name}: accepted per verify in the first epoch, {FIRST_EPOCH_ROWS} rows"
            bars[what] = bar(first_epoch[name], at_least=target)
    for rate in BAR_EDIT_RATES:
        name = f"synthetic {rate:.0%}: accepted per verify / Arctic's best, no more drafted"
        bars[name] = _matched_bar(synthetic[f"{rate:.0%}"], 2.0)
    memory = speed["memory"]["rhyme"]
    for batch, ours in speed["draft_us"]["rhyme"].items():
        arctic = speed["draft_us"]["arctic-24"][batch]
        name = f"us per request and step / Arctic's at batch {batch}"
        bars[name] = bar(ours["median"] / arctic["median"], at_most=1.0)
    bars["ingest, M tokens/s per core"] = bar(speed["ingest_tokens_per_s"]["rhyme"]["median"] / 1e6, at_least=2.0)
    most = max(memory["rss_bytes_per_token"], memory["own_bytes_per_token"])
    bars["bytes per history token, growth of the process or own count"] = bar(most, at_most=32.0)
    return bars


def trace_bars(rows: dict[str, dict[str, Row]], targets: Targets) -> dict[str, dict[str, Any]]:
    """Return the bars of one recorded trace."""
    bars = {"accepted per verify / Arctic's best, no more drafted": _matched_bar(rows, targets.accepted)}
    fixed = rows["rhyme fixed"][AT]
    if targets.ceiling is not None and fixed["share_of_ceiling"] is not None:
        best = max(fixed["share_of_ceiling"], rows[BEST_BUDGET][AT]["share_of_ceiling"])
        bars["share of the greedy ceiling"] = bar(best, at_least=targets.ceiling)
    bars["calibration, worst bin beyond its tolerance"] = bar(
        max((beyond_tolerance(**one) for one in fixed["calibration"]), default=0.0), at_most=0.0
    )
    for concurrency, row in rows["rhyme"].items():
        speed = row["modelled_tokens_per_s"]
        _, arctic = best_arctic(rows, "modelled_tokens_per_s", int(concurrency))
        if int(concurrency) in targets.speed:
            bars[f"modelled tokens/s / Arctic's best at {concurrency}"] = bar(
                speed / arctic["modelled_tokens_per_s"], at_least=targets.speed[int(concurrency)]
            )
        bars[f"modelled tokens/s / undrafted at {concurrency}"] = bar(
            speed / rows["none"][concurrency]["modelled_tokens_per_s"],
            at_least=targets.undrafted.get(int(concurrency), 0.98),
        )
        if concurrency in rows.get(KNOWN_COST, {}):
            bars[f"modelled tokens/s / step cost known at {concurrency}"] = bar(
                speed / rows[KNOWN_COST][concurrency]["modelled_tokens_per_s"], at_least=0.97
            )
    return bars


def _matched_bar(rows: dict[str, dict[str, Row]], target: float) -> dict[str, Any]:
    matched = rows[BEST_BUDGET][AT]
    entry = bar(matched["ratio_to_peer"], at_least=target)
    return {**entry, "holds": entry["holds"] and matched["drafted"] <= matched["budget"]}


def beyond_tolerance(tokens: int, predicted: float, observed: float) -> float:
    """Return the error of a bin of predictions beyond CALIBRATION_TOLERANCE and two standard errors."""
    standard_error = math.sqrt(predicted * (1 - predicted) / tokens)
    return abs(observed - predicted) - CALIBRATION_TOLERANCE - 2 * standard_error


def trace_table(title: str, rows: dict[str, dict[str, Row]]) -> Table:
    concurrencies = list(rows["rhyme"])
    caption = f"tokens/s: {STEP_TIMES} with host time; in brackets: device only"
    table = Table(title=f"{title}, concurrency {AT}", caption=caption)
    headings = ("acc/\nverify", "oracle", "ceiling", "tok/\nstep", "accept", "prop/\nacc", "us")
    table.add_column("drafter", no_wrap=True)
    for heading in (*headings, *(f"tok/s\n@{c}" for c in concurrencies)):
        table.add_column(heading, justify="right")
    for name, played in rows.items():
        row = played[AT]
        speeds = [_tokens_per_s(played[c]) if c in played else "" for c in concurrencies]
        table.add_row(
            name,
            f"{row['accepted_per_verify']:.2f}",
            _percent(row["share_of_oracle"]),
            _percent(row["share_of_ceiling"]),
            f"{row['tokens_per_step']:.2f}",
            f"{row['acceptance_rate']:.0%}",
            f"{row['proposed_per_accepted']:.2f}",
            f"{row['draft_us_per_verify']:.2f}",
            *speeds,
        )
    return table


def _tokens_per_s(row: Row) -> str:
    return f"{row['modelled_tokens_per_s']:,.0f} ({row['device_tokens_per_s']:,.0f})"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"


def speed_table(speed: dict[str, Any]) -> Table:
    batches = drafter_speed.BATCHES
    table = Table(title="us per request and step, by batch; 64k tokens of history per prompt")
    table.add_column("drafter")
    for heading in (*map(str, batches), "ingest tok/s", "one by one", "B/token (own)", "B/token (process)"):
        table.add_column(heading, justify="right")
    for name, row in speed["draft_us"].items():
        cells = [f"{row[batch]['median']:.2f}" for batch in batches]
        if name in speed["memory"]:
            memory = speed["memory"][name]
            one_by_one = speed["ingest_one_by_one_tokens_per_s"].get(name)  # the others only take one answer at a time
            cells.append(f"{speed['ingest_tokens_per_s'][name]['median']:,.0f}")
            cells.append(f"{one_by_one['median']:,.0f}" if one_by_one else "")
            cells += [f"{memory['own_bytes_per_token']:.1f}", f"{memory['rss_bytes_per_token']:.1f}"]
        else:
            cells += [""] * 4
        table.add_row(name, *cells)
    return table


def long_table(figures: dict[str, long_answers.Figures]) -> Table:
    table = Table(title="rhyme's drafter with long answers")
    table.add_column("load")
    for heading in ("live tokens", "MiB", "B/token", "median ms", "p99", "longest"):
        table.add_column(heading, justify="right")
    for name, one in figures.items():
        times = (f"{value:.2f}" for value in (one.median_ms, one.p99_ms, one.longest_ms))
        table.add_row(name, f"{one.live_tokens:,}", f"{one.mib:.1f}", f"{one.bytes_per_token:.0f}", *times)
    return table


if __name__ == "__main__":
    typer.run(main)
