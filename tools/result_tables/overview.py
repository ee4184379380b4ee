"""Tables over all results."""

from __future__ import annotations

from tools.result_tables.markdown import RESULTS, commits, head, result_of, row_of


def bars() -> str:
    """All bars of all results."""
    return _table(_bars())


def missed_bars() -> str:
    """The bars that do not hold, and their number."""
    rows = _bars()
    missed = [row for row in rows if not row[-1]]
    return f"{len(missed)} of {len(rows)} bars do not hold:\n\n{_table(missed)}"


def _bars() -> list[tuple[str, str, str, str, bool]]:
    """Return benchmark, bar, measured value, target, and whether it holds."""
    rows = []
    for path in sorted(RESULTS.glob("*.json")):
        result = result_of(path.stem)
        parts = {"": result} | {
            f"{load}, {way}: ": part for load, ways in result.get("loads", {}).items() for way, part in ways.items()
        }
        for part, measured_part in parts.items():
            for bar, outcome in measured_part.get("bars", {}).items():
                measured = outcome["measured"]
                shown = f"{measured:.4g}" if isinstance(measured, (int, float)) else str(measured)
                rows.append((path.stem, part + bar, shown, outcome["target"], outcome["holds"]))
    return rows


def _table(rows: list[tuple[str, str, str, str, bool]]) -> str:
    lines = head("benchmark", "bar", "measured", "target", "holds")
    return "\n".join([*lines, *(row_of(*facts, "yes" if holds else "**no**") for *facts, holds in rows)])


def results() -> str:
    """When and at which commit every result was measured."""
    lines = head("result", "date", "commit")
    for path in sorted(RESULTS.glob("*.json")):
        result = result_of(path.stem)
        lines.append(row_of(f"`{path.name}`", result["date"], commits(result)))
    return "\n".join(lines)
