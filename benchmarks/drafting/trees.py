"""Replays drafts that are trees, and compares them with paths.

A tree holds several continuations of an answer, which are verified in one pass. The recorded answer is followed from
the root as long as its next token is a child. A step with a tree is charged two more launches of an attention kernel
per layer, and one more that moves keys and values if accepted tokens do not lie in consecutive slots from the draft's
first on. Everything else is as in `bench.py`: published step times, the host's time from a table, the drafter's own as
measured. The peers are paths as they are drafted by default, and paths with the settings of trees. Run by `make
bench-trees`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import numpy as np
import typer
from rich.table import Table

from benchmarks.common.result_files import RESULTS, bar, bars_table, console, write_result
from benchmarks.drafting.bench import FIRST_COUNTED_EPOCH, MAX_DRAFT_TOKENS, STEP_TIME_MODEL, STEP_TIMES, load_recorded
from benchmarks.drafting.drafters import RhymeDrafter
from benchmarks.drafting.host_gap import HOST_RESULT, HostGap, host_gaps
from benchmarks.drafting.replay import Batch, Replay, Request, StepSeconds, Totals, TraceStep, named_traces, width_of
from rhyme_verl.sim.step_times import PublishedStepTime

NODES = 64  # most tokens of a tree
MIN_ACCEPTANCE = 0.01  # of a tree's tokens: less than a path's by default, because many have little worth each
ROWS = (1, 2, 4, 8, 16, 64, 128)
LAYERS = 28  # of the model of the step times
LAUNCH_SECONDS = 10e-6
ATTENTION_SECONDS = 2 * LAYERS * LAUNCH_SECONDS  # of a step with a tree: the tree's own tokens, and the merging
MOVING_SECONDS = LAYERS * LAUNCH_SECONDS
PATH, LONG_PATH, TREE = "path", "path, a tree's settings", "tree"
ACCEPTED_BAR = 1.3  # accepted per verification at one row, relative to paths
SPEED_BARS = {1: 1.18, 4: 1.10, 16: 1.03, 64: 0.995, 128: 0.995}  # modelled tokens/s relative to paths, by rows

Row = dict[str, float]


class TreeDraft(list[int]):
    """The tokens of a draft; `parents` has the index of each token's predecessor, -1 for the context."""

    def __init__(self, tokens: Sequence[int], parents: Sequence[int]) -> None:
        super().__init__(tokens)
        self.parents = list(parents)

    @property
    def branches(self) -> bool:
        """Whether it is more than a path."""
        return self.parents != list(range(-1, len(self) - 1))

    def walk(self, truth: Sequence[int]) -> list[int]:
        """Return the indices of the tokens that `truth` accepts."""
        path: list[int] = []
        children = {(parent, token): i for i, (parent, token) in enumerate(zip(self.parents, self, strict=True))}
        for token in truth:
            found = children.get((path[-1] if path else -1, token))
            if found is None:
                break
            path.append(found)
        return path


class TreeDrafter(RhymeDrafter):
    """HistoSpec's core, drafting trees of up to `max_draft_tokens` tokens."""

    _extra = MappingProxyType({"trees": True})

    def propose(self, batch: Batch, sampled: list[list[int]], now: float) -> list[list[int]]:
        if batch.req_ids != self._bound_rows:
            self._bind(batch)
        parents = np.empty((len(batch.req_ids), self._config.spec.max_draft_tokens), np.int16)
        drafts = self.drafter.draft(
            batch.token_ids_cpu, batch.num_tokens_no_spec, self._row_slots, self._max_model_len, now, parents=parents
        )
        return [
            TreeDraft(draft, row[: len(draft)].tolist()) if draft else []
            for draft, row in zip(drafts, parents, strict=True)
        ]


class TreeReplay(Replay):
    """An engine that verifies trees."""

    def __init__(self, drafter: Any, concurrency: int, width: int, step_cost: StepSeconds, **arguments: Any) -> None:
        self._model_cost = step_cost
        self._are_branched = self._are_moved = False
        self.branched_steps = self.moving_steps = 0
        super().__init__(drafter, concurrency, width, self._seconds, **arguments)

    def _accepted(self, request: Request) -> int:
        draft = request.draft
        if not isinstance(draft, TreeDraft):
            return super()._accepted(request)
        path = draft.walk(request.tokens[request.position : request.position + len(draft)])
        self._are_branched |= draft.branches
        self._are_moved |= path != list(range(len(path)))
        return len(path)

    def _seconds(self, rows: int, num_tokens: int, context: float) -> float:
        extra = ATTENTION_SECONDS * self._are_branched + MOVING_SECONDS * self._are_moved
        self.branched_steps += self._are_branched
        self.moving_steps += self._are_moved
        self._are_branched = self._are_moved = False
        return self._model_cost(rows, num_tokens, context) + extra


