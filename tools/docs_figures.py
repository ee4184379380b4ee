"""Draws README's figures from benchmarks/results into docs/figures, for light and dark pages: `make docs-figures`."""

from __future__ import annotations

import statistics
from pathlib import Path

from benchmarks.engines.running import mean_running
from tools.result_tables.markdown import fastest_suffix, result_of
from tools.svg import Panel, Series, draw

FOLDER = Path(__file__).parents[1] / "docs/figures"
Label = tuple[str, float, float]


def figures() -> dict[str, str]:
    """Return the text of each SVG by its file name."""
    drawn = {
        "age": (_ages(), "Steps per hour against the maximum age of answers"),
        "speedup": (_speedups(), "Tokens per second relative to stock vLLM against the number of running sequences"),
    }
    return {
        f"{name}-{theme}.svg": draw(panels, theme, alt)
        for name, (panels, alt) in drawn.items()
        for theme in ("light", "dark")
    }


def _ages() -> list[Panel]:
    """Steps per hour against maximum age: whole emulated jobs, and simulated schedulers without drafts."""
    jobs = result_of("end_to_end")["summary"]

    def job(case: str, colour: str, label: Label) -> Series:
        return Series(x=[jobs[case]["age_max"]], y=[jobs[case]["steps_per_hour"]], colour=colour, labels=[label])

    emulated = Panel(
        title="Whole jobs, A100 step times (emulated)", x_label="maximum age (weight updates)",
        y_label="steps per hour", x_ticks=range(8), y_ticks=range(0, 1401, 200), pad=34,
        series=[
            job("sync stock", "grey", ("sync, stock", 10, 4)),
            job("sync suffix best", "orange", ("sync, suffix", 10, -4)),
            job("sync rhyme", "blue", ("sync, rhyme", 10, 4)),
            job("colocate stock", "grey", ("colocate_async, stock", -10, 14)),
            job("colocate wait 2", "grey", ("verl's wait 2", 0, 22)),
            job("colocate wait 3", "grey", ("verl's wait 3", 10, 14)),
            job("colocate suffix best", "orange", ("colocate_async, suffix", -10, -6)),
            job("colocate rhyme", "blue", ("colocate_async, rhyme", 10, -8)),
        ],
    )  # fmt: skip
    rows = [row for row in result_of("pipe")["rows"] if row["factor"] == "base" and not row["drafted"]]

    def played(cases: list[str], colour: str, *labels: Label) -> Series:
        of_case = [[row for row in rows if row["case"] == case] for case in cases]
        return Series(
            x=[max(row["age_max"] for row in some) for some in of_case],
            y=[statistics.median(row["steps_per_hour"] for row in some) for some in of_case],
            colour=colour, labels=labels,
        )  # fmt: skip

    ours = ["sync, histopipe", *(f"colocate async, histopipe, max_age {age}" for age in (1, 2, 3))]
    simulated = Panel(
        title="Scheduling alone, without drafts (simulated)", x_label="maximum age (weight updates)",
        y_label="steps per hour", x_ticks=range(8), y_ticks=range(0, 61, 10), pad=34,
        series=[
            played(["sync, verl"], "grey"),
            played(["one step off, verl"], "grey", ("one step off, verl", 10, 4)),
            played([f"colocate async, verl, wait {num}" for num in (2, 3)], "grey", ("verl's wait", 10, 4)),
            played(["colocate async, verl"], "grey", ("colocate_async, verl", -2, 20)),
            played(["separate async, histopipe"], "blue", ("separate_async, HistoPipe", 0, -12)),
            played(["pipelined, two-tier"], "green", ("the paper's order", 10, 6)),
            played(
                ours, "blue", ("sync, both", 0, 20), ("max_age 1", -8, -6), ("max_age 2", -8, -6),
                ("HistoPipe, max_age 3", 10, -4),
            ),
        ],
    )  # fmt: skip
    return [emulated, simulated]


def _speedups() -> list[Panel]:
    """Speed-up of engines with three epochs of history and host time, for two devices."""
    loads = result_of("rollout")["loads"]
    texts = {
        "longtail": ("blue", "long-tail text"),
        "gsm8k": ("green", "GSM8K"),
        "gsm8k-noisy": ("orange", "GSM8K, noisy"),
    }
    panels = []
    for way, title in (
        ("full history, scale 1", "A100 step times"),
        ("full history, scale 0.25", "A device 4 times as fast"),
    ):
        series = []
        for text, (colour, name) in texts.items():
            summary = loads[text][way]["summary"]
            stock = loads[text][way]["runs"]["none"]
            ours = {running: row["ratio"]["median"] for running, row in summary["rhyme"].items()}
            theirs = {running: fastest_suffix(summary, running) for running in ours}
            for method, ratios in (("rhyme", ours), ("suffix", theirs)):
                series.append(
                    Series(
                        x=[max(1.0, mean_running(stock[most])) for most in ratios],
                        y=list(ratios.values()),
                        colour=colour,
                        dashed=method == "suffix",
                        legend=f"{name}, {method}",
                    )  # fmt: skip
                )
        panels.append(
            Panel(
                title=f"{title}: tokens/s / stock vLLM",
                x_label="running sequences, mean of stock vLLM",
                y_label="speed-up",
                x_ticks=(1, 2, 4, 8, 16, 32, 64, 128, 256),
                y_ticks=(0.25, 0.5, 1, 2, 4, 8, 16),
                log=True,
                series=series,
            )  # fmt: skip
        )
    return panels


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, text in figures().items():
        (FOLDER / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
