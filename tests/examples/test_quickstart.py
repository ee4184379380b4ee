"""The quickstart task, tokenizer and shipped policy keep their promises."""

import operator
import re

import numpy as np
import pytest

from benchmarks.jobs.longtail_policy import HYPERPARAMETERS as LONGTAIL_HYPERPARAMETERS
from benchmarks.jobs.longtail_policy import MAX_ANSWER_TOKENS
from benchmarks.jobs.longtail_policy import SHIPPED_POLICY as LONGTAIL_POLICY
from examples.quickstart.evaluation import is_correct
from examples.quickstart.policy import SHIPPED_POLICY, is_current
from examples.quickstart.problems import LONGTAIL, make_problem, make_row, write_parquet
from examples.quickstart.tokenizer import build_tokenizer

OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


@pytest.fixture(scope="module")
def problems():
    return [make_problem("train", 0, index) for index in range(1000)]


def test_a_problem_depends_only_on_split_seed_and_index():
    assert make_problem("train", 0, 7) == make_problem("train", 0, 7)
    variants = [("train", 0, 7), ("test", 0, 7), ("train", 1, 7), ("train", 0, 8)]
    assert len({make_problem(*variant).question for variant in variants}) == 4


@pytest.fixture(scope="module")
def longtail_problems():
    return [make_problem("train", 0, index, LONGTAIL) for index in range(1000)]


def test_every_answer_line_is_right_and_continues_the_story(problems, longtail_problems):
    for problem in problems + longtail_problems:
        owned = int(re.match(r"\w+ has (\d+) ", problem.question).group(1))
        product = None  # of a "k boxes with b each" line, which the next line adds or takes
        for line in problem.answer.splitlines():
            for a, op, b, c in re.findall(r"(\d+) ([-+*/]) (\d+) = (\d+)", line):
                assert OPERATORS[op](int(a), int(b)) == int(c)
                if "heck" in line:
                    continue
                if "all of them" in line or "we count" in line:
                    product = int(c)
                    continue
                assert int(a) == owned
                assert product in (None, int(b))
                product, owned = None, int(c)
        assert problem.answer.endswith(f"\n#### {owned}")
        assert problem.ground_truth == str(owned)


def test_rows_have_verls_gsm8k_schema(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    write_parquet(tmp_path / "test.parquet", "test", 3, 5)
    rows = parquet.read_table(tmp_path / "test.parquet").to_pylist()
    assert rows == [make_row("test", 3, index) for index in range(5)]
    assert list(rows[4]) == ["data_source", "prompt", "ability", "reward_model", "extra_info"]
    assert rows[4]["data_source"] == "openai/gsm8k"
    assert rows[4]["extra_info"]["index"] == 4
    assert rows[4]["prompt"] == [{"role": "user", "content": rows[4]["extra_info"]["question"]}]


def test_verls_reward_agrees_with_the_reference_and_with_our_rule(problems):
    reward_score = pytest.importorskip("verl.utils.reward_score")
    for problem in problems[:50]:
        wrong = problem.answer.rpartition(" ")[0] + f" {int(problem.ground_truth) + 1}"
        unfinished = problem.answer.rpartition("\n")[0]
        for answer, score in ((problem.answer, 1.0), (wrong, 0.0), (unfinished, 0.0)):
            assert reward_score.default_compute_score("openai/gsm8k", answer, problem.ground_truth) == score
            assert is_correct(answer, problem.ground_truth) == (score == 1.0)


def test_tokenizer_is_small_lossless_and_splits_digits(tokenizer, problems):
    assert len(tokenizer) < 400
    for problem in problems:
        text = f"{problem.question}\n{problem.answer}"
        ids = tokenizer.encode(text)
        assert tokenizer.unk_token_id not in ids
        assert tokenizer.decode(ids) == text
    assert tokenizer.tokenize("\n#### 427") == ["\n", "####", " ", "4", "2", "7"]


def test_unseen_text_becomes_unk_without_an_error(tokenizer):
    ids = tokenizer.encode("Natalia's café sold 48/2 = <<48/2=24>>24 clips\tin May… 漢字")
    assert tokenizer.unk_token_id in ids
    assert max(ids) < len(tokenizer)


def test_chat_template_serves_verls_turn_handling(tokenizer):
    verl_tokenizer = pytest.importorskip("verl.utils.tokenizer")
    from verl.utils.tokenizer.chat_template import initialize_system_prompt, initialize_turn_separator
    from verl.utils.tokenizer.continuous_token import QwenContinuousTokenBuilder

    chat = [{"role": "user", "content": "Anna has 42 apples."}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=True)
    ids = verl_tokenizer.normalize_token_ids(ids)
    assert tokenizer.decode(ids) == ("<|im_start|>user\nAnna has 42 apples.<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.unk_token_id not in ids
    assert initialize_system_prompt(tokenizer) == []
    assert initialize_turn_separator(tokenizer) == tokenizer.encode("\n")
    assert QwenContinuousTokenBuilder(tokenizer).build_initial_tokens(chat) == ids


def test_reference_answers_have_a_long_tail(tokenizer, problems):
    lengths = np.array([len(tokenizer.encode(problem.answer)) + 1 for problem in problems])
    assert lengths.mean() >= 100
    assert np.percentile(lengths, 99) / np.median(lengths) >= 3
    assert lengths.max() < 400


def test_shipped_policy_is_current_and_uses_this_tokenizer(tokenizer, problems):
    from transformers import AutoTokenizer

    assert is_current(SHIPPED_POLICY), "run: python -m examples.quickstart.policy"
    shipped = AutoTokenizer.from_pretrained(SHIPPED_POLICY)
    assert shipped.get_vocab() == tokenizer.get_vocab()
    assert shipped.encode(problems[0].answer) == tokenizer.encode(problems[0].answer)
    assert shipped.chat_template == tokenizer.chat_template
    assert (shipped.eos_token, shipped.pad_token) == ("<|im_end|>", "<|endoftext|>")


def test_long_tail_answers_have_a_long_tail(longtail_problems):
    tokenizer = build_tokenizer(LONGTAIL)
    lengths = np.array([len(tokenizer.encode(problem.answer)) + 1 for problem in longtail_problems])
    assert 80 <= np.median(lengths) <= 120
    assert np.percentile(lengths, 99) / np.median(lengths) >= 8
    assert (lengths > MAX_ANSWER_TOKENS).mean() < 0.01
    careful = np.array(["heck every step" in problem.answer for problem in longtail_problems])
    assert 0.25 < careful.mean() < 0.35
    checks = [problem.answer.count("heck") for problem in longtail_problems]
    sums = [problem.answer.count(" = ") for problem in longtail_problems]
    assert all(c == (1 + s // 2 if is_careful else 0) for c, s, is_careful in zip(checks, sums, careful, strict=True))


def test_shipped_long_tail_policy_is_current():
    assert is_current(LONGTAIL_POLICY, LONGTAIL_HYPERPARAMETERS), "run: python -m benchmarks.jobs.longtail_policy"
    assert (LONGTAIL_POLICY / "model.safetensors").stat().st_size < 4e6
