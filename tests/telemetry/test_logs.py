"""What rhyme_verl says appears in every process, once, whatever other libraries do to the root logger."""

import subprocess
import sys

import pytest

SAY = "logging.getLogger('rhyme_verl.any').info('drafting'); logging.getLogger('other').info('chatter')"
ROOTS = {
    "nobody set logging up": "",
    "only warnings, as verl": "logging.basicConfig(level=logging.WARNING)",
    "a handler for errors": "logging.basicConfig(level=30); logging.getLogger().handlers[0].setLevel(logging.ERROR)",
}


@pytest.mark.parametrize("root", ROOTS.values(), ids=ROOTS.keys())
@pytest.mark.parametrize("order", ["{root}; logs.show()", "logs.show(); {root}; logs.show()"])
def test_it_is_said_once(root, order):
    code = f"import logging; from rhyme_verl.telemetry import logs\n{order.format(root=root or 'pass')}\n{SAY}"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stderr.count("drafting") == 1 and "chatter" not in result.stderr


def test_a_level_that_a_user_has_set_is_kept():
    code = (
        "import logging; from rhyme_verl.telemetry import logs\n"
        "logging.getLogger('rhyme_verl').setLevel(logging.ERROR)\n"
        f"logs.show()\n{SAY}"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "drafting" not in result.stderr
