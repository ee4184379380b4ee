"""The folders of rhyme_verl import, and start by name, only what CONTRIBUTING.md lets them."""

import ast
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "rhyme_verl"
BOTTOM = {"_core", "config", "request_id", "telemetry", "version"}
MAY_USE = {
    "telemetry": set(),
    "platforms": set(),
    "history": BOTTOM,
    "histospec": BOTTOM | {"history", "platforms"},
    "histopipe": BOTTOM | {"history"},
    "sim": BOTTOM | {"histopipe"},
    "integration": BOTTOM | {"history", "histospec", "histopipe", "platforms", "sim"},
}


def used(path):
    """The folders and modules of the package that a file imports, or names in a string of its own."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.ImportFrom(module="rhyme_verl", names=found):
                names |= {f"rhyme_verl.{one.name}" for one in found}
            case ast.ImportFrom(module=str(name)):
                names.add(name)
            case ast.Import(names=found):
                names |= {one.name for one in found}
            case ast.Constant(value=str(text)) if re.fullmatch(r"rhyme_verl(\.\w+)+", text):
                names.add(text)
    parts = {name.split(".")[1] for name in names if name.startswith("rhyme_verl.")}
    return {part for part in parts if (PACKAGE / part).is_dir() or (PACKAGE / f"{part}.py").is_file()}


@pytest.mark.parametrize("folder", MAY_USE)
def test_a_folder_uses_only_those_below_it(folder):
    files = sorted((PACKAGE / folder).rglob("*.py"))
    assert files
    assert {path.name: found for path in files if (found := used(path) - MAY_USE[folder] - {folder})} == {}
