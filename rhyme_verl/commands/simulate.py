"""`rhyme simulate`: compares rollout schedulers on a simulated cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from rhyme_verl.commands.terminal import open_console
from rhyme_verl.sim import report
from rhyme_verl.sim.cluster import PREFILL_SECONDS_PER_TOKEN, affine_step_seconds
from rhyme_verl.sim.experiment import CASES, play
from rhyme_verl.sim.step_times import MODELS, PublishedStepTime
from rhyme_verl.sim.trainer import Scenario
from rhyme_verl.sim.workload import LogNormal, from_distribution, from_trace

MAX_TOKENS = 16384  # of a synthetic answer
SYSTEMS = tuple(dict.fromkeys(case.system for case in CASES if isinstance(case.system, str)))


def simulate(
    replicas: Annotated[int, typer.Option(min=1, help="Rollout replicas.")] = 64,
    max_running: Annotated[
        int, typer.Option(min=1, help="Lanes of a replica (`max_num_seqs`): answers that it generates concurrently.")
    ] = 128,
    groups: Annotated[int, typer.Option(min=1, help="Prompts per training step.")] = 512,
    samples: Annotated[int, typer.Option(min=1, help="Answers per prompt (`rollout.n`).")] = 16,
    steps: Annotated[int, typer.Option(min=6, help="Training steps; the first third is left out of all figures.")] = 12,
    median: Annotated[float, typer.Option(min=1, help="Median length of an answer in tokens.")] = 2000.0,
    tail: Annotated[
        float, typer.Option(min=1.01, help="99th percentile of the answers' lengths, divided by their median.")
    ] = 8.0,
    cap: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Longest answer in tokens; with --trace, of the recorded run. Default: 16384; the trace's longest.",
        ),
    ] = None,
    within: Annotated[
        float,
        typer.Option(
            min=0,
            max=1,
            help="How much answers to one prompt vary in length, as a fraction of the variation over all prompts.",
        ),
    ] = 0.19,
    noise: Annotated[
        float,
        typer.Option(
            min=0,
            help="How far a prompt's typical length drifts per epoch, as a fraction of the variation over all prompts.",
        ),
    ] = 0.08,
    trace: Annotated[
        Path | None, typer.Option(help="Take the answers' lengths from a recorded trace (file or folder).")
    ] = None,
    scale: Annotated[float, typer.Option(min=1e-6, help="Factor on the lengths of --trace.")] = 1.0,
    repeat: Annotated[int, typer.Option(min=1, help="How many times each prompt of --trace is used.")] = 1,
    step_ms: Annotated[float, typer.Option(min=1e-6, help="Fixed part of an engine step's time, in ms.")] = 15.0,
    sequence_ms: Annotated[
        float, typer.Option(min=0, help="Time that each running sequence adds to an engine step, in ms.")
    ] = 0.05,
    step_time: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help=f"Published A100 step times of this model: {', '.join(MODELS)}."),
    ] = None,
    speed_spread: Annotated[
        float, typer.Option(min=0, max=0.9, help="Speeds of replicas are uniform in [1 - this, 1 + this].")
    ] = 0.0,
    tokens_per_step: Annotated[
        float, typer.Option(min=0.1, help="Tokens per sequence and engine step; above 1 with HistoSpec.")
    ] = 1.0,
    train_seconds: Annotated[
        float, typer.Option(min=0, help="Seconds of training and weight transfer per step.")
    ] = 0.0,
    filtered: Annotated[
        float, typer.Option(min=0, max=0.9, help="Fraction of groups that dynamic sampling filters out and replaces.")
    ] = 0.0,
    recompute_us: Annotated[float, typer.Option(min=0, help="Prefill time per token of a resumed answer, in µs.")] = (
        1e6 * PREFILL_SECONDS_PER_TOKEN
    ),
    system: Annotated[
        list[str] | None, typer.Option(help=f"Only these systems (repeatable): {', '.join(SYSTEMS)}.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the answers' lengths.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder of simulation.json.")] = Path("runs/simulation"),
) -> None:
    """Compare rollout schedulers on a simulated cluster.

    Trainer modes: sync (rollout and training alternate); one step off (a batch is generated while the previous one is
    trained, with a barrier after each step); pipelined (the RhymeRL paper's: two batches at a time); colocate async and
    separate async (verl's: a step starts as soon as a batch of groups is finished, and new weights interrupt unfinished
    answers; "wait" is verl's bound on the age of groups).

    Systems: verl (sends each request at once to the replica with the fewest requests), round-robin, histopipe (the
    production code; in colocate async, units with carried groups, up to max_age), perfect (histopipe with known
    lengths), two-tier (the RhymeRL paper's sorted ranges).

    "Of bound" is the steps per hour relative to an upper bound for any schedule with the same age limit. All figures
    describe the steady state.
    """
    unknown = sorted(set(system or ()) - set(SYSTEMS))
    if unknown:
        raise typer.BadParameter(f"--system {unknown[0]}: choose from {', '.join(SYSTEMS)}")
    if trace is None:
        longest = cap or MAX_TOKENS
        distribution = LogNormal(
            median=median, p99_over_median=tail, cap=longest, within_group=within, epoch_noise=noise
        )
        workload = from_distribution(distribution, steps=steps, groups=groups, samples=samples, seed=seed)
    else:
        try:
            workload = from_trace(trace, cap=cap, scale=scale, repeat=repeat)
        except ValueError as error:
            raise typer.BadParameter(f"--trace: {error}") from error
    if step_time is None:
        step_seconds = affine_step_seconds(step_ms / 1e3, sequence_ms / 1e3, max_running)
    else:
        # The mean context holds the answer tokens so far, averaged over all steps.
        lengths = workload.lengths.astype(np.float64)
        context = (lengths**2).sum() / (2.0 * lengths.sum())
        try:
            step_seconds = PublishedStepTime(step_time).step_seconds(max_running, context)
        except ValueError as error:
            raise typer.BadParameter(f"--step-time: {error}") from error
    scenario = Scenario(
        workload=workload,
        speeds=np.random.default_rng(seed).uniform(1.0 - speed_spread, 1.0 + speed_spread, replicas),
        step_seconds=step_seconds,
        steps=steps,
        train_seconds=train_seconds,
        filtered=filtered,
        tokens_per_step=tokens_per_step,
        recompute_seconds_per_token=recompute_us / 1e6,
    )
    console = open_console()
    outcomes = []
    for case in [case for case in CASES if not system or case.system in system]:
        if filtered and case.mode in ("sync", "one_step_off", "pipelined"):
            continue  # these trainers take whole batches
        with console.status(case.name):
            outcomes.append(play(scenario, case)[0])
    console.print(report.table(outcomes, scenario))
    console.print(
        f"rank correlation of predicted and actual lengths {workload.rank_correlation:.3f}; ranks change by "
        f"{workload.rank_churn:.1%} per epoch"
    )
    settings: dict[str, Any] = {"seed": seed, "train_seconds": train_seconds, "tokens_per_step": tokens_per_step}
    settings |= {"trace": str(trace)} if trace else {"median": median, "tail": tail, "cap": cap, "within": within}
    if step_time:
        settings["step_time"] = step_time
    report.write_summary(out / "simulation.json", outcomes, workload, settings)
    console.print(f"wrote {out / 'simulation.json'}")
