"""Tables over all results."""

from __future__ import annotations

from tools.result_tables.markdown import RESULTS, commits, head, result_of, row_of


def bars() -> str:
    """All bars of all results, including those that do not hold."""
    lines = head("benchmark", "bar", "measured", "target", "holds")
    for path in sorted(RESULTS.glob("*.json")):
        result = result_of(path.stem)
        parts = {"": result} | {
            f"{load}, {way}: ": part for load, ways in result.get("loads", {}).items() for way, part in ways.items()
        }
        for part, measured_part in parts.items():
            for bar, outcome in measured_part.get("bars", {}).items():
                measured = outcome["measured"]
                shown = f"{measured:.4g}" if isinstance(measured, (int, float)) else str(measured)
                holds = "yes" if outcome["holds"] else "**no**"
                lines.append(row_of(path.stem, part + bar, shown, outcome["target"], holds))
    num_missed = sum(line.endswith("**no** |") for line in lines)
    return "\n".join([*lines, "", f"{num_missed} of {len(lines) - 2} bars do not hold."])


def results() -> str:
    """When and at which commit every result was measured."""
    lines = head("result", "date", "commit")
    for path in sorted(RESULTS.glob("*.json")):
        result = result_of(path.stem)
        lines.append(row_of(f"`{path.name}`", result["date"], commits(result)))
    return "\n".join(lines)
