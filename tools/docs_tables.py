"""Puts the generated tables into README.md and docs/: `make docs-tables`.

A table stands between `<!-- table: NAME -->` and `<!-- end -->`, so that the pages show it wherever they are read.
"""

from __future__ import annotations

import re
from pathlib import Path

from tools import result_age, settings_table
from tools.result_tables import TABLES

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
ALL_TABLES = {**TABLES, "settings": settings_table.table}


def fill(page: str) -> str:
    """Return a page with its tables as they should be now.

    Raises:
        ValueError: a page asks for a table that does not exist, or `<!-- end -->` is missing.
    """

    def table(found: re.Match[str]) -> str:
        name, old = found.groups()
        if name not in ALL_TABLES:
            raise ValueError(f"there is no table {name}; there are {', '.join(sorted(ALL_TABLES))}")
        if old is None or "<!-- table:" in old:
            raise ValueError(f"`<!-- end -->` is missing after the table {name}")
        return f"<!-- table: {name} -->\n\n{ALL_TABLES[name]()}\n\n<!-- end -->"

    return re.sub(r"<!-- table: (\S+) -->(?:(.*?)<!-- end -->)?", table, page, flags=re.DOTALL)


def main() -> None:
    """Fill all pages, and list which results are older than the files that they exercise."""
    for path in PAGES:
        old = path.read_text(encoding="utf-8")
        new = fill(old)
        if new != old:
            path.write_text(new, encoding="utf-8")
            print(f"updated {path.relative_to(ROOT)}")
    for line in result_age.lines():
        print(line)


if __name__ == "__main__":
    main()
