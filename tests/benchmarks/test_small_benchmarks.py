"""Benchmarks without tests of their own, in seconds: each runs and writes what the tables read."""

import json

import pytest

from benchmarks.engines import step_cost
from benchmarks.jobs import emulated_steps, step_times

pytestmark = pytest.mark.slow


def test_left_out_step_times_are_interpolated(tmp_path):
    step_times.main(result=tmp_path / "result.json")
    found = json.loads((tmp_path / "result.json").read_text())
    assert set(found["summary"]) == {"cells", "totals"}
    assert all(one["count"] > 0 and one["median"] < one["worst"]["error"] for one in found["summary"]["cells"].values())


@pytest.mark.engine
def test_the_cost_of_this_machines_steps_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(step_cost, "ROWS", (1, 8))
    monkeypatch.setattr(step_cost, "DRAFT_TOKENS", (1, 3))
    step_cost.main(
        model="examples/quickstart/policy", repeats=1, steps=16, vocabulary=170, load_format="auto",
        gpu_memory_utilization=0.4, result=tmp_path / "result.json",
    )  # fmt: skip
    assert json.loads((tmp_path / "result.json").read_text())


@pytest.mark.engine
def test_emulated_steps_take_what_was_published(tmp_path):
    emulated_steps.main(
        policy="examples/quickstart/policy", model="qwen2.5-7b", dilation=1.0, repeats=1, steps=16, vocabulary=170,
        result=tmp_path / "result.json",
    )  # fmt: skip
    assert json.loads((tmp_path / "result.json").read_text())
