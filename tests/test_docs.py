"""The documentation's generated tables, and its menu. `make docs` builds it with warnings as errors."""

from pathlib import Path

import pytest
import yaml

from tools import settings_table
from tools.docs_tables import on_page_markdown

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").glob("*.md"))


def test_every_page_gets_its_tables():
    pages = {page.name: on_page_markdown(page.read_text(encoding="utf-8")) for page in PAGES}
    assert not [name for name, text in pages.items() if "<!-- table" in text]
    assert settings_table.table() in pages["settings.md"]
    assert "| vLLM's `suffix` |" in pages["benchmarks.md"]
    assert "| `rhyme-off` |" in pages["benchmarks.md"]
    assert "| rollout | tokens/s / no speculation at 1 |" in pages["benchmarks.md"]
    with pytest.raises(KeyError, match="no-such-table"):
        on_page_markdown("<!-- table: no-such-table -->")


def test_the_menu_has_every_page():
    def leaves(node):
        if isinstance(node, str):
            return [node]
        return [leaf for child in (node.values() if isinstance(node, dict) else node) for leaf in leaves(child)]

    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    assert sorted(leaves(config["nav"])) == [page.name for page in PAGES]
