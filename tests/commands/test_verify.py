"""`rhyme verify` finds nothing where nothing is, and finds planted distortions."""

import json
import math
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import typer
from scipy.stats import chi2, chi2_contingency, ncx2
from typer.testing import CliRunner

from examples.quickstart.policy import SHIPPED_POLICY
from examples.quickstart.problems import make_problem
from rhyme_verl.cli import app
from rhyme_verl.commands.verify.command import (
    ALPHA,
    Check,
    Findings,
    answer_undrafted,
    compare_drafted,
    is_near_tie,
    largest_gap,
    report,
    tolerance,
)
from rhyme_verl.commands.verify.engine import GreedyAnswer
from rhyme_verl.commands.verify.two_samples import POWER, Comparison, compare

QUESTIONS = [make_problem("test", 0, index).question for index in range(4)]
ENGINE = {"gpu_memory_utilization": 0.1}
CLEAN = Findings(
    greedy=8,
    identical=8,
    unexplained=0,
    logprob_gap=1e-6,
    noise_gap=1e-6,
    comparisons=[Comparison(0.4, 0.02), Comparison(0.6, 0.03)],
    verified=5000,
    accepted=2500,
)


def test_statistic_and_power_are_those_of_scipy():
    rng = np.random.default_rng(0)
    laws = rng.dirichlet([5.0] * 5, size=3)
    left, right = ([rng.choice(5, size, p=law).tolist() for law in laws] for size in (600, 400))
    tables = [[np.bincount(side, minlength=5) for side in pair] for pair in zip(left, right, strict=True)]
    statistic = sum(chi2_contingency(table, correction=False).statistic for table in tables)
    found = compare(left, right, ALPHA)
    assert found.p_value == pytest.approx(chi2.sf(statistic, 12))
    size = 3 * 600 * 400 / 1000
    noncentrality = 4.0 * found.detectable**2 * size
    assert ncx2.sf(chi2.isf(ALPHA, 12), 12, noncentrality) == pytest.approx(POWER)


def test_samples_of_one_distribution_have_uniform_p_values():
    rng = np.random.default_rng(1)
    law = rng.dirichlet([0.1] * 200)

    def draws(size):
        return [rng.choice(200, size, p=law).tolist() for _ in range(8)]

    p_values = np.array([compare(draws(500), draws(300), ALPHA).p_value for _ in range(100)])
    assert 0.4 < p_values.mean() < 0.6
    assert (p_values < 0.1).sum() < 25


def test_rare_tokens_count_as_one_and_a_single_token_tells_nothing():
    left, right = [0] * 90 + list(range(1, 31)), [0] * 80 + list(range(11, 41))
    as_one = [[min(token, 1) for token in side] for side in (left, right)]
    assert compare([left], [right], ALPHA) == compare([as_one[0]], [as_one[1]], ALPHA)
    assert compare([[1] * 50], [[1] * 50], ALPHA) is None


def test_answers_may_part_only_at_a_near_tie():
    left = GreedyAnswer([5, 6, 7], [{5: -0.1}, {6: -0.5, 8: -0.7, 9: -2.0}, {7: -0.3}])
    other = GreedyAnswer([5, 8, 7], [{5: -0.4}, {8: -0.1}, {7: -9.0}])
    assert largest_gap(left, other) == pytest.approx(0.3), "only of the common beginning"
    assert is_near_tie(left, left, 0.0)
    assert is_near_tie(left, other, 0.21)
    assert not is_near_tie(left, other, 0.19)
    assert not is_near_tie(left, replace(other, tokens=[5, 9, 7]), 1.0)
    assert not is_near_tie(left, replace(other, tokens=[5, 1, 7]), 1.0), "not even among the most probable tokens"
    assert not is_near_tie(left, GreedyAnswer([5, 6], left.logprobs[:2]), 1.0), "it ends early"
    broken = replace(other, logprobs=[{5: float("nan")}, *other.logprobs[1:]])
    assert math.isnan(largest_gap(left, broken))


@pytest.mark.parametrize(
    ("change", "exit_code"),
    [
        ({}, 0),
        ({"unexplained": 1}, 1),
        ({"identical": 7}, 0),
        ({"logprob_gap": 0.9e-3}, 0),
        ({"logprob_gap": 0.1}, 1),
        ({"logprob_gap": float("nan")}, 1),
        ({"logprob_gap": 0.1, "noise_gap": 0.06}, 0),
        ({"comparisons": [Comparison(0.4 * ALPHA, 0.02), Comparison(0.5, 0.02)]}, 1),
        ({"comparisons": [Comparison(0.6 * ALPHA, 0.02), Comparison(0.5, 0.02)]}, 0),
        ({"verified": 900, "accepted": 300}, 2),
        ({"verified": 0, "accepted": 0}, 2),
        ({"accepted": 4600}, 2),
        ({"accepted": 4600, "unexplained": 1}, 1),
    ],
)
def test_the_verdict(change, exit_code):
    found = replace(CLEAN, **change)
    assert found.exit_code == exit_code
    assert report(found)[-1].startswith(("no difference", "a difference", "inconclusive")[exit_code])


