"""Records one of the shipped traces: a verl job in `sync` mode on one replica, with the greedy bit of every token.

rhyme writes the trace (`custom.rhyme.trace`), and the servers record which sampled tokens were the most probable ones.
The two are joined by weights version, prompt and tokens. Drafts change neither. The policy after the third epoch, whose
rollouts are the fourth epoch, is kept for benchmarks.engines.rollout. The commands are in traces/README.md.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import pyarrow as pa
import typer

from benchmarks.common.result_files import console
from benchmarks.jobs.gsm8k_policy import write_questions
from benchmarks.jobs.longtail_policy import MAX_ANSWER_TOKENS
from benchmarks.jobs.longtail_policy import SHIPPED_POLICY as LONGTAIL_POLICY
from benchmarks.jobs.replica_job import ROLLOUT, ReplicaJob
from examples.quickstart.job import CPU_ENVIRONMENT
from examples.quickstart.policy import SHIPPED_POLICY as QUICKSTART_POLICY
from examples.quickstart.problems import LONGTAIL, QUICKSTART, Task
from examples.quickstart.progress import json_lines
from rhyme_verl.telemetry.trace import SCHEMA, read_trace, write_trace

HERE = Path(__file__).parents[1]
POLICY_EPOCHS = 3  # epochs after which the policy is kept
BATCH_SIZE = 16
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a trace is made.

    Attributes:
        policy: folder of the initial policy; None: given on the command line.
        task: kind of problems; None: GSM8K questions.
        num_problems: number of prompts, with 8 answers each per epoch.
        max_response_tokens: maximum tokens per answer.
        learning_rate: learning rate of verl's GRPO.
        keeps_policy: whether the policy after POLICY_EPOCHS is kept.
    """

    policy: Path | None
    task: Task | None
    num_problems: int
    epochs: int = 4
    max_response_tokens: int
    learning_rate: float = 2e-4
    keeps_policy: bool = True


RECIPES = {
    "quickstart": Recipe(policy=QUICKSTART_POLICY, task=QUICKSTART, num_problems=64, epochs=6, max_response_tokens=400),
    "longtail": Recipe(
        policy=LONGTAIL_POLICY,
        task=LONGTAIL,
        num_problems=96,
        max_response_tokens=MAX_ANSWER_TOKENS,
    ),
    "gsm8k": Recipe(policy=None, task=None, num_problems=64, max_response_tokens=400, learning_rate=1e-4),
    "gsm8k-noisy": Recipe(
        policy=None, task=None, num_problems=64, max_response_tokens=400, learning_rate=1e-4, keeps_policy=False
    ),
}


def main(
    name: Annotated[str, typer.Argument(help="Name of the trace: " + ", ".join(RECIPES) + ".")],
    policy: Annotated[
        Path | None, typer.Option(help="Folder of the policy (GSM8K: from benchmarks.jobs.gsm8k_policy).")
    ] = None,
    questions: Annotated[Path | None, typer.Option(help="GSM8K's train.jsonl, for the GSM8K traces.")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="Overrides the recipe's learning rate.")] = None,
    out: Annotated[Path, typer.Option(help="Output folder of the run.")] = Path("runs/record"),
    traces: Annotated[Path, typer.Option(help="Output folder of <name>.parquet.")] = HERE / "traces",
    policies: Annotated[Path, typer.Option(help="Output folder of the policy.")] = HERE / "policies",
) -> None:
    """Run the job and write its trace."""
    if name not in RECIPES:
        raise typer.BadParameter(f"{name}: choose from {', '.join(RECIPES)}")
    recipe = RECIPES[name]
    if learning_rate is not None:
        recipe = replace(recipe, learning_rate=learning_rate)
    source = policy or recipe.policy
    if source is None or (recipe.task is None and questions is None):
        raise typer.BadParameter(f"{name} needs --policy and --questions")
    if not (source / "model.safetensors").is_file():
        raise typer.BadParameter(f"{source}: no policy here")
    folder = (out / name).resolve()
    train_file = None
    if recipe.task is None:
        train_file = out / f"{name}-questions.parquet"
        try:
            write_questions(questions, train_file, recipe.num_problems)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
    save_step = POLICY_EPOCHS * recipe.num_problems // BATCH_SIZE
    job = ReplicaJob(
        mode="sync",
        replicas=1,
        lanes=128,
        batch_size=BATCH_SIZE,
        epochs=recipe.epochs,
        num_problems=recipe.num_problems,
        task=recipe.task or QUICKSTART,
        train_file=train_file,
        policy=source,
        max_response_tokens=recipe.max_response_tokens,
        greedy=True,
        overrides=(
            "data.max_prompt_length=320" if recipe.task is None else "data.max_prompt_length=160",
            f"actor_rollout_ref.actor.optim.lr={recipe.learning_rate}",
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16",
            f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=32",
            f"+{ROLLOUT}.custom.rhyme.trace.path={folder / 'trace'}",
            f"trainer.save_freq={save_step if recipe.keeps_policy else -1}",
        ),
    )
    job.run(folder, on_step=lambda line: console.print(line, highlight=False))
    table = with_greedy_bits(read_trace(folder / "trace"), folder / "times")
    traces.mkdir(parents=True, exist_ok=True)
    write_trace(traces / f"{name}.parquet", table)
    console.print(f"wrote {traces / f'{name}.parquet'}: {table.num_rows} answers")
    if recipe.keeps_policy:
        keep_policy(folder / f"checkpoints/global_step_{save_step}/actor", source, policies / f"{name}-epoch3")


def with_greedy_bits(trace: pa.Table, times: Path) -> pa.Table:
    """Return the trace with the column `greedy` filled from the servers' records.

    Raises:
        ValueError: the servers' records lack an answer of the trace.
    """
    known: dict[tuple[int, int, tuple[int, ...]], list[bool]] = {}  # by weights version, prompt key and tokens
    for path in sorted(times.glob("answers-*.jsonl")):
        for line in json_lines(path):
            known[line["step"], line["key"], tuple(line["tokens"])] = line["greedy"]
    rows = trace.to_pylist()
    for row in rows:
        row["greedy"] = known.get((row["step"], row["prompt_key"], tuple(row["tokens"])))
        if row["greedy"] is None and not row["validate"]:
            raise ValueError(f"{times}: no server gave the answer {row['sample']} to {row['prompt_key']:x}")
    return pa.Table.from_pylist(rows, schema=SCHEMA)


def keep_policy(checkpoint: Path, source: Path, target: Path) -> None:
    """Convert a checkpoint to a Hugging Face folder with verl's merger and the source policy's tokenizer."""
    shutil.rmtree(target, ignore_errors=True)
    merge = ["merge", "--backend", "fsdp", "--local_dir", str(checkpoint), "--target_dir", str(target)]
    command = [sys.executable, "-m", "verl.model_merger", *merge]
    subprocess.run(command, check=True, env={**os.environ, **CPU_ENVIRONMENT})
    for file in TOKENIZER_FILES:
        shutil.copy(source / file, target)
    console.print(f"wrote {target}")


if __name__ == "__main__":
    typer.run(main)
