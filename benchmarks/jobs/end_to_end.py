"""Whole verl jobs on one workload: stock verl, vLLM's `suffix`, verl's own asynchronous modes, and rhyme.

verl's GRPO trains a shipped policy on two replicas with published A100 step times (emulated_clock.py). Trainer, Ray,
router, engines, drafters and tokens are real; problems and seeds are the same in all cases. A batch has as many answers
as there are lanes. All times are divided by the dilation of the emulated clock. Engines with a drafter are charged the
host time for which an accelerator would wait; results are also given without it (*device only*).

The long-tail policy has templated problems. With `--workload gsm8k-noisy`, a policy that partly remembers GSM8K's
solutions is sampled at a temperature at which its answers repeat little, like those of that trace.

A round runs each chosen case once, one after the other on one machine; ratios are taken within a round. The result
file is written after each case and finished cases in it are kept, so that an interrupted benchmark can be resumed and
rounds can be added. Run by `make bench-e2e`.
"""

from __future__ import annotations

import itertools
import json
import signal
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.common.machine import commit, describe
from benchmarks.common.result_files import RESULTS, bars_table, console, write_result
from benchmarks.engines.best_suffix import DRAFTER_RESULT, best_suffix, suffix_config
from benchmarks.jobs.emulated_clock import LABEL, EmulatedTime
from benchmarks.jobs.gsm8k_policy import write_questions
from benchmarks.jobs.job_figures import EPOCH_STEPS, STOCK, bars_of, figures_by_round, summarize, table
from benchmarks.jobs.longtail_policy import MAX_ANSWER_TOKENS, SHIPPED_POLICY
from benchmarks.jobs.replica_job import ROLLOUT, SAMPLES, ReplicaJob, analyse
from examples.quickstart.policy import REPOSITORY
from examples.quickstart.problems import LONGTAIL, QUICKSTART, Task
from examples.quickstart.progress import json_lines
from examples.quickstart.quickstart import FP32_TRAINER

REPLICAS = 2
LANES = 64


def _batch_size(lanes: int) -> int:
    return REPLICAS * lanes // SAMPLES  # one answer per lane


BATCH_SIZE = _batch_size(LANES)
NUM_PROBLEMS = EPOCH_STEPS * BATCH_SIZE
EPOCHS = 5
DRAFT_ROOM = 128  # model length beyond the longest answer in tokens, so that no draft is cut short
COMMON = (
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16",
    f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=16",
    f"{ROLLOUT}.agent.num_workers=2",
    # A separate worker process would be a third, busy-waiting process on two cores.
    f"+{ROLLOUT}.engine_kwargs.vllm.distributed_executor_backend=uni",
)
NOISY_TEMPERATURE = 1.4  # the policy was sharpened by the reciprocal (gsm8k_policy.py)
HOST_TIME = "charged to engines with a drafter, as measured"  # results without it are not comparable
NO_DRAFTS = f"+{ROLLOUT}.custom.rhyme.spec.enabled=false"
THRESHOLD = "trainer.v1.sampler.max_off_policy_threshold"
WAIT = "trainer.v1.sampler.max_off_policy_strategy=wait"


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What a job trains on.

    Attributes:
        trace: shipped trace of this kind of text, by which `suffix` is tuned.
        policy: folder of the initial policy.
        max_prompt_tokens, max_answer_tokens: largest lengths.
        task: kind of problems; None: GSM8K's questions.
        overrides: additional verl (Hydra) overrides.
    """

    trace: str
    policy: Path
    max_prompt_tokens: int
    max_answer_tokens: int
    task: Task | None = None
    overrides: tuple[str, ...] = ()


WORKLOADS = {
    one.trace: one
    for one in (
        Workload(
            trace="longtail",
            policy=SHIPPED_POLICY,
            max_prompt_tokens=160,
            max_answer_tokens=MAX_ANSWER_TOKENS,
            task=LONGTAIL,
        ),
        Workload(
            trace="gsm8k-noisy",
            policy=REPOSITORY / "benchmarks/policies/gsm8k-epoch3",
            max_prompt_tokens=320,
            max_answer_tokens=400,
            overrides=(f"{ROLLOUT}.temperature={NOISY_TEMPERATURE}", "actor_rollout_ref.actor.optim.lr=1e-4"),
        ),
    )
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way to run the job.

    Attributes:
        mode: verl's trainer mode.
        rollout: `vllm` (stock) or `rhyme`.
        pipe: `pipe.max_age` for HistoPipe; None: verl's load balancer (see ReplicaJob).
        suffix: `speculative_config` of vLLM's `suffix` method; None: not used.
        replicas: number of replicas; one generates a batch in two waves.
        overrides: additional verl (Hydra) overrides.
    """

    mode: str
    rollout: str = "vllm"
    pipe: int | None = None
    suffix: dict[str, Any] | None = None
    replicas: int = REPLICAS
    overrides: tuple[str, ...] = ()

    def job(
        self,
        emulation: str,
        epochs: int,
        workload: Workload = WORKLOADS["longtail"],
        lanes: int = LANES,
        train_file: Path | None = None,
    ) -> ReplicaJob:
        """Return the job of this case; `train_file` has the questions of a workload without a task."""
        max_tokens = workload.max_prompt_tokens + workload.max_answer_tokens + DRAFT_ROOM
        lengths = (f"data.max_prompt_length={workload.max_prompt_tokens}", f"+{ROLLOUT}.max_model_len={max_tokens}")
        return ReplicaJob(
            mode=self.mode,
            rollout=self.rollout,
            pipe=self.pipe,
            replicas=self.replicas,
            lanes=lanes,
            batch_size=_batch_size(lanes),
            epochs=epochs,
            num_problems=EPOCH_STEPS * _batch_size(lanes),
            task=workload.task or QUICKSTART,  # of the validation problems
            train_file=train_file,
            policy=workload.policy,
            max_response_tokens=workload.max_answer_tokens,
            emulation=emulation,
            overrides=(*COMMON, *lengths, *workload.overrides, *self.overrides, *self.suffix_arguments()),
        )

    def suffix_arguments(self) -> tuple[str, ...]:
        """Return the overrides that turn vLLM's `suffix` on, if this case has it."""
        if self.suffix is None:
            return ()
        text = ",".join(f"{name}:{value}" for name, value in self.suffix.items())
        return (f"+{ROLLOUT}.engine_kwargs.vllm.speculative_config={{{text}}}",)


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
    for name in ("sync histospec", "sync rhyme"):
        found[f"{name}, 1 replica"] = replace(found[name], replicas=1)
    found["sync rhyme, float32 trainer"] = replace(found["sync rhyme"], overrides=(FP32_TRAINER,))
    for threshold in (2, 3):
        waiting = (WAIT, f"{THRESHOLD}={threshold}")
        found[f"colocate wait {threshold}"] = Case(mode="colocate_async", overrides=waiting)
    waiting = (WAIT, f"{THRESHOLD}=3")  # answers are at most 2 steps old
    found["separate stock"] = Case(mode="separate_async", overrides=waiting)
    found["separate rhyme"] = Case(mode="separate_async", rollout="rhyme", pipe=2, overrides=waiting)
    return found


