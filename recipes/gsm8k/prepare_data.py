"""Writes GSM8K as verl's trainer reads it: train.parquet and test.parquet, with rows as from verl's preprocessing.

Reads from the Hugging Face hub, or from a folder with the data set's own train.jsonl and test.jsonl.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

import datasets
import typer

HUB_NAME = "openai/gsm8k"  # verl also selects its reward function by this name
INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
SPLITS = ("train", "test")


def final_answer(worked_answer: str) -> str:
    """Return the number after `####`, without its thousands separators.

    Raises:
        ValueError: there is no such number.
    """
    found = re.search(r"#### *(-?[\d.,]+)", worked_answer)
    if found is None:
        raise ValueError(f"no '#### <number>' in the answer {worked_answer!r}")
    return found.group(1).replace(",", "")


def verl_row(example: dict[str, str], index: int, split: str) -> dict[str, Any]:
    """Return the row of one question."""
    return {
        "data_source": HUB_NAME,
        "prompt": [{"role": "user", "content": f"{example['question']} {INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": final_answer(example["answer"])},
        "extra_info": {"split": split, "index": index, **example},
    }


def main(
    out: Annotated[Path, typer.Option(help="Folder to write to; created if missing.")] = Path("~/data/gsm8k"),
    local: Annotated[Path | None, typer.Option(help="Folder with train.jsonl and test.jsonl.")] = None,
    max_train: Annotated[int | None, typer.Option(min=1, help="Maximum number of training questions.")] = None,
) -> None:
    """Write train.parquet and test.parquet, from --local if given, else from the hub."""
    if local is None:
        data = datasets.load_dataset(HUB_NAME, "main")
    else:
        data = datasets.load_dataset("json", data_files={split: str(local / f"{split}.jsonl") for split in SPLITS})
    out = out.expanduser()
    out.mkdir(parents=True, exist_ok=True)
    for split in SPLITS:
        questions = data[split]
        if split == "train" and max_train is not None:
            questions = questions.select(range(min(max_train, len(questions))))
        rows = questions.map(
            verl_row, with_indices=True, fn_kwargs={"split": split}, remove_columns=questions.column_names
        )
        rows.to_parquet(out / f"{split}.parquet")
        typer.echo(f"wrote {len(rows)} rows to {out / f'{split}.parquet'}")


if __name__ == "__main__":
    typer.run(main)
