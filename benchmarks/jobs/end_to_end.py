"""Whole verl jobs on one workload: stock verl, vLLM's `suffix`, verl's own asynchronous modes, and rhyme.

verl's GRPO trains the long-tail policy on two replicas with published A100 step times (emulated_clock.py). Trainer,
Ray, router, engines, drafters and tokens are real; problems and seeds are the same in all cases. A batch has as many
answers as there are lanes. All times are divided by the dilation of the emulated clock.

A round runs each chosen case once, one after the other on one machine; ratios are taken within a round. The --out
folder keeps finished cases, so an interrupted benchmark can be resumed. Run by `make bench-e2e`.
"""

from __future__ import annotations

import json
import signal
import statistics
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from benchmarks.common.result_files import RESULTS, console, write_result
from benchmarks.engines.best_suffix import DRAFTER_RESULT, best_suffix, suffix_config
from benchmarks.jobs.emulated_clock import LABEL, EmulatedTime
from benchmarks.jobs.replica_job import ROLLOUT, SAMPLES, ReplicaJob, analyse
from tools.cpu_job.longtail import MAX_ANSWER_TOKENS, SHIPPED_POLICY
from tools.cpu_job.problems import LONGTAIL
from tools.cpu_job.progress import json_lines

REPLICAS = 2
LANES = 64
BATCH_SIZE = REPLICAS * LANES // SAMPLES  # one answer per lane
NUM_PROBLEMS = 4 * BATCH_SIZE
EPOCHS = 5
WARMUP_STEPS = 2  # the first step starts engines and caches; two keep units of two steps whole
TRAINER_SHARE = 0.15  # trainer's time in steps/h, as a share of stock verl's rollout seconds
STOCK = "sync stock"
DRAFT_ROOM = 128  # model length beyond the longest answer in tokens, so that no draft is cut short
COMMON = (
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16",
    f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=16",
    f"{ROLLOUT}.agent.num_workers=2",
    f"+{ROLLOUT}.max_model_len={160 + MAX_ANSWER_TOKENS + DRAFT_ROOM}",
    # A separate worker process would be a third, busy-waiting process on two cores.
    f"+{ROLLOUT}.engine_kwargs.vllm.distributed_executor_backend=uni",
)
NO_DRAFTS = f"+{ROLLOUT}.custom.rhyme.spec.enabled=false"
THRESHOLD = "trainer.v1.sampler.max_off_policy_threshold"
WAIT = "trainer.v1.sampler.max_off_policy_strategy=wait"


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way to run the job.

    Attributes:
        mode: verl's trainer mode.
        rollout: `vllm` (stock) or `rhyme`.
        pipe: `pipe.max_age` for HistoPipe; None: verl's load balancer (see ReplicaJob).
        suffix: `speculative_config` of vLLM's `suffix` method; None: not used.
        overrides: additional verl (Hydra) overrides.
    """

    mode: str
    rollout: str = "vllm"
    pipe: int | None = None
    suffix: dict[str, Any] | None = None
    overrides: tuple[str, ...] = ()

    def job(self, emulation: str, epochs: int) -> ReplicaJob:
        """Return the job of this case."""
        overrides = (*COMMON, *self.overrides)
        if self.suffix is not None:
            text = ",".join(f"{name}:{value}" for name, value in self.suffix.items())
            overrides += (f"+{ROLLOUT}.engine_kwargs.vllm.speculative_config={{{text}}}",)
        return ReplicaJob(
            mode=self.mode,
            rollout=self.rollout,
            pipe=self.pipe,
            replicas=REPLICAS,
            lanes=LANES,
            batch_size=BATCH_SIZE,
            epochs=epochs,
            num_problems=NUM_PROBLEMS,
            task=LONGTAIL,
            policy=SHIPPED_POLICY,
            max_response_tokens=MAX_ANSWER_TOKENS,
            emulation=emulation,
            overrides=overrides,
        )


def cases(best: dict[str, Any]) -> dict[str, Case]:
    """Return all cases by name; `best` is the fastest `speculative_config` of `suffix` in the replay."""
    found: dict[str, Case] = {}
    for mode, name, max_age in (("sync", "sync", 0), ("colocate_async", "colocate", 2)):
        stock = Case(mode=mode)
        found |= {
            f"{name} stock": stock,
            f"{name} suffix": replace(stock, suffix=suffix_config({})),
            f"{name} suffix best": replace(stock, suffix=best),
            f"{name} histospec": Case(mode=mode, rollout="rhyme"),
            f"{name} histopipe": Case(mode=mode, rollout="rhyme", pipe=max_age, overrides=(NO_DRAFTS,)),
            f"{name} rhyme": Case(mode=mode, rollout="rhyme", pipe=max_age),
        }
    for threshold in (2, 3):
        waiting = (WAIT, f"{THRESHOLD}={threshold}")
        found[f"colocate wait {threshold}"] = Case(mode="colocate_async", overrides=waiting)
    return found


def main(
    rounds: Annotated[int, typer.Option(min=1, help="Runs per case, interleaved.")] = 1,
    case: Annotated[list[str] | None, typer.Option(help="Run only this case (repeatable); see --list.")] = None,
    list_cases: Annotated[bool, typer.Option("--list", help="Print the cases and exit.")] = False,
    model: Annotated[str, typer.Option(help="Model whose published step times are emulated.")] = "qwen2.5-7b",
    dilation: Annotated[
        float, typer.Option(min=0.1, help="Real seconds per emulated second, so that CPUs keep up.")
    ] = 2.0,
    epochs: Annotated[int, typer.Option(min=2, help=f"Epochs over {NUM_PROBLEMS} problems.")] = EPOCHS,
    drafter: Annotated[Path, typer.Option(help="Result of bench-drafter, for the best `suffix` settings.")] = (
        DRAFTER_RESULT
    ),
    out: Annotated[Path, typer.Option(help="Folder of the runs; finished cases in it are not run again.")] = Path(
        "runs/end_to_end"
    ),
    result: Annotated[Path, typer.Option(help="Path of the result file.")] = RESULTS / "end_to_end.json",
) -> None:
    """Run the cases in rounds and compare."""
    try:
        best = best_suffix("longtail", LANES, drafter)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    known = cases(best)
    if list_cases:
        console.print("\n".join(known), highlight=False)
        return
    unknown = sorted(set(case or ()) - set(known))
    if unknown:
        raise typer.BadParameter(f"--case {unknown[0]}: choose from {', '.join(known)}")
    if not SHIPPED_POLICY.is_dir():
        raise typer.BadParameter(f"{SHIPPED_POLICY}: no policy here: run `python -m tools.cpu_job.longtail`")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that `timeout` also ends the job's processes
    emulation = f"{model},{dilation:g}"
    chosen = [STOCK, *(name for name in case or known if name != STOCK)]  # every round needs the baseline
    runs: list[dict[str, Any]] = []
    for number in range(1, rounds + 1):
        for name in chosen:
            folder = out / f"round-{number}" / name.replace(" ", "-")
            runs.append({"round": number, "case": name, **_run(known[name], name, number, emulation, epochs, folder)})
    summary = summarize(runs, dilation)
    console.print(table(summary, f"two replicas of {LANES} lanes, {LABEL} ({model})"))
    content = {
        "label": f"{LABEL} ({model})",
        "model": model,
        "dilation": dilation,
        "replicas": REPLICAS,
        "lanes": LANES,
        "batch_size": BATCH_SIZE,
        "samples": SAMPLES,
        "num_problems": NUM_PROBLEMS,
        "epochs": epochs,
        "warmup_steps": WARMUP_STEPS,
        "suffix_best": best,
        "summary": summary,
        "runs": runs,
    }
    write_result(result, content)


def _run(case: Case, name: str, number: int, emulation: str, epochs: int, folder: Path) -> dict[str, Any]:
    """Run a case, or read the result of an earlier run; returns its steps in real seconds."""
    done = folder / "done.json"
    if done.is_file():
        kept = json.loads(done.read_text(encoding="utf-8"))
        if (kept["emulation"], kept["epochs"]) == (emulation, epochs):
            console.print(f"round {number}, {name}: already done")
            return kept
        raise typer.BadParameter(f"{folder}: done with {kept['emulation']} and {kept['epochs']} epochs: change --out")
    console.print(f"round {number}, {name} ...")
    started = time.monotonic()
    case.job(emulation, epochs).run(folder, on_step=lambda line: console.print(f"  {line}", highlight=False))
    found = analyse(folder, case.mode, REPLICAS, LANES, WARMUP_STEPS)
    before = found["started"] + found["steps"][WARMUP_STEPS - 1]["got"]
    kept = {
        "emulation": emulation,
        "epochs": epochs,
        "wall_seconds": time.monotonic() - started,
        **found,
        "emulated": [
            vars(read_emulated(path, before)) for path in sorted((folder / "times").glob("emulation-*.jsonl"))
        ],
    }
    done.write_text(json.dumps(kept) + "\n", encoding="utf-8")
    return kept


def read_emulated(path: Path, after: float) -> EmulatedTime:
    """Return the totals of a replica's emulation after a point in time (Unix seconds)."""
    totals = json_lines(path)
    earlier = [line for line in totals if line["time"] <= after]
    start = earlier[-1] if earlier else dict.fromkeys(totals[-1], 0)
    return EmulatedTime(**{name: value - start[name] for name, value in totals[-1].items() if name != "time"})


