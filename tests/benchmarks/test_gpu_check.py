"""The check for a GPU machine, tried on this one: its parts run, are kept, and end in one table and recommendations."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.engines import gpu_check

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.engine, pytest.mark.slow]


def check(*arguments, runs):
    environment = {**os.environ, "PYTHON": sys.executable, "RHYME_GPU_CHECK_RUNS": str(runs)}
    command = [ROOT / "benchmarks/engines/gpu_check.sh", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800)


def test_all_parts_run_on_a_tiny_shape(tmp_path, monkeypatch):
    result = check("small", "large", "table", "--device", "cpu", runs=tmp_path)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]
    assert "large: not on a cpu" in result.stdout
    assert "custom.rhyme.spec.async_scheduling=" in result.stdout
    monkeypatch.setattr(gpu_check, "RUNS", tmp_path)
    assert CliRunner().invoke(gpu_check.app, ["small", "--device", "cpu"]).output == "", "done is done"
    found = json.loads((tmp_path / "gpu_check.json").read_text())
    assert "no GPU" in found["label"]
    scheduling = {one["engine"]: one["facts"]["asynchronous"] for one in found["parts"].values()}
    assert scheduling == {"stock": True, "async default": True, "sync default": False}
    for one in found["parts"].values():
        for point in one["points"]:
            planted = point["at"]["accepted"]
            assert 0.7 * planted <= point["accepted_per_draft"] <= 1.3 * planted, "some drafts are cut off at K"
    points = {one["engine"]: len(one["points"]) for one in found["parts"].values()}
    assert points == {"stock": 2 + 1, "async default": 4 + 2, "sync default": 4}
    assert {one["setting"].rpartition(".")[2] for one in found["recommended"]} == {"async_scheduling", "enabled"}


def test_a_check_that_was_stopped_measures_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_check, "RUNS", tmp_path)
    measured = []

    class Running:
        def __init__(self, settings):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *error):
            pass

        def wait_until_ready(self):
            pass

        def worker(self, function, *args):
            return {"asynchronous": True}

    def points(scale, model, engine, running):
        measured.append(engine)
        if len(measured) == 2:
            raise KeyboardInterrupt
        return iter([])

    monkeypatch.setattr(gpu_check, "Engine", Running)
    monkeypatch.setattr(gpu_check, "_points", points)
    monkeypatch.setattr(gpu_check, "_write_model", lambda shape: shape)
    for _ in range(2):
        CliRunner().invoke(gpu_check.app, ["large"])
    assert measured == ["stock", *2 * ["async default"], "async piecewise", "sync default", "sync piecewise"]


def test_a_wrong_part_or_device_is_told_in_one_line(tmp_path, monkeypatch):
    wrong = check("stepps", runs=tmp_path)
    assert wrong.returncode == 2 and "choose from setup contract small large table" in wrong.stderr
    monkeypatch.setattr(gpu_check, "RUNS", tmp_path)
    for arguments, message in (
        (["small", "--device", "tpu"], "choose from cuda, cpu"),
        (["table", "--device", "cpu"], "run the parts small and large first"),
    ):
        result = CliRunner(env={"COLUMNS": "200"}).invoke(gpu_check.app, arguments)
        assert result.exit_code == 2
        assert message in result.output


@pytest.mark.parametrize("shape", ["qwen2.5-0.5b", "qwen2.5-7b"])
def test_vllm_reads_the_shapes(tmp_path, monkeypatch, shape):
    from vllm import EngineArgs

    monkeypatch.setattr(gpu_check, "RUNS", tmp_path)
    scale = gpu_check.SCALES["cuda"]
    settings = gpu_check._settings(scale, shape, "async piecewise")
    config = EngineArgs(
        model=settings.model, max_model_len=settings.max_model_len, load_format="dummy"
    ).create_engine_config()
    assert config.model_config.architecture == "LlamaForCausalLM"
    assert scale.long.prompt_tokens + scale.long.answer_tokens + 24 + 1 < config.model_config.max_model_len
