"""Published step times: exact where measured, jumps kept, and sensible between and beyond the measured points."""

import csv
from statistics import mean

import numpy as np
import pytest

from rhyme_verl.sim import step_times
from rhyme_verl.sim.step_times import FOLDER, MODELS, PublishedStepTime

HEADER = "model,batch,seq,gamma,mode,mean_ms,median_ms,std_ms,min_ms,max_ms,n_samples"


@pytest.fixture(scope="module")
def qwen():
    return PublishedStepTime("qwen2.5-7b")


def ms(times, rows, num_tokens, context):
    return 1e3 * times.seconds(rows, num_tokens, context)


def test_measured_points_are_exact(qwen):
    assert ms(qwen, 1, 1, 256) == pytest.approx(9.528)
    assert ms(qwen, 32, 32, 1024) == pytest.approx(11.535)
    assert ms(qwen, 64, 64, 4096) == pytest.approx(14.989)
    assert ms(qwen, 48, 576, 512) == pytest.approx(38.233), "one batch size has this total"
    assert ms(qwen, 64, 1024, 2048) == pytest.approx(66.442)


@pytest.mark.parametrize("model", MODELS)
def test_drafted_steps_are_means_over_batch_sizes_of_equal_total(model):
    with (FOLDER / MODELS[model]).open() as file:
        rows = [row for row in csv.DictReader(file) if row["mode"] == "target_verify" and row["seq"] == "512"]
    medians = [float(row["median_ms"]) for row in rows if int(row["batch"]) * (int(row["gamma"]) + 1) == 128]
    assert len(medians) == 3
    assert ms(PublishedStepTime(model), 8, 128, 512) == pytest.approx(mean(medians))


def test_between_and_beyond_contexts(qwen):
    assert ms(qwen, 32, 32, 768) == pytest.approx((11.202 + 11.535) / 2)
    assert ms(qwen, 32, 32, 0) == ms(qwen, 32, 32, 256)
    assert ms(qwen, 32, 32, 4096 + 2048) == pytest.approx(13.525 + (13.525 - 12.201)), "the last slope continues"
    assert ms(qwen, 32, 32, 1024 + 15.9) == ms(qwen, 32, 32, 1024), "rounded to 32 tokens"


def test_rows_between_measured_ones(qwen):
    assert ms(qwen, 56, 56, 512) == pytest.approx((12.294 + 12.686) / 2)
    assert ms(qwen, 2, 2, 512) == ms(qwen, 1, 1, 512), "measured 0.4 % cheaper than one row"


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("edge", "at_least"), [(128, 1.15), (256, 1.2), (512, 1.04)])
def test_jumps_are_kept(model, edge, at_least):
    times = PublishedStepTime(model)
    before, after, later = (ms(times, 1, edge + more, 512) for more in (0, 1, 2))
    assert after > at_least * before
    assert later - after < 0.02 * after


def test_above_a_jump_the_segment_above_counts(qwen):
    at_192, at_256, at_288, at_384 = (ms(qwen, 1, tokens, 256) for tokens in (192, 256, 288, 384))
    assert ms(qwen, 1, 129, 256) == pytest.approx(at_192 - (at_256 - at_192) * 63 / 64)
    assert ms(qwen, 1, 224, 256) == pytest.approx((at_192 + at_256) / 2)
    assert ms(qwen, 1, 257, 256) == pytest.approx(at_288 - (at_384 - at_288) * 31 / 96)
    assert ms(qwen, 1, 513, 4096) == ms(qwen, 1, 512, 4096), "never below the value at the edge"


def test_a_missing_cell_is_filled_along_the_context(qwen):
    assert (4096, 1024) not in qwen.verified
    at_1024, at_2048 = (ms(qwen, 64, 1024, context) for context in (1024, 2048))
    assert ms(qwen, 64, 1024, 4096) == pytest.approx(at_2048 + 2 * (at_2048 - at_1024))


