"""The README's settings table is what the dataclasses say."""

from pathlib import Path

from tools.settings_table import table


def test_settings_table_is_current():
    readme = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    assert table() in readme, "run `python -m tools.settings_table` and paste its output into README.md"
