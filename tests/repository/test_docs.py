"""The documentation's tables, and its menu. `make docs` builds it with warnings as errors."""

import re
from pathlib import Path

import pytest
import yaml

from benchmarks.jobs.fault_results import named_tests
from rhyme_verl.telemetry.step_metrics import summarize
from tools import settings_table
from tools.docs_tables import on_page_markdown

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))


def test_every_page_gets_its_tables():
    pages = {page.name: on_page_markdown(page.read_text(encoding="utf-8")) for page in PAGES}
    assert not [name for name, text in pages.items() if "<!-- table" in text]
    why = "run `python -m tools.settings_table` and paste its output into docs/settings.md"
    assert settings_table.table() in pages["settings.md"], why
    assert "| vLLM's `suffix` |" in pages["benchmarks.md"]
    assert "| `rhyme-off` |" in pages["benchmarks.md"]
    assert "| rollout | longtail, full history, scale 1: tokens/s / stock, worst" in pages["benchmarks.md"]
    with pytest.raises(KeyError, match="no-such-table"):
        on_page_markdown("<!-- table: no-such-table -->")


def test_the_menu_has_every_page():
    def leaves(node):
        if isinstance(node, str):
            return [node]
        return [leaf for child in (node.values() if isinstance(node, dict) else node) for leaf in leaves(child)]

    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    assert sorted(leaves(config["nav"])) == [page.name for page in PAGES]


def test_every_metric_of_a_step_is_explained():
    counters = "tokens answers busy_seconds num_drafts num_draft_tokens num_accepted_tokens num_generated_tokens"
    sizes = "history_tokens history_bytes history_store_tokens history_store_bytes history_store_evicted_tokens"
    names = summarize([dict.fromkeys(f"{counters} {sizes} saved_seconds".split(), 1.0)])
    page = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
    assert len(names) > 10
    assert not [name for name in names if f"`{name}`" not in page]


def test_every_fault_has_tests_that_exist_and_log_lines_of_the_code():
    sources = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "rhyme_verl").rglob("*.py"))
    lines = (ROOT / "docs/reliability.md").read_text(encoding="utf-8").splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")][1:]
    assert len(rows) > 15
    for fault, _, logged, tests in rows:
        quotes = [part.strip() for quote in re.findall("`(.+?)`", logged) for part in quote.split("...")]
        assert not [part for part in quotes if part not in sources], fault
        assert "::" in tests, fault
    named = set(named_tests())
    files = {name.partition("::")[0] for name in named}
    tests = {
        f"{file}::{name}"
        for file in files
        for name in re.findall(r"^def (test_\w+)", (ROOT / file).read_text(encoding="utf-8"), re.M)
    }
    assert not named - tests, "no such tests"
    assert not [name for name in tests - named if name.startswith("tests/jobs/")], "not in the table"
