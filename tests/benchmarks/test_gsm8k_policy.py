"""The data of the real-text policy, and the join of recorded traces with the greedy bits of the servers."""

import json

import pyarrow as pa
import pytest

from benchmarks.jobs.gsm8k_policy import build_tokenizer, make_row, read_solutions
from benchmarks.jobs.record_trace import with_greedy_bits
from rhyme_verl.telemetry.trace import SCHEMA

PUBLISHED = {
    "question": "A robe takes 2 bolts of blue fiber and half that much white fiber. How many bolts in total?",
    "answer": "It takes 2/2=<<2/2=1>>1 bolt of white fiber.\nSo the total is 2+1=<<2+1=3>>3 bolts.\n#### 1,003",
}


def test_solutions_lose_their_calculator_annotations(tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_text(json.dumps(PUBLISHED) + "\n", encoding="utf-8")
    [(question, answer)] = read_solutions(path)
    assert question == PUBLISHED["question"]
    assert answer == "It takes 2/2=1 bolt of white fiber.\nSo the total is 2+1=3 bolts.\n#### 1,003"
    row = make_row(0, question, answer)
    assert row["reward_model"]["ground_truth"] == "1003"
    assert row["prompt"] == [{"role": "user", "content": question}]


@pytest.mark.parametrize("second", ["{", '{"question": "Why?"}', "[1, 2]"])
def test_a_malformed_line_is_named(tmp_path, second):
    path = tmp_path / "train.jsonl"
    path.write_text(json.dumps(PUBLISHED) + "\n" + second + "\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"train\.jsonl:2: not a GSM8K problem") as error:
        read_solutions(path)
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="no-such.jsonl: no such file"):
        read_solutions(tmp_path / "no-such.jsonl")


def test_the_tokenizer_is_lossless_and_splits_digits():
    tokenizer = build_tokenizer([PUBLISHED["question"], PUBLISHED["answer"]] * 3)
    text = "The total is 1234 bolts,\nmore or less: café."
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.tokenize("427") == ["4", "2", "7"]
    assert len(tokenizer.encode("\n")) == 1  # verl's turn handling needs that


def test_greedy_bits_are_joined_by_weights_prompt_and_tokens(tmp_path):
    def row(key, tokens, validate=False, step=0):
        return {
            "step": step, "epoch": 1, "prompt_key": key, "sample": 0, "prompt": [9], "tokens": tokens, "reward": 1.0,
            "length": len(tokens), "validate": validate,
        }  # fmt: skip

    lines = [
        {"step": 0, "key": 7, "tokens": [1, 2], "greedy": [True, False]},
        {"step": 1, "key": 7, "tokens": [1, 2], "greedy": [True, True]},
        {"step": 0, "key": 8, "tokens": [1], "greedy": [True]},
    ]
    (tmp_path / "answers-0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    rows = [row(8, [1]), row(7, [1, 2]), row(7, [1, 2], step=1), row(7, [5], validate=True)]
    trace = pa.Table.from_pylist(rows, schema=SCHEMA)
    assert with_greedy_bits(trace, tmp_path)["greedy"].to_pylist() == [[True], [True, False], [True, True], None]
    unknown = pa.Table.from_pylist([row(8, [2])], schema=SCHEMA)
    with pytest.raises(ValueError, match="no server gave"):
        with_greedy_bits(unknown, tmp_path)
