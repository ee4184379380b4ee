"""Writes model folders with the shapes of Qwen2.5 models but without weights, to measure the cost of their steps.

vLLM fills them with random weights (`load_format="dummy"`). The tokenizer is the quickstart policy's, so nothing is
downloaded; the benchmarks use token ids only.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated, Any

import typer
from transformers import Qwen2Config

TOKENIZER = Path(__file__).parents[2] / "examples/quickstart/policy"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
SHAPES: dict[str, dict[str, Any]] = {
    "qwen2.5-0.5b": {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "qwen2.5-7b": {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
        "tie_word_embeddings": False,
    },
}


def write(out: Path, name: str) -> Path:
    """Write the folder of one of SHAPES below `out` and return it."""
    folder = out / name
    folder.mkdir(parents=True, exist_ok=True)
    for file in TOKENIZER_FILES:
        shutil.copy(TOKENIZER / file, folder)
    config = Qwen2Config(
        architectures=["Qwen2ForCausalLM"],
        dtype="bfloat16",
        max_position_embeddings=32768,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        **SHAPES[name],
    )
    config.tokenizer_class = "PreTrainedTokenizerFast"  # see examples/quickstart/tokenizer.py
    config.save_pretrained(folder)
    return folder


def main(out: Annotated[Path, typer.Argument(help="Output folder; created if missing.")]) -> None:
    """Write one folder per shape."""
    for name in SHAPES:
        typer.echo(f"wrote {write(out, name)}")


if __name__ == "__main__":
    typer.run(main)
