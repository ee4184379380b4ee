"""Runs the fuzz tests with new seeds until the time is over, or until one of them finds something. `make fuzz`."""

from __future__ import annotations

import os
import re
import secrets
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from benchmarks.common.result_files import RESULTS, console, write_result
from tests.fuzz.fuzzing import SEED

ROOT = Path(__file__).parents[2]
FOLDER = "tests/fuzz"
HANG_SECONDS = 1800.0  # a round takes about two minutes


def main(
    minutes: Annotated[float, typer.Option(min=0.0, help="A new round begins until then.")] = 10.0,
    result: Annotated[Path, typer.Option(help="Path of the result file.")] = RESULTS / "fuzz.json",
) -> None:
    """Run rounds of all fuzz tests, each with a new seed."""
    started = time.monotonic()
    seeds: list[int] = []
    inputs: Counter[str] = Counter()
    passed = 0.0
    while passed < minutes:
        seeds.append(secrets.randbits(32))
        inputs += run_round(seeds[-1])
        passed = (time.monotonic() - started) / 60
        console.print(f"{passed:.1f} minutes, {inputs.total():,} inputs, no finding", highlight=False)
    write_result(result, {"minutes": round(passed, 1), "findings": 0, "inputs": dict(inputs), "seeds": seeds})


def run_round(seed: int) -> Counter[str]:
    """Run all tests with one seed and return the number of inputs by test.

    Raises:
        typer.Exit: there is a finding, which has been printed.
    """
    command = [sys.executable, "-m", "pytest", "-q", "--hypothesis-show-statistics", FOLDER]
    environment = {**os.environ, SEED: str(seed)}
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, errors="replace", timeout=HANG_SECONDS
        )
    except subprocess.TimeoutExpired:
        _report(seed, f"no end within {HANG_SECONDS:.0f} s")
    if done.returncode != 0:  # negative after a crash, of which faulthandler writes the stack to stderr
        _report(seed, done.stdout + done.stderr)
    return count_inputs(done.stdout)


def count_inputs(output: str) -> Counter[str]:
    """Return the number of valid inputs by test from Hypothesis's statistics in pytest's output."""
    inputs: Counter[str] = Counter()
    test = ""
    for line in output.splitlines():
        if re.fullmatch(r"\S+::\S+:", line):
            test = line[:-1]
        elif found := re.search(r"(\d+) passing", line):
            inputs[test] += int(found[1])
    return inputs


def _report(seed: int, finding: str) -> NoReturn:
    console.print(finding, markup=False, highlight=False)
    console.print(f"a finding; run it again with {SEED}={seed} python -m pytest {FOLDER}", highlight=False)
    raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
