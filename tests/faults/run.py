"""Runs the tests that a page of the documentation names and records which passed, in benchmarks/results.

Run from the repository's root: `make test-faults` (docs/reliability.md: whole verl jobs with faults, and their parts)
and `make test-machines` (docs/cluster.md). The exit code is 1 if a test fails. A run that was cut short goes on: test
files that passed at the same commit are not run again.
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

PAGES = {"faults": "docs/reliability.md", "machines": "docs/cluster.md"}


def main(
    name: Annotated[str, typer.Argument(help="One of " + ", ".join(PAGES) + ".")],
    out: Annotated[Path, typer.Option(help="Folder of the test files' outcomes, by name and commit.")] = Path("runs"),
    result: Annotated[Path | None, typer.Option(help="Path of the result file. Default: in results.")] = None,
) -> None:
    """Run the tests and write their outcomes and seconds."""
    if name not in PAGES:
        raise typer.BadParameter(f"{name}: choose from {', '.join(PAGES)}")
    folder = out / name / (commit() or "unknown-dirty")
    if folder.name.endswith("-dirty"):
        shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    tests = []
    for file, names in itertools.groupby(named_tests(PAGES[name]), key=lambda one: one.partition("::")[0]):
        passed, report = folder / f"{file.replace('/', '.')}.xml", folder / "latest.xml"
        if not passed.exists():
            console.print(file)
            command = [sys.executable, "-m", "pytest", "-q", "-m", "", "-rs", "-o", "junit_family=xunit1"]
            command += [f"--junitxml={report}", *names]
            report.unlink(missing_ok=True)
            if subprocess.run(command).returncode == 0:
                report.rename(passed)
        tests += outcomes(passed if passed.exists() else report)
    if all(test["outcome"] == "skipped" for test in tests):
        raise typer.Exit(0)  # pytest has said why
    not_passed = sum(test["outcome"] != "passed" for test in tests)
    bars = {"tests that did not pass": bar(not_passed, at_most=0)}
    path = result or RESULTS / f"{name}.json"
    write_result(path, {"seconds": round(sum(test["seconds"] for test in tests)), "tests": tests, "bars": bars})
    raise typer.Exit(int(not_passed > 0))


def named_tests(page: str) -> list[str]:
    """Return the tests that a page names (`file::name`), file by file, so that those of a file share a job."""
    text = (Path(__file__).parents[2] / page).read_text(encoding="utf-8")
    return sorted(set(re.findall(r"`(tests/\S+?::\w+)`", text)))


def outcomes(report: Path) -> list[dict[str, Any]]:
    """Return the name, outcome, seconds and recorded properties of each test in a JUnit file.

    The seconds include those of its fixtures.
    """
    tests = []
    for case in ElementTree.parse(report).iter("testcase"):
        failed = [one.tag for one in case if one.tag in ("failure", "error", "skipped")]
        name = f"{case.attrib['classname'].replace('.', '/')}.py::{case.attrib['name']}"
        seconds = round(float(case.attrib["time"]), 1)
        test = {"test": name, "outcome": failed[0] if failed else "passed", "seconds": seconds}
        recorded = {one.attrib["name"]: one.attrib["value"] for one in case.iter("property")}
        tests.append(test | ({"recorded": recorded} if recorded else {}))
    return tests


if __name__ == "__main__":
    typer.run(main)
