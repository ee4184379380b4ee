"""The tables of README and documentation, and the menu. `make docs` builds it with warnings as errors."""

import re
from pathlib import Path

import pytest
import yaml

from rhyme_verl.telemetry.step_metrics import summarize
from tests.faults.run import PAGES as TEST_PAGES
from tests.faults.run import named_tests
from tools import docs_tables, result_age, settings_table
from tools.docs_tables import fill

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))


@pytest.mark.parametrize("path", docs_tables.PAGES, ids=lambda path: path.name)
def test_the_tables_of_a_page_are_those_of_the_results_and_settings(path):
    page = path.read_text(encoding="utf-8")
    assert fill(page) == page, "run `make docs-tables`"


def test_tables_are_replaced_and_what_cannot_be_filled_is_refused():
    table = settings_table.table()
    page = "a\n<!-- table: settings -->\n{}<!-- end -->\nb\n"
    assert fill(page.format("")) == fill(page.format("| old |\n")) == page.format(f"\n{table}\n\n")
    with pytest.raises(ValueError, match="no table no-such-table"):
        fill("<!-- table: no-such-table -->\n<!-- end -->")
    with pytest.raises(ValueError, match="`<!-- end -->` is missing after the table settings"):
        fill("<!-- table: settings -->\n| key |\n\n<!-- table: bars -->\n<!-- end -->")
    with pytest.raises(ValueError, match="is missing after the table bars"):
        fill("<!-- table: settings -->\n<!-- end -->\n<!-- table: bars -->")


def test_every_table_is_on_a_page_and_every_result_has_exercised_files_that_exist():
    text = "\n".join(path.read_text(encoding="utf-8") for path in docs_tables.PAGES)
    assert not [name for name in docs_tables.ALL_TABLES if f"<!-- table: {name} -->" not in text]
    results = {path.stem for path in (ROOT / result_age.RESULTS).glob("*.json")}
    assert set(result_age.EXERCISED) == results
    paths = {path.removeprefix(":!") for paths in result_age.EXERCISED.values() for path in paths}
    assert not [path for path in paths if not (ROOT / path).exists()]
    lines = list(result_age.lines())
    assert [line.partition(":")[0] for line in lines] == list(result_age.EXERCISED)


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


@pytest.mark.parametrize(("page", "folder"), [("faults", "tests/jobs/"), ("machines", "tests/cluster/")])
def test_a_page_names_tests_that_exist_and_leaves_none_of_its_folder_out(page, folder):
    named = set(named_tests(TEST_PAGES[page]))
    files = {name.partition("::")[0] for name in named}
    tests = {
        f"{file}::{name}"
        for file in files
        for name in re.findall(r"^def (test_\w+)", (ROOT / file).read_text(encoding="utf-8"), re.M)
    }
    assert not named - tests, "no such tests"
    assert not [name for name in tests - named if name.startswith(folder)], "not in the table"