def test_bad_options_are_refused_before_an_engine_starts(tmp_path):
    blank, binary = tmp_path / "blank.txt", tmp_path / "binary.txt"
    blank.write_text("\n  \n", encoding="utf-8")
    binary.write_bytes(b"\xff\xfe")
    for arguments, message in (
        (("--engine-kwargs", "dtype=float32"), "--engine-kwargs: give a JSON object"),
        (("--engine-kwargs", "[]"), "--engine-kwargs: give a JSON object"),
        (("--engine-kwargs", '{"seed": 1}'), "--engine-kwargs: rhyme verify sets seed itself"),
        (("--prompts", blank), "has no prompts: give one per line"),
        (("--prompts", binary), "is not UTF-8"),
    ):
        result = CliRunner().invoke(app, ["verify", "no-model", *map(str, arguments)])
        assert result.exit_code == 2
        assert message in " ".join(result.output.replace("│", " ").split())


# At temperature 1 the policy is nearly certain of its tokens; at 2 a tenth of the temperature makes a difference.
PLANTED = Check(
    model=str(SHIPPED_POLICY),
    texts=[f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n" for question in QUESTIONS],
    samples=2048,
    tokens=64,
    sampling={"temperature": 2.0},
    engine_kwargs=ENGINE,
)


@pytest.mark.engine
def test_a_model_that_does_not_load_is_no_difference(tmp_path):
    result = CliRunner().invoke(app, ["verify", str(tmp_path)])
    assert result.exit_code == 2
    assert "nothing was compared" in result.output


@pytest.mark.engine
def test_a_prompt_that_is_too_long_is_refused():
    with pytest.raises(typer.BadParameter, match="--prompts: the longest one has .* raise max_model_len"):
        answer_undrafted(replace(PLANTED, engine_kwargs=ENGINE | {"max_model_len": PLANTED.tokens}))


@pytest.mark.slow
@pytest.mark.engine
def test_the_command_finds_no_difference(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("\n".join([*QUESTIONS, "", QUESTIONS[0]]), encoding="utf-8")
    sampling = ["--temperature", "2", "--top-p", "0.95", "--top-k", "100"]
    arguments = ["--prompts", path, "--samples", "512", "--tokens", "64", "--engine-kwargs", json.dumps(ENGINE)]
    result = subprocess.run(
        [sys.executable, "-m", "rhyme_verl.cli", "verify", SHIPPED_POLICY, *sampling, *arguments],
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    lines = result.stdout.splitlines()[-6:]
    assert lines[0].startswith("greedy answers: 4 of 4 identical"), "blank and repeated lines are left out"
    assert lines[-1] == "no difference found"


@pytest.fixture(scope="module")
def undrafted():
    return answer_undrafted(PLANTED)


@pytest.mark.engine
@pytest.mark.slow
def test_a_tenth_of_the_temperature_is_found(undrafted):
    found = compare_drafted(replace(PLANTED, sampling={"temperature": 1.8}), undrafted)
    assert found.identical == found.greedy == len(QUESTIONS)
    assert found.logprob_gap < tolerance(found.noise_gap)
    assert found.p_value < ALPHA, report(found)
    assert found.exit_code == 1


@pytest.mark.engine
@pytest.mark.slow
def test_a_sampler_that_accepts_one_token_too_many_is_found(undrafted, monkeypatch):
    from vllm.v1.sample import rejection_sampler

    exact = rejection_sampler.rejection_sample

    def accept_one_too_many(draft_token_ids, num_draft_tokens, *args, **kwargs):
        output = exact(draft_token_ids, num_draft_tokens, *args, **kwargs)
        for row, draft in zip(output, draft_token_ids.split(num_draft_tokens), strict=True):
            rejected = (row[: len(draft)] != draft).nonzero()
            if len(rejected):
                row[rejected[0]] = draft[rejected[0]]
        return output

    monkeypatch.setattr(rejection_sampler, "rejection_sample", accept_one_too_many)
    found = compare_drafted(replace(PLANTED, samples=256), undrafted)
    assert found.unexplained > 0, report(found)
    assert found.p_value < ALPHA, report(found)
    assert found.exit_code == 1