def test_cells_can_be_left_out(qwen):
    left = PublishedStepTime("qwen2.5-7b", leave_out=[(1024, 192)])
    assert len(left.verified) == len(qwen.verified) - 1
    at_512, at_2048 = (ms(qwen, 1, 192, context) for context in (512, 2048))
    assert ms(left, 1, 192, 1024) == pytest.approx(at_512 + (at_2048 - at_512) / 3)
    assert ms(left, 1, 256, 1024) == ms(qwen, 1, 256, 1024)
    no_256 = PublishedStepTime("qwen2.5-7b", leave_out=[cell for cell in qwen.verified if cell[1] == 256])
    assert ms(no_256, 1, 256, 512) == ms(no_256, 1, 192, 512), "what lies above the edge says nothing about it"


@pytest.mark.parametrize("model", MODELS)
def test_a_drafted_step_costs_at_least_the_undrafted_one(model):
    times = PublishedStepTime(model)
    for context in (0, 256, 1000, 4096, 16384):
        for rows in (1, 2, 8, 33, 64, 65, 100, 300):
            undrafted = times.seconds(rows, rows, context)
            assert all(times.seconds(rows, rows + more, context) >= undrafted for more in (1, 3, 100, 2000))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("context", [256, 1500, 4096, 30000])
def test_more_rows_never_make_an_undrafted_step_cheaper(model, context):
    times = PublishedStepTime(model)
    seconds = [times.seconds(rows, rows, context) for rows in range(1, 1300)]
    assert seconds[0] > 0 and np.all(np.diff(seconds) >= 0)


def test_more_than_64_rows(qwen):
    per_row_token = (14.989 - 11.808) / (4096 - 256) / 64
    at_128 = ms(qwen, 1, 128, 256)
    assert ms(qwen, 128, 128, 256) == pytest.approx(at_128)
    assert ms(qwen, 128, 128, 2048) == pytest.approx(at_128 + per_row_token * 128 * (2048 - 256))
    at_512 = ms(qwen, 1, 512, 256)
    assert ms(qwen, 128, 512, 2048) == pytest.approx(at_512 + per_row_token * 128 * (2048 - 256))
    assert ms(qwen, 65, 65, 512) == ms(qwen, 64, 64, 512), "never below 64 rows"


def test_few_and_many_tokens(qwen):
    assert ms(qwen, 1, 2, 2048) == ms(qwen, 1, 4, 2048)
    at_768, at_1024 = (ms(qwen, 1, tokens, 512) for tokens in (768, 1024))
    assert ms(qwen, 1, 2048, 512) == pytest.approx(at_1024 + 4 * (at_1024 - at_768))


def test_prefill_counts_as_tokens(qwen):
    """32 rows decode while 480 tokens of a prompt are computed."""
    assert ms(qwen, 32, 32 + 480, 512) == ms(qwen, 64, 512, 512) > ms(qwen, 32, 32, 512)


def test_the_simulator_gets_a_step_cost(qwen):
    cost = qwen.step_seconds(128, 512)
    assert len(cost) == 1 + 128
    for rows in (1, 8, 32, 64, 128):
        assert cost[rows] == pytest.approx(qwen.seconds(rows, rows, 512))
    above = qwen.step_seconds(192, 512)
    assert above[129] / 129 == pytest.approx(above[128] / 128), "the cost per sequence does not rise"


def test_warm_up_and_other_modes_are_ignored(tmp_path, monkeypatch):
    points = [(0, 0, 0, 99.0), (1, 256, 0, 5.0), (2, 256, 0, 6.0), (1, 256, 3, 7.0), (0, 0, 3, 99.0)]
    lines = [
        f"M,{batch},{context},{gamma},{'target_verify' if gamma else 'target_decode'},0,{value},0,0,0,1"
        for batch, context, gamma, value in points
    ]
    table = "\n".join([HEADER, *lines, "M,1,256,3,drafter_decode,,,,,,"])
    (tmp_path / MODELS["qwen2.5-7b"]).write_text(table + "\n")
    monkeypatch.setattr(step_times, "FOLDER", tmp_path)
    times = PublishedStepTime("qwen2.5-7b")
    assert times.verified == {(256, 4): 0.007}
    assert ms(times, 2, 2, 4096) == pytest.approx(6.0), "one context: no slope"
    assert ms(times, 1, 100, 256) == ms(times, 100, 101, 256) == pytest.approx(7.0)


def test_an_unknown_model_is_named():
    with pytest.raises(ValueError, match=r"^no published step times of 'gpt-2': choose from qwen2\.5-7b, [^\n]*$"):
        PublishedStepTime("gpt-2")
