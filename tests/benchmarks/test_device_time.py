"""What a step costs after its forward pass: more with drafts, most with a single long one."""

import pytest

from benchmarks.engines.device_time import LAST_LAYERS, DeviceTime
from rhyme_verl.sim.step_times import MODELS, PublishedStepTime

CONTEXT = 512.0


@pytest.mark.parametrize("model", MODELS)
def test_it_is_added_to_the_published_forward_pass(model):
    device, published = DeviceTime(model), PublishedStepTime(model)
    for rows, drafted, longest in ((1, 0, 0), (64, 0, 0), (20, 85, 12), (256, 256, 1)):
        after = device.sampling_seconds(rows, drafted, longest)
        whole = device.seconds(rows, rows + drafted, CONTEXT, drafted, longest)
        assert whole == pytest.approx(published.seconds(rows, rows + drafted, CONTEXT) + after)
        assert 0.0 < after < 0.5 * whole
    assert device.seconds(4, 12, CONTEXT) == device.seconds(4, 12, CONTEXT, 8, 2), "drafts are equally long"
    assert device.seconds(4, 104, CONTEXT, 0, 0) == pytest.approx(
        published.seconds(4, 104, CONTEXT) + device.sampling_seconds(4, 0, 0)
    ), "tokens of prompts are not sampled"


def test_few_rows_cost_the_reading_of_the_last_layer_and_many_its_operations():
    device = DeviceTime("qwen2.5-7b")
    hidden, vocabulary = LAST_LAYERS["qwen2.5-7b"]
    least = 2 * hidden * vocabulary / 2.04e12
    assert least < device.sampling_seconds(1, 0, 0) < 1.5 * least
    per_token = (device.sampling_seconds(64, 960, 15) - device.sampling_seconds(64, 448, 15)) / 512
    assert 2 * hidden * vocabulary / 312e12 < per_token < 20e-6


def test_one_long_draft_pads_all_rows():
    device = DeviceTime("qwen2.5-7b")
    assert device.sampling_seconds(64, 24, 24) > device.sampling_seconds(64, 24, 1) > device.sampling_seconds(64, 0, 0)


def test_an_unknown_model_is_named():
    with pytest.raises(ValueError, match="no published step times of 'gpt-2'"):
        DeviceTime("gpt-2")
