"""Trains a small policy on real GSM8K solutions; its rollouts are the real-text traces.

A Qwen2 model of 3.7M parameters with random initial weights learns part of the published solutions, so that it writes
real sentences and solves some of the questions it was trained on. The calculator annotations (`<<48/2=24>>`) are
removed, because language models do not write them. A checkpoint from before the text is memorised is sharpened and
becomes the policy: large models after RL and instruction tuning are about as certain of their next token. An earlier
checkpoint, not sharpened, yields the noisy trace. Needs GSM8K's train.jsonl (github.com/openai/grade-school-math, MIT).
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated

import pyarrow as pa
import pyarrow.parquet as pq
import torch
import typer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from examples.quickstart.policy import Hyperparameters, encode_example, save, train
from examples.quickstart.tokenizer import CHAT_TEMPLATE, EOS, PAD, START, UNK

VOCABULARY = 1024
NOISY_STEP, POLICY_STEP = 1152, 1280  # training steps of the two checkpoints
TEMPERATURE = 0.7  # the policy samples at 1.0 what the checkpoint of POLICY_STEP samples at this
ANNOTATION = re.compile(r"<<.*?>>")
HYPERPARAMETERS = Hyperparameters(
    hidden_size=256,
    intermediate_size=640,
    num_layers=5,
    num_heads=8,
    num_kv_heads=4,
    num_problems=1536,
    num_steps=1728,
    num_threads=1,
    bf16=True,
)


def read_solutions(path: Path) -> list[tuple[str, str]]:
    """Return (question, solution without annotations) per line.

    Raises:
        ValueError: the file is missing, or a line (named in the message) is not a GSM8K problem.
    """
    if not path.is_file():
        raise ValueError(f"{path}: no such file: pass GSM8K's train.jsonl")
    problems = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            row = json.loads(line)
            problems.append((row["question"], ANNOTATION.sub("", row["answer"])))
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(f"{path}:{number}: not a GSM8K problem ({error!r})") from None
    return problems


def build_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer with VOCABULARY tokens, single digits and the quickstart's chat template."""
    special = [AddedToken(token, special=True, normalized=False) for token in (PAD, START, EOS, UNK)]
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=EOS,
        pad_token=PAD,
        unk_token=UNK,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
    )


def make_row(index: int, question: str, answer: str) -> dict:
    """Return a question as a row of verl's GSM8K schema."""
    return {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": question}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": answer.rpartition("#### ")[2].replace(",", "")},
        "extra_info": {"split": "train", "index": index, "question": question, "answer": answer},
    }


def write_questions(data: Path, out: Path, num_questions: int) -> None:
    """Write the first questions of the policy's training set as verl training data."""
    rows = [make_row(index, *problem) for index, problem in enumerate(read_solutions(data)[:num_questions])]
    out.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), out)


def main(
    data: Annotated[Path, typer.Argument(help="GSM8K's train.jsonl.")],
    out: Annotated[Path, typer.Option(help="Output folder of the policies `policy` and `noisy`.")] = Path(
        "runs/gsm8k-policy"
    ),
) -> None:
    """Train both policies."""
    try:
        problems = read_solutions(data)[: HYPERPARAMETERS.num_problems]
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    tokenizer = build_tokenizer([text for problem in problems for text in problem])
    examples = [encode_example(tokenizer, question, answer) for question, answer in problems]
    train(HYPERPARAMETERS, tokenizer, examples, {NOISY_STEP: out / "noisy", POLICY_STEP: out / "checkpoint"})
    sharpen(out / "checkpoint", out / "policy", tokenizer)
    typer.echo(f"wrote {out / 'noisy'} and {out / 'policy'}")


def sharpen(source: Path, target: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """Scale the logits of `source`, so that `target` samples at temperature 1.0 what it samples at TEMPERATURE."""
    model = Qwen2ForCausalLM.from_pretrained(source, dtype=torch.float32)
    model.model.norm.weight.data /= TEMPERATURE
    save(target, model, tokenizer)


if __name__ == "__main__":
    typer.run(main)