def main(
    rounds: Annotated[int, typer.Option(min=1, help="Runs per case, interleaved.")] = 1,
    first_round: Annotated[int, typer.Option(min=1, help="Number of the first round; larger to add rounds.")] = 1,
    case: Annotated[list[str] | None, typer.Option(help="Run only this case (repeatable); see --list.")] = None,
    list_cases: Annotated[bool, typer.Option("--list", help="Print the cases and exit.")] = False,
    workload: Annotated[str, typer.Option(help="One of " + ", ".join(WORKLOADS) + ".")] = "longtail",
    questions: Annotated[Path | None, typer.Option(help="GSM8K's train.jsonl, for gsm8k-noisy.")] = None,
    lanes: Annotated[int, typer.Option(min=SAMPLES, help="Sequences that a replica runs concurrently.")] = LANES,
    model: Annotated[str, typer.Option(help="Model whose published step times are emulated.")] = "qwen2.5-7b",
    dilation: Annotated[
        float, typer.Option(min=0.1, help="Real seconds per emulated second, so that CPUs keep up.")
    ] = 4.0,
    epochs: Annotated[int, typer.Option(min=2, help=f"Epochs over {NUM_PROBLEMS} problems.")] = EPOCHS,
    drafter: Annotated[Path, typer.Option(help="Result of bench-drafter, for the best `suffix` settings.")] = (
        DRAFTER_RESULT
    ),
    out: Annotated[Path, typer.Option(help="Folder of the jobs' logs and records.")] = Path("runs"),
    result: Annotated[
        Path | None,
        typer.Option(help="Path of the result file; cases in it are not run again. Default: in results."),
    ] = None,
) -> None:
    """Run the cases in rounds and compare."""
    if workload not in WORKLOADS:
        raise typer.BadParameter(f"--workload {workload}: choose from {', '.join(WORKLOADS)}")
    chosen_workload, stem = WORKLOADS[workload], result_name(workload, lanes)
    out, path = out / stem, result or RESULTS / f"{stem}.json"
    if chosen_workload.task is None and questions is None and not list_cases:
        raise typer.BadParameter(f"--workload {workload} needs --questions")
    train_file = None
    try:
        best = best_suffix(workload, lanes, drafter)
        if chosen_workload.task is None and questions is not None:
            train_file = out / "questions.parquet"
            write_questions(questions, train_file, EPOCH_STEPS * _batch_size(lanes))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    known = cases(best)
    if list_cases:
        console.print("\n".join(known), highlight=False)
        return
    unknown = sorted(set(case or ()) - set(known))
    if unknown:
        raise typer.BadParameter(f"--case {unknown[0]}: choose from {', '.join(known)}")
    if not chosen_workload.policy.is_dir():
        raise typer.BadParameter(f"{chosen_workload.policy}: no policy here")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that `timeout` also ends the job's processes
    emulation = f"{model},{dilation:g}"
    chosen = [STOCK, *(name for name in case or known if name != STOCK)]  # every round needs the baseline
    settings = {
        "label": f"{LABEL} ({model})",
        "model": model,
        "host_time": HOST_TIME,
        "dilation": dilation,
        "workload": workload,
        "replicas": REPLICAS,
        "lanes": lanes,
        "batch_size": _batch_size(lanes),
        "samples": SAMPLES,
        "num_problems": EPOCH_STEPS * _batch_size(lanes),
        "epochs": epochs,
        "warmup_steps": EPOCH_STEPS,
        "suffix_best": best,
    }
    runs = _finished(path, settings)
    for number in range(first_round, first_round + rounds):
        for name in chosen:
            if any((run["round"], run["case"]) == (number, name) for run in runs):
                continue
            console.print(f"round {number}, {name} ...")
            started = time.monotonic()
            folder = folder_of(out, number, name)
            job = known[name].job(emulation, epochs, chosen_workload, lanes, train_file)
            job.run(folder, on_step=lambda line: console.print(f"  {line}", highlight=False))
            seconds = time.monotonic() - started
            found = _analysed(known[name], folder, lanes)
            runs.append({"round": number, "case": name, "commit": commit(), "wall_seconds": seconds, **found})
            _summarize(runs, settings, path)
    summary, bars = _summarize(runs, settings, path)
    console.print(table(summary, f"{workload}, two replicas of {lanes} lanes, {LABEL} ({model}), from epoch 2 on"))
    console.print(bars_table(bars))


