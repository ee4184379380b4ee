"""Builds the page: a table of the runs, then sections with figures, or with the setting that records their data."""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from rhyme_verl.commands.report import figures
from rhyme_verl.commands.report.run import Run
from rhyme_verl.config import KEY

STATS = f"{KEY}.stats_path"
FILE_LOGGER = "`file` in trainer.logger (and VERL_FILE_LOGGER_PATH)"
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1c2330; max-width: 1180px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; margin-bottom: .2rem; } h2 { font-size: 1.15rem; margin: 2.2rem 0 .2rem; }
p { margin: .2rem 0 .6rem; color: #4a5365; } .missing { background: #f4f5f7; padding: .6rem .9rem; border-radius: 6px; }
code { font-size: .9em; background: #f4f5f7; padding: 0 .25em; border-radius: 3px; }
.table { overflow-x: auto; } table { border-collapse: collapse; margin-top: .8rem; white-space: nowrap; }
th, td { padding: .3rem .8rem; border-bottom: 1px solid #dfe3ea; text-align: right; }
th:first-child, td:first-child { text-align: left; }
.swatch { display: inline-block; width: .8em; height: .8em; border-radius: 2px; margin-right: .5em; }
"""


@dataclass(frozen=True)
class Section:
    """A heading, a caption, the function that draws the figures, and the settings that record their data."""

    title: str
    text: str
    draw: Callable[[Sequence[Run]], list[go.Figure]]
    needs: str


SECTIONS = (
    Section("Reward", "Mean reward of each training step.", figures.reward, FILE_LOGGER),
    Section(
        "Rollout time",
        "Seconds during which the slowest replica had requests, and tokens generated per second. Without rhyme's "
        "statistics, verl's own timing is shown, which is accurate to about two seconds.",
        figures.rollout_time,
        f"`{STATS}`",
    ),
    Section(
        "Acceptance by step",
        "Accepted tokens per draft token, and accepted tokens per verified draft.",
        figures.drafting,
        f"`{STATS}`",
    ),
    Section(
        "Acceptance by epoch",
        "In the first epoch, prompts have no history: drafts come from siblings and from counts over all prompts.",
        figures.acceptance_by_epoch,
        f"`{STATS}`, and {FILE_LOGGER} for the epochs",
    ),
    Section(
        "Acceptance by position in the answer",
        "Acceptance rate by the position at which a draft began, over all steps.",
        figures.acceptance_by_place,
        f"`{STATS}`",
    ),
    Section(
        "Drafted and accepted",
        "All draft tokens of a step. Each accepted token saves a forward pass; the rejected ones are overhead.",
        figures.drafted_and_accepted,
        f"`{STATS}`",
    ),
    Section(
        "Predicted and actual lengths",
        "Tokens of each answer versus HistoPipe's prediction at its dispatch. On the dotted line, both are equal.",
        figures.lengths,
        f"HistoPipe (the router of rhyme_verl in `rollout.router_config_path`) and `{STATS}`",
    ),
    Section(
        "Replicas over time",
        "Share of a replica's lanes that run a request. The bubble is the idle share while any replica runs one.",
        figures.timelines,
        f"HistoPipe (the router of rhyme_verl in `rollout.router_config_path`) and `{STATS}`",
    ),
    Section("History", "Size of the store of all answers.", figures.history, f"`{STATS}`"),
    Section(
        "Answer lengths",
        "Median and 99th percentile of the recorded training answers, per epoch.",
        figures.answer_lengths,
        f"`{KEY}.trace.path`",
    ),
)


def build(runs: Sequence[Run]) -> str:
    """Return the page as self-contained HTML."""
    names = ", ".join(run.name for run in runs)
    parts = [
        "<!doctype html>",
        f'<html lang="en"><head><meta charset="utf-8"><title>rhyme: {html.escape(names)}</title>',
        '<meta name="viewport" content="width=device-width"><link rel="icon" href="data:,">',
        f"<style>{STYLE}</style><script>{get_plotlyjs()}</script></head><body>",
        "<h1>rhyme report</h1>",
        f"<p>{html.escape(names)}</p>",
        _table(runs),
    ]
    for section in SECTIONS:
        parts.append(f"<section><h2>{html.escape(section.title)}</h2><p>{_code(section.text)}</p>")
        drawn = section.draw(runs)
        for figure in drawn:
            parts.append(
                figure.to_html(
                    full_html=False, include_plotlyjs=False, config={"displayModeBar": False, "responsive": True}
                )
            )
        if not drawn:
            parts.append(f'<p class="missing">No data. It is recorded with {_code(section.needs)}.</p>')
        parts.append("</section>")
    parts.append("</body></html>")
    return "\n".join(parts)


def _table(runs: Sequence[Run]) -> str:
    rows = [_facts(run) for run in runs]
    headings = "".join(f"<th>{html.escape(name)}</th>" for name in ("run", *rows[0]))
    body = ""
    for index, (run, row) in enumerate(zip(runs, rows, strict=True)):
        colour = figures.COLOURS[index % len(figures.COLOURS)]
        cells = "".join(f"<td>{html.escape(value)}</td>" for value in row.values())
        name = f'<span class="swatch" style="background:{colour}"></span>{html.escape(run.name)}'
        body += f"<tr><td>{name}</td>{cells}</tr>"
    return f'<div class="table"><table><thead><tr>{headings}</tr></thead><tbody>{body}</tbody></table></div>'


def _facts(run: Run) -> dict[str, str]:
    _, rewards = run.series("critic/rewards/mean", "critic/score/mean")
    steps = run.rollout_steps()
    seconds = sum(run.largest("busy_seconds", step) for step in steps)
    drafted, accepted, verified = (
        run.total(name) for name in ("num_draft_tokens", "num_accepted_tokens", "num_drafts")
    )
    bubble = figures.bubble(run)
    return {
        "steps": str(len(run.metrics) or len(steps)),
        "last reward": f"{rewards[-1]:.3f}" if rewards else "-",
        "rollout s": f"{seconds:,.1f}" if steps else "-",
        "tokens": f"{run.total('tokens'):,.0f}" if steps else "-",
        "tokens/s": f"{run.total('tokens') / seconds:,.0f}" if seconds else "-",
        "acceptance": f"{accepted / drafted:.0%}" if drafted else "-",
        "accepted/verify": f"{accepted / verified:.2f}" if verified else "-",
        "s saved (est.)": f"{run.total('saved_seconds'):,.1f}" if run.total("saved_seconds") else "-",
        "bubble": f"{bubble:.0%}" if bubble is not None else "-",
    }


def _code(text: str) -> str:
    """Escape a text for HTML; parts between backticks become code."""
    parts = html.escape(text).split("`")
    return "".join(f"<code>{part}</code>" if i % 2 else part for i, part in enumerate(parts))
