"""Writes DAPO-Math-17k and AIME 2024 as verl's trainer reads them, with every problem once.

The published files contain every problem many times, so that a pass over them would be many epochs; here, an epoch is
one group per problem. Reads from the Hugging Face hub, or from local files with the same columns.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import datasets
import typer

HUB_NAMES = {"train": "BytedTsinghua-SIA/DAPO-Math-17k", "test": "BytedTsinghua-SIA/AIME-2024"}
COLUMNS = ("data_source", "prompt", "ability", "reward_model")


def first_of_each(prompts: Iterable[list[dict[str, str]]]) -> list[int]:
    """Return the position of each prompt's first occurrence, in order."""
    first: dict[str, int] = {}
    for position, messages in enumerate(prompts):
        first.setdefault("\n".join(message["content"] for message in messages), position)
    return list(first.values())


def load(split: str, local: Path | None) -> Any:
    """Return each problem of a split once, with the columns that verl needs.

    Raises:
        ValueError: a column is missing.
    """
    if local is None:
        rows = datasets.load_dataset(HUB_NAMES[split], split="train")  # their only split
    else:
        rows = datasets.load_dataset(
            "parquet" if local.suffix == ".parquet" else "json", data_files=str(local), split="train"
        )
    if missing := [name for name in COLUMNS if name not in rows.column_names]:
        raise ValueError(
            f"{local or HUB_NAMES[split]}: column {missing[0]} is missing; required are {', '.join(COLUMNS)}"
        )
    rows = rows.select(first_of_each(rows["prompt"])).select_columns(COLUMNS)
    return rows.map(lambda _, index: {"extra_info": {"split": split, "index": index}}, with_indices=True)


def main(
    out: Annotated[Path, typer.Option(help="Folder to write to; created if missing.")] = Path("~/data/dapo"),
    train: Annotated[Path | None, typer.Option(help="Training problems (.parquet, .jsonl).")] = None,
    test: Annotated[Path | None, typer.Option(help="Test problems (.parquet, .jsonl).")] = None,
) -> None:
    """Write train.parquet and test.parquet; data that is not given comes from the hub."""
    out = out.expanduser()
    out.mkdir(parents=True, exist_ok=True)
    for split, local in (("train", train), ("test", test)):
        rows = load(split, local)
        rows.to_parquet(out / f"{split}.parquet")
        typer.echo(f"wrote {len(rows)} rows to {out / f'{split}.parquet'}")


if __name__ == "__main__":
    typer.run(main)