def main(
    trace: Annotated[
        list[Path] | None, typer.Option(help="Recorded trace (repeatable). Default: all in benchmarks/traces.")
    ] = None,
    rows: Annotated[list[int] | None, typer.Option(min=1, help="Running requests (repeatable).")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Replays of each, of which the median counts.")] = 3,
    charge_drafter: Annotated[
        bool, typer.Option(help="Charge the drafter's measured time; without it, results do not depend on the machine.")
    ] = True,
    quick: Annotated[bool, typer.Option(help="Use three epochs, for development; ignore the bars.")] = False,
    host: Annotated[Path, typer.Option(help="Result of bench-host, for the host time.")] = HOST_RESULT,
    result: Annotated[Path, typer.Option(help="Path of the result file.")] = RESULTS / "trees.json",
) -> None:
    """Replay traces with trees and with paths, and compare them."""
    try:
        recorded = {name: load_recorded(path, quick) for name, path in named_traces(trace or []).items()}
        gap = host_gaps(host).rhyme
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    traces: dict[str, dict[str, dict[str, Row]]] = {}
    for name, steps in recorded.items():
        traces[name] = {PATH: {}, LONG_PATH: {}, TREE: {}}
        for concurrency in rows or ROWS:
            started = time.monotonic()
            runs: dict[str, list[Row]] = {PATH: [], LONG_PATH: [], TREE: []}
            for _ in range(repeats if charge_drafter else 1):
                for kind, several in runs.items():
                    several.append(play(steps, kind, concurrency, gap, charge_drafter=charge_drafter))
            for kind, several in runs.items():
                traces[name][kind][str(concurrency)] = {
                    column: statistics.median(run[column] for run in several) for column in several[0]
                }
            console.print(f"{name}, {concurrency} rows: replayed in {time.monotonic() - started:.0f} s")
        console.print(trace_table(name, traces[name]))
    bars = all_bars(traces)
    console.print(bars_table(bars))
    content = {
        "step_times": STEP_TIMES,
        "max_draft_tokens": {PATH: MAX_DRAFT_TOKENS, LONG_PATH: NODES, TREE: NODES},
        "min_acceptance": {LONG_PATH: MIN_ACCEPTANCE, TREE: MIN_ACCEPTANCE},
        "charged_ms": {"trees": 1e3 * ATTENTION_SECONDS, "moved keys and values": 1e3 * MOVING_SECONDS},
        "is_drafter_charged": charge_drafter,
        "bars": bars,
        "traces": traces,
    }
    write_result(result, content)


def play(steps: list[TraceStep], kind: str, rows: int, gap: HostGap | None, *, charge_drafter: bool = True) -> Row:
    """Replay a trace once with PATH, LONG_PATH or TREE and return the rates over its epochs from the second on."""
    width = width_of(steps)
    make = TreeDrafter if kind == TREE else RhymeDrafter
    drafter = make(MAX_DRAFT_TOKENS, width) if kind == PATH else make(NODES, width, min_acceptance=MIN_ACCEPTANCE)
    step_cost = PublishedStepTime(STEP_TIME_MODEL).seconds
    engine = TreeReplay(drafter, rows, width, step_cost, host_gap=gap, charge_drafter=charge_drafter)
    totals = Totals()
    for step in steps:
        added = engine.run_step(step)
        if step.epoch >= FIRST_COUNTED_EPOCH:
            totals += added
        else:
            engine.branched_steps = engine.moving_steps = 0
    return {
        **totals.summary(),
        "drafted_per_verify": totals.drafted / totals.verifies,
        "branched_share": engine.branched_steps / totals.engine_steps,
        "moving_share": engine.moving_steps / totals.engine_steps,
    }


def all_bars(traces: dict[str, dict[str, dict[str, Row]]]) -> dict[str, dict[str, Any]]:
    """Return the bars of each trace, of the numbers of rows that were replayed."""
    bars = {}
    for name, kinds in traces.items():
        for rows, tree in kinds[TREE].items():
            path = kinds[PATH][rows]
            if rows == "1":
                ratio = tree["accepted_per_verify"] / path["accepted_per_verify"]
                bars[f"{name}, 1 row: accepted per verification, tree / path"] = bar(ratio, at_least=ACCEPTED_BAR)
            if (target := SPEED_BARS.get(int(rows))) is not None:
                ratio = tree["modelled_tokens_per_s"] / path["modelled_tokens_per_s"]
                bars[f"{name}, {rows} rows: modelled tokens/s, tree / path"] = bar(ratio, at_least=target)
    return bars


def trace_table(name: str, kinds: dict[str, dict[str, Row]]) -> Table:
    table = Table(title=f"{name}, epochs from the second on")
    for heading in ("rows", "drafts", "accepted", "drafted", "tokens/s", "/ path", "with trees", "moving", "us/verify"):
        table.add_column(heading, justify="left" if heading == "drafts" else "right")
    for rows in kinds[PATH]:
        for kind, by_rows in kinds.items():
            row = by_rows[rows]
            ratio = row["modelled_tokens_per_s"] / kinds[PATH][rows]["modelled_tokens_per_s"]
            table.add_row(
                rows, kind, f"{row['accepted_per_verify']:.2f}", f"{row['drafted_per_verify']:.1f}",
                f"{row['modelled_tokens_per_s']:,.0f}", f"{ratio:.3f}", f"{row['branched_share']:.0%}",
                f"{row['moving_share']:.0%}", f"{row['draft_us_per_verify']:.0f}",
            )  # fmt: skip
    return table


if __name__ == "__main__":
    typer.run(main)