def summarize(runs: list[dict[str, Any]], dilation: float) -> dict[str, dict[str, Any]]:
    """Return the figures of the table by case, each the median over the rounds."""
    per_round: dict[str, list[dict[str, Any]]] = {}
    for number in sorted({run["round"] for run in runs}):
        of_round = {run["case"]: run for run in runs if run["round"] == number}
        stock = [step["rollout_seconds"] / dilation for step in of_round[STOCK]["steps"][WARMUP_STEPS:]]
        trainer_seconds = TRAINER_SHARE * statistics.median(stock)
        figures = {name: figures_of(run, dilation, trainer_seconds) for name, run in of_round.items()}
        for name, one in figures.items():
            ratio = one["steps_per_hour"] / figures[STOCK]["steps_per_hour"]
            per_round.setdefault(name, []).append({**one, "steps_per_hour_ratio": ratio})
    return {
        name: {figure: _median([one[figure] for one in rounds]) for figure in rounds[0]} | {"rounds": rounds}
        for name, rounds in per_round.items()
    }


def _median(values: list[Any]) -> Any:
    if isinstance(values[0], bool):
        return all(values)
    if isinstance(values[0], list):
        return [statistics.median(column) for column in zip(*values, strict=True)]
    return statistics.median(values)


def figures_of(run: dict[str, Any], dilation: float, trainer_seconds: float) -> dict[str, Any]:
    """Return the figures of one run over its steps after the warm-up, in emulated seconds."""
    steps = run["steps"][WARMUP_STEPS:]
    seconds = [step["rollout_seconds"] / dilation for step in steps]
    emulated = EmulatedTime(**{name: sum(one[name] for one in run["emulated"]) for name in vars(EmulatedTime())})
    rewards = [step["reward"] for step in run["steps"]]
    quarter = max(1, len(rewards) // 4)
    quarters = [statistics.mean(rewards[i * quarter : (i + 1) * quarter]) for i in range(4)]
    return {
        "rollout_seconds_mean": statistics.mean(seconds),
        "rollout_seconds_quartiles": statistics.quantiles(seconds, n=4),
        "steps_per_hour": 3600 / (statistics.mean(seconds) + trainer_seconds),
        "raw_step_seconds": statistics.median(step["step_seconds"] for step in steps),
        "tokens_per_s": sum(step["tokens"] for step in steps) / sum(seconds),
        "accepted_per_verify": emulated.accepted / emulated.verifies if emulated.verifies else 0.0,
        "drafted_per_verify": emulated.drafted / emulated.verifies if emulated.verifies else 0.0,
        "bubble": run["measured"]["bubble"],
        "age_mean": statistics.mean(step["staleness_worst_mean"] for step in steps),
        "age_max": max(step["staleness_worst_max"] for step in steps),
        "mixed_share": statistics.mean(step["spanning_share"] for step in steps),
        "reward_by_quarter": quarters,
        "min_probs_correlation": min(step["probs_correlation"] for step in run["steps"]),
        "late_step_share": emulated.late_step_share,
        "late_time_share": emulated.late_time_share,
        "is_valid": emulated.is_valid,
    }


def table(summary: dict[str, dict[str, Any]], title: str) -> Table:
    result = Table(title=title)
    headings = (
        "case", "rollout s", "quartiles", "steps/h", "ratio", "tok/s", "acc/ver", "bubble",
        "age", "max", "mixed", "reward by quarter", "corr", "late", "valid",
    )  # fmt: skip
    for heading in headings:
        result.add_column(heading, justify="left" if heading == "case" else "right", no_wrap=True)
    for name, row in summary.items():
        low, middle, high = row["rollout_seconds_quartiles"]
        result.add_row(
            name,
            f"{row['rollout_seconds_mean']:.2f}",
            f"{low:.1f} {middle:.1f} {high:.1f}",
            f"{row['steps_per_hour']:.0f}",
            f"{row['steps_per_hour_ratio']:.2f}",
            f"{row['tokens_per_s']:,.0f}",
            f"{row['accepted_per_verify']:.2f}",
            f"{row['bubble']:.0%}",
            f"{row['age_mean']:.2f}",
            f"{row['age_max']:g}",
            f"{row['mixed_share']:.0%}",
            " ".join(f"{reward:.2f}" for reward in row["reward_by_quarter"]),
            f"{row['min_probs_correlation']:.4f}",
            f"{row['late_step_share']:.1%}",
            "yes" if row["is_valid"] else "[red]no[/]",
        )
    return result


if __name__ == "__main__":
    typer.run(main)
