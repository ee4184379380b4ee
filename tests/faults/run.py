"""Runs the tests that docs/reliability.md names and records which passed: whole verl jobs with faults, and their parts.

Run from the repository's root with `make test-faults`; writes benchmarks/results/faults.json. The exit code is 1 if a
test fails. A run that was cut short goes on: test files that passed at the same commit are not run again.
"""

from __future__ import annotations

import itertools
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.common.machine import commit
from benchmarks.common.result_files import RESULTS, bar, console, write_result

PAGE = Path(__file__).parents[2] / "docs/reliability.md"


def main(
    out: Annotated[Path, typer.Option(help="Folder of the test files' outcomes, by commit.")] = Path("runs/faults"),
    result: Annotated[Path, typer.Option(help="Path of the result file.")] = RESULTS / "faults.json",
) -> None:
    """Run the tests and write their outcomes and seconds."""
    folder = out / (commit() or "unknown-dirty")
    if folder.name.endswith("-dirty"):
        shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    tests = []
    for file, names in itertools.groupby(named_tests(), key=lambda name: name.partition("::")[0]):
        passed, report = folder / f"{file.replace('/', '.')}.xml", folder / "latest.xml"
        if not passed.exists():
            console.print(file)
            command = [sys.executable, "-m", "pytest", "-q", "-m", "", f"--junitxml={report}", *names]
            report.unlink(missing_ok=True)
            if subprocess.run(command).returncode == 0:
                report.rename(passed)
        tests += outcomes(passed if passed.exists() else report)
    not_passed = sum(test["outcome"] != "passed" for test in tests)
    bars = {"tests that did not pass": bar(not_passed, at_most=0)}
    write_result(result, {"seconds": round(sum(test["seconds"] for test in tests)), "tests": tests, "bars": bars})
    raise typer.Exit(int(not_passed > 0))


def named_tests() -> list[str]:
    """Return the tests that the page names (`file::name`), file by file, so that those of a file share a job."""
    return sorted(set(re.findall(r"`(tests/\S+?::\w+)`", PAGE.read_text(encoding="utf-8"))))


def outcomes(report: Path) -> list[dict[str, Any]]:
    """Return the name, outcome and seconds of each test in a JUnit file; the seconds include its fixtures."""
    tests = []
    for case in ElementTree.parse(report).iter("testcase"):
        failed = [one.tag for one in case if one.tag in ("failure", "error", "skipped")]
        name = f"{case.attrib['classname'].replace('.', '/')}.py::{case.attrib['name']}"
        seconds = round(float(case.attrib["time"]), 1)
        tests.append({"test": name, "outcome": failed[0] if failed else "passed", "seconds": seconds})
    return tests


if __name__ == "__main__":
    typer.run(main)