def result_name(workload: str = "longtail", lanes: int = LANES) -> str:
    """Return the name of a workload's result file, without suffix, and of its folder of runs."""
    parts = ["end_to_end", *([workload] if workload != "longtail" else []), *([str(lanes)] if lanes != LANES else [])]
    return "_".join(parts).replace("-", "_")


def folder_of(out: Path, number: int, case: str) -> Path:
    """Return the folder of a case's run in a round."""
    return out / f"round-{number}" / case.replace(" ", "-").replace(",", "")


def _finished(result: Path, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the runs in the result file, which must have the same settings and machine."""
    if not result.is_file():
        return []
    content = json.loads(result.read_text(encoding="utf-8"))
    here = settings | {name: value for name, value in describe().items() if name in ("processor", "cpu_cores")}
    different = [name for name, value in here.items() if content.get(name) != value]
    if different:
        raise typer.BadParameter(f"{result}: has runs with another {different[0]}: name another file with --result")
    return content["runs"]


def _summarize(
    runs: list[dict[str, Any]], settings: dict[str, Any], result: Path
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Write the result file, and return the summary and the bars."""
    by_case = figures_by_round(runs, settings["dilation"])
    summary, bars = summarize(by_case), bars_of(by_case, result_name(settings["workload"], settings["lanes"]))
    write_result(result, {**settings, "bars": bars, "summary": summary, "runs": runs})
    return summary, bars


def _analysed(case: Case, folder: Path, lanes: int) -> dict[str, Any]:
    """Return a finished job's steps in real seconds, and what was emulated in each."""
    found = analyse(folder, case.mode, case.replicas, lanes, EPOCH_STEPS)
    ends = [found["started"] + step["got"] for step in found["steps"]]
    paths = sorted((folder / "times").glob("emulation-*.jsonl"))
    spans = list(itertools.pairwise([0.0, *ends]))
    for step, span in zip(found["steps"], spans, strict=True):
        step["host_seconds"] = most_charged(paths, *span)
    emulated = [emulated_between(paths, *span) for span in spans]
    return {**found, "asynchronous": is_asynchronous(paths), "emulated": emulated}


def emulated_between(paths: list[Path], start: float, end: float) -> dict[str, float]:
    """Return the sums of the replicas' emulations between two points in time (Unix seconds)."""
    sums = dict.fromkeys(vars(EmulatedTime()), 0)
    for path in paths:
        totals = json_lines(path)
        for time_, sign in ((start, -1), (end, 1)):
            line = next((line for line in reversed(totals) if line["time"] <= time_), {})
            sums = {name: value + sign * line.get(name, 0) for name, value in sums.items()}
    return sums


def most_charged(paths: list[Path], start: float, end: float) -> float:
    """Return the host seconds of the replica that was charged most, as a rule the one that the trainer waited for."""
    return max(emulated_between([path], start, end)["host_seconds"] for path in paths)


def is_asynchronous(paths: list[Path]) -> bool:
    """Return whether the engines scheduled asynchronously. Stock engines need not, because they are charged nothing."""
    return all(line["asynchronous"] for path in paths for line in json_lines(path))


if __name__ == "__main__":
    typer.run(main)
