"""Other versions of vLLM are tested in environments without verl and Ray."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.compat.run import TESTS

COLLECT = "import sys, pytest; sys.modules.update(ray=None, verl=None); sys.exit(pytest.main(sys.argv[1:]))"


@pytest.mark.slow
def test_the_contract_tests_need_neither_verl_nor_ray():
    command = [sys.executable, "-c", COLLECT, "--collect-only", "-q", "-p", "no:cacheprovider", *TESTS]
    found = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=600)
    assert found.returncode == 0, found.stdout
