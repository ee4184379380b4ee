"""The check for a GPU machine, tried on this one: its parts run, are kept, and end in one table and one result."""

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
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)


def test_all_parts_run_on_a_tiny_shape(tmp_path, monkeypatch):
    result = check("rollout", "table", "--device", "cpu", runs=tmp_path)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]
    assert "ratio" in result.stdout
    monkeypatch.setattr(gpu_check, "RUNS", tmp_path)
    assert CliRunner().invoke(gpu_check.app, ["rollout", "--device", "cpu"]).output == "", "done is done"
    found = json.loads((tmp_path / "gpu_check.json").read_text())
    assert "no GPU" in found["label"]
    runs = found["parts"]["rollout quickstart"]["runs"]
    drafts, accepted = (sum(run[key] for run in runs["K = 3, 4 rows, 1.5 accepted"]) for key in ("drafts", "accepted"))
    assert 0.5 < accepted / drafts < 1.6, "acceptance is planted, and cut off at K"
    assert all(run["accepted"] == 0 for run in runs["K = 3, 4 rows, 0.0 accepted"])


def test_a_wrong_part_or_device_is_told_in_one_line(tmp_path, monkeypatch):
    wrong = check("stepps", runs=tmp_path)
    assert wrong.returncode == 2 and "choose from setup contract steps rollout table" in wrong.stderr
    monkeypatch.setattr(gpu_check, "RUNS", tmp_path)
    for arguments, message in (
        (["steps", "--device", "tpu"], "choose from cuda, cpu"),
        (["table", "--device", "cpu"], "run the parts steps and rollout first"),
    ):
        result = CliRunner(env={"COLUMNS": "200"}).invoke(gpu_check.app, arguments)
        assert result.exit_code == 2
        assert message in result.output
