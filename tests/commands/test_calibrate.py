"""Calibration: the costs of an engine come out as they are, and the table is one that plans are made with."""

import json

import pytest
from typer.testing import CliRunner

from rhyme_verl.cli import app
from rhyme_verl.commands.calibrate import Points, measure, powers_of_two
from rhyme_verl.histopipe.replica_cost import load


class Clockwork:
    """An engine whose steps cost 2 ms, 0.1 ms a sequence and 1 us a token of context, and prefill 20 us a token."""

    vocabulary = 100

    def seconds(self, prompts, tokens):
        context = len(prompts[0])
        assert all(0 <= token < self.vocabulary for prompt in prompts for token in prompt)
        step = 2e-3 + 1e-4 * len(prompts) + 1e-6 * context * len(prompts)
        return 20e-6 * context * len(prompts) + 0.5 + (tokens - 1) * step


def test_costs_come_out_as_they_are(tmp_path):
    content = measure(Clockwork(), Points(running=[1, 2, 8], contexts=[100, 300], steps=16, repeats=2))
    assert content["ms"] == pytest.approx([2 + 0.1 * b + 0.2 * b for b in (1, 2, 8)])
    assert content["prefill_us_per_token"] == pytest.approx(20.0)
    assert [len(runs) for runs in content["ms_by_context"]["300"]] == [2, 2, 2]
    path = tmp_path / "step_cost.json"
    path.write_text(json.dumps(content))
    measured = load(path)
    assert measured.table(8).seconds[[1, 2, 8]] == pytest.approx([2.3e-3, 2.6e-3, 4.4e-3])
    assert measured.prefill_seconds_per_token == pytest.approx(2e-5)


def test_numbers_of_sequences_are_powers_of_two_and_the_most():
    assert powers_of_two(1) == [1]
    assert powers_of_two(8) == [1, 2, 4, 8]
    assert powers_of_two(48) == [1, 2, 4, 8, 16, 32, 48]


def test_bad_engine_arguments_are_refused_before_an_engine_starts():
    for text in ("tensor_parallel_size=2", "3"):
        result = CliRunner().invoke(app, ["calibrate", "no-model", "--engine-kwargs", text])
        assert result.exit_code == 2
        assert "--engine-kwargs: give a JSON object" in " ".join(result.output.replace("│", " ").split())
