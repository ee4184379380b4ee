"""The examples of CONTRIBUTING.md work: the expert is compiled and drafts, the scheduling rule keeps its contract."""

import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pybind11
import pytest

from rhyme_verl.sim.experiment import Case, play
from tests.helpers.simulation import random_scenario

ROOT = Path(__file__).parents[2]
CORE = ROOT / "rhyme_verl/csrc"
RUN_ITS_TEST = """
import importlib.util, sys
import rhyme_verl
spec = importlib.util.spec_from_file_location("rhyme_verl._core", sys.argv[1])
sys.modules["rhyme_verl._core"] = core = importlib.util.module_from_spec(spec)
spec.loader.exec_module(core)
rhyme_verl._core = core
from tests.csrc.test_drafter import *
exec(sys.stdin.read())
test_a_run_of_one_token_goes_on()
"""


def blocks(language):
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.M | re.S)


def patched(diff):
    """The files that a diff without line numbers changes, by name."""
    files = {}
    for one in re.split(r"^--- .*\n", diff, flags=re.M)[1:]:
        name, _, hunks = one.partition("\n")
        text = (ROOT / name.removeprefix("+++ b/")).read_text(encoding="utf-8")
        for hunk in re.split(r"^@@\n", hunks, flags=re.M)[1:]:
            lines = hunk.splitlines(keepends=True)
            before, after = ("".join(line[1:] for line in lines if line[0] in sign) for sign in ("- ", "+ "))
            assert text.count(before) == 1, before
            text = text.replace(before, after)
        files[Path(name).name] = text
    return files


@pytest.mark.slow
def test_the_expert_is_compiled_and_drafts(tmp_path):
    (diff,), (its_test, _) = blocks("diff"), blocks("python")
    files = {path.name: path.read_text(encoding="utf-8") for path in CORE.iterdir() if path.suffix in (".h", ".cpp")}
    for name, text in (files | patched(diff)).items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    library = tmp_path / f"_core{sysconfig.get_config_var('EXT_SUFFIX')}"
    include = [f"-I{path}" for path in (pybind11.get_include(), sysconfig.get_paths()["include"])]
    sources = sorted(map(str, tmp_path.glob("*.cpp")))
    flags = ["-std=c++20", "-O1", "-fPIC", "-shared", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror"]
    subprocess.run(["c++", *flags, *include, *sources, "-o", library], check=True)
    run = [sys.executable, "-c", RUN_ITS_TEST, library]
    subprocess.run(run, input=its_test, text=True, check=True, cwd=ROOT)
    run[-1] = next((ROOT / "rhyme_verl").glob("_core*.so"))  # without the expert
    failed = subprocess.run(run, input=its_test, text=True, cwd=ROOT, capture_output=True)
    assert "AssertionError" in failed.stderr


def test_the_scheduling_rule_generates_every_token_and_levels_the_load():
    names = {}
    exec(blocks("python")[1], names)
    rule = names["FewestTokens"]
    for seed in range(20):
        scenario = random_scenario((seed, 3, 8, 4))
        _, run = play(scenario, Case(mode="sync", system=rule))
        _, without = play(scenario, Case(mode="sync", system="histopipe"))
        assert np.array_equal(run.lengths, without.lengths)
        assert np.all(run.trained_in >= 0)
    granted = []
    lanes = names["FewestTokensLanes"](4, Grants(granted))
    lanes.add_replicas(["a", "b"], 0.0)
    for uid, predicted in (("z", 30.0), ("x", 100.0), ("y", 60.0)):
        lanes.add((uid, 0), 1, predicted)
    lanes.deal(0.0)
    assert granted == [("x", "a"), ("y", "b"), ("z", "b")], "`Lanes` would grant z on a"


class Grants:
    def __init__(self, granted):
        self.granted = granted

    def grant(self, answer, replica):
        self.granted.append((answer[0], replica))
