"""Builds the page: a table of the runs, then sections with figures, or with the setting that records their data."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from rhyme_verl.commands.report import figures
from rhyme_verl.commands.report.run import REWARD, Run, ratio
from rhyme_verl.config import KEY

STATS = f"`{KEY}.stats_path`"
ROUTER = f"HistoPipe (the router of rhyme_verl in `rollout.router_config_path`) and {STATS}"
FILE_LOGGER = "`file` in trainer.logger (and VERL_FILE_LOGGER_PATH)"
CONFIG = {"displayModeBar": False, "responsive": True}  # of every figure
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


class Section(NamedTuple):
    """A heading, the function that draws the figures, a caption, and the settings that record the data."""

    title: str
    draw: Callable[[Sequence[Run]], list[go.Figure]]
    text: str
    needs: str = STATS


SECTIONS = (
    Section("Reward", figures.reward, "Mean reward of each training step.", FILE_LOGGER),
    Section(
        "Rollout time",
        figures.rollout_time,
        "Seconds during which the slowest replica had requests, and tokens generated per second. Without rhyme's "
        "statistics, verl's own timing is shown, which is accurate to about two seconds.",
    ),
    Section(
        "Acceptance by step",
        figures.drafting,
        "Accepted tokens per draft token, and accepted tokens per verified draft.",
    ),
    Section(
        "Acceptance by epoch",
        figures.acceptance_by_epoch,
        "In the first epoch, prompts have no history: drafts come from siblings and from counts over all prompts.",
        f"{STATS}, and {FILE_LOGGER} for the epochs",
    ),
    Section(
        "Acceptance by position in the answer",
        figures.acceptance_by_place,
        "Acceptance rate by the position at which a draft began, over all steps.",
    ),
    Section(
        "Drafted and accepted",
        figures.drafted_and_accepted,
        "All draft tokens of a step. Each accepted token saves a forward pass; the rejected ones are overhead.",
    ),
    Section(
        "Predicted and actual lengths",
        figures.lengths,
        "Tokens of each answer versus HistoPipe's prediction at its dispatch. On the dotted line, both are equal.",
        ROUTER,
    ),
    Section(
        "Replicas over time",
        figures.timelines,
        "Share of a replica's lanes that run a request. The bubble is the idle share while any replica runs one.",
        ROUTER,
    ),
    Section("History", figures.history, "Size of the store of all answers."),
    Section(
        "Answer lengths",
        figures.answer_lengths,
        "Median and 99th percentile of the recorded training answers, per epoch.",
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
        parts += [figure.to_html(full_html=False, include_plotlyjs=False, config=CONFIG) for figure in drawn]
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
        cells = "".join(f"<td>{html.escape(value)}</td>" for value in row.values())
        name = f'<span class="swatch" style="background:{figures.colour(index)}"></span>{html.escape(run.name)}'
        body += f"<tr><td>{name}</td>{cells}</tr>"
    return f'<div class="table"><table><thead><tr>{headings}</tr></thead><tbody>{body}</tbody></table></div>'


def _facts(run: Run) -> dict[str, str]:
    rewards = run.series(*REWARD)
    seconds, tokens = run.largest("busy_seconds"), run.total("tokens").sum(min_count=1)
    accepted = run.total("num_accepted_tokens").sum()
    facts = {
        "last reward": (rewards.iloc[-1] if len(rewards) else math.nan, ".3f"),
        "rollout s": (seconds.sum(min_count=1), ",.1f"),
        "tokens": (tokens, ",.0f"),
        "tokens/s": (ratio(tokens, seconds.sum()), ",.0f"),
        "acceptance": (ratio(accepted, run.total("num_draft_tokens").sum()), ".0%"),
        "accepted/verify": (ratio(accepted, run.total("num_drafts").sum()), ".2f"),
        "s saved (est.)": (run.total("saved_seconds").sum() or math.nan, ",.1f"),
        "bubble": (figures.bubble(run), ".0%"),
    }
    shown = {name: "-" if math.isnan(value) else format(value, style) for name, (value, style) in facts.items()}
    return {"steps": str(len(run.metrics) or len(seconds)), **shown}


def _code(text: str) -> str:
    """Escape a text for HTML; parts between backticks become code."""
    parts = html.escape(text).split("`")
    return "".join(f"<code>{part}</code>" if i % 2 else part for i, part in enumerate(parts))
