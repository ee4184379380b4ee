"""Draws runs side by side with plotly. Each function returns its figures, none if no run has the data."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from rhyme_verl.commands.report.run import REWARD, Run, ratio
from rhyme_verl.histopipe.lengths import rank_correlation
from rhyme_verl.telemetry.rollout_stats import POSITIONS

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#4d4d4d", "#b8a200")  # by Okabe and Ito
TIME_BINS = 600
MAX_ROWS = 64  # replicas in a timeline; of more, an even selection is drawn
MAX_POINTS = 2000  # per scatter plot
OCTAVE = float(np.log10(2.0))  # distance between ticks of a logarithmic axis
RATES = {"acceptance rate": "num_draft_tokens", "accepted per verify": "num_drafts"}  # denominators


def reward(runs: Sequence[Run]) -> list[go.Figure]:
    return _lines(runs, {"mean reward": [run.series(*REWARD) for run in runs]})


def rollout_time(runs: Sequence[Run]) -> list[go.Figure]:
    seconds, speeds = [], []
    for run in runs:
        busy = run.largest("busy_seconds")
        seconds.append(run.known(busy, "rhyme/rollout/busy_s", "timing_s/gen"))
        speeds.append(run.known(ratio(run.total("tokens"), busy), "rhyme/rollout/tokens_per_s"))
    return _lines(runs, {"seconds per rollout": seconds, "generated tokens per second": speeds})


def drafting(runs: Sequence[Run]) -> list[go.Figure]:
    panels = {}
    for name, denominator in RATES.items():
        metric = f"rhyme/spec/{name.replace(' ', '_')}"
        panels[name] = [run.known(run.accepted_per(denominator), metric) for run in runs]
    return _lines(runs, panels)


def drafted_and_accepted(runs: Sequence[Run]) -> list[go.Figure]:
    """Stack accepted and rejected draft tokens, with one panel per run."""
    drawn = []
    for run in runs:
        drafted = run.known(run.total("num_draft_tokens"), "rhyme/spec/draft_tokens")
        if drafted.any():
            accepted = run.known(run.total("num_accepted_tokens"), "rhyme/spec/accepted_tokens")
            drawn.append((run.name, {"accepted": accepted, "rejected": drafted - accepted}))
    if not drawn:
        return []
    figure = make_subplots(1, len(drawn), subplot_titles=[name for name, *_ in drawn], shared_yaxes=True)
    for column, (_, stack) in enumerate(drawn, 1):
        for name, shade in (("accepted", COLOURS[2]), ("rejected", "#c9ccd1")):
            style = {"marker_color": shade, "legendgroup": "tokens", "showlegend": column == 1}
            figure.add_bar(x=stack[name].index, y=stack[name], name=name, row=1, col=column, **style)
    figure.update_layout(barmode="stack", bargap=0.1)
    figure.update_xaxes(title_text="training step")
    figure.update_yaxes(title_text="draft tokens", col=1)
    return _styled(figure)


def acceptance_by_epoch(runs: Sequence[Run]) -> list[go.Figure]:
    figure = make_subplots(1, 2, subplot_titles=list(RATES), horizontal_spacing=0.1)
    for index, run in enumerate(runs):
        for column, denominator in enumerate(RATES.values(), 1):
            rates = run.accepted_per(denominator, by="epoch").dropna()
            if len(rates):
                style = {"marker_color": colour(index), "legendgroup": run.name, "showlegend": column == 1}
                figure.add_bar(x=rates.index, y=rates, name=run.name, row=1, col=column, **style)
    figure.update_xaxes(title_text="epoch", dtick=1)
    figure.update_yaxes(rangemode="tozero")
    return _styled(figure)


def acceptance_by_place(runs: Sequence[Run]) -> list[go.Figure]:
    figure = go.Figure()
    for index, run in enumerate(runs):
        drafted = {place: run.total(f"draft_tokens_from_{place}").sum() for place in POSITIONS}
        known = [place for place, count in drafted.items() if count]
        if known:
            figure.add_scatter(
                x=[_range(place) for place in known],
                y=[run.total(f"accepted_tokens_from_{place}").sum() / drafted[place] for place in known],
                customdata=[drafted[place] for place in known],
                hovertemplate="%{y:.1%} of %{customdata:,} draft tokens",
                name=run.name,
                mode="lines+markers",
                line_color=colour(index),
            )
    figure.update_xaxes(title_text="token of the answer at which the draft began", type="category")
    figure.update_yaxes(title_text="acceptance rate", tickformat=".0%", rangemode="tozero")
    return _styled(figure)


def lengths(runs: Sequence[Run]) -> list[go.Figure]:
    """Plot actual versus predicted tokens and the diagonal, with one panel per run."""
    drawn = [(run, run.schedule.dropna(subset=["tokens"])) for run in runs if not run.schedule.empty]
    if not drawn:
        return []
    titles = [
        f"{run.name}: rank correlation {rank_correlation(answers['predicted'], answers['tokens']):.2f}"
        for run, answers in drawn
    ]
    figure = make_subplots(1, len(drawn), subplot_titles=titles, shared_yaxes=True)
    for column, (run, answers) in enumerate(drawn, 1):
        lines = answers.iloc[:: len(answers) // MAX_POINTS + 1]
        predicted, actual = lines["predicted"].clip(lower=1.0), lines["tokens"].clip(lower=1)
        marker = {"color": colour(runs.index(run)), "size": 4, "opacity": 0.35}
        place = {"row": 1, "col": column, "showlegend": False}
        figure.add_scatter(x=predicted, y=actual, mode="markers", marker=marker, name=run.name, **place)
        ends = [min(predicted.min(), actual.min()), max(predicted.max(), actual.max())]
        line = {"color": "#4d4d4d", "width": 1, "dash": "dot"}
        figure.add_scatter(x=ends, y=ends, mode="lines", line=line, hoverinfo="skip", **place)
    figure.update_xaxes(title_text="predicted tokens", type="log", dtick=OCTAVE, tickformat=".0f")
    figure.update_yaxes(type="log", dtick=OCTAVE, tickformat=".0f")
    figure.update_yaxes(title_text="actual tokens", col=1)
    return _styled(figure, height=420)


def timelines(runs: Sequence[Run]) -> list[go.Figure]:
    """Draw one timeline per run: the more lanes of a replica run, the darker it is; white is bubble."""
    return [figure for run in runs if not run.schedule.empty for figure in _timeline(run)]


def history(runs: Sequence[Run]) -> list[go.Figure]:
    tokens = [run.known(run.largest("history_store_tokens"), "rhyme/history/tokens") for run in runs]
    size = [run.known(run.largest("history_store_bytes"), "rhyme/history/bytes") / 2**20 for run in runs]
    return _lines(runs, {"tokens in the store": tokens, "MiB in the store": size})


def answer_lengths(runs: Sequence[Run]) -> list[go.Figure]:
    """Plot length quantiles of the recorded training answers by epoch."""
    figure = go.Figure()
    for index, run in enumerate(runs):
        if run.trace is None:
            continue
        answers = run.trace.to_pandas()
        by_epoch = answers[~answers["validate"]].groupby("epoch")["length"]
        for name, quantile, dash in (("median", 0.5, "solid"), ("p99", 0.99, "dot")):
            values = by_epoch.quantile(quantile)
            figure.add_scatter(
                x=values.index,
                y=values,
                name=f"{run.name}, {name}",
                mode="lines+markers",
                line={"color": colour(index), "dash": dash},
            )
    figure.update_xaxes(title_text="epoch", dtick=1)
    figure.update_yaxes(title_text="tokens per answer", rangemode="tozero")
    return _styled(figure)


def bubble(run: Run) -> float:
    """Return the idle share of lane-seconds while any replica runs a request; NaN without a schedule."""
    if run.schedule.empty:
        return float("nan")
    schedule = run.schedule.sort_values("start")
    busy = (schedule["end"] - schedule["start"]).sum()
    active_from = np.maximum(schedule["start"], schedule["end"].cummax().shift(fill_value=float("-inf")))
    active = (schedule["end"] - active_from).clip(lower=0.0).sum()
    return 1.0 - float(ratio(busy, schedule.groupby("replica")["lanes"].last().sum() * active))


def _timeline(run: Run) -> list[go.Figure]:
    requests = dict(iter(run.schedule.groupby("replica")))
    names = sorted(requests, key=lambda name: (len(name), name))
    start = run.schedule["start"].min()
    width = max(run.schedule["end"].max() - start, 1e-3) / TIME_BINS
    bins = np.arange(TIME_BINS)
    rows = np.unique(np.linspace(0, len(names) - 1, min(len(names), MAX_ROWS)).astype(int))
    drawn = [names[row] for row in rows]
    running = {name: np.zeros(TIME_BINS) for name in drawn}
    for name in drawn:  # adds to each bin the part of it during which a request ran
        for first, last in (requests[name][["start", "end"]].to_numpy() - start) / width:
            running[name] += np.clip(last - bins, 0.0, 1.0) - np.clip(first - bins, 0.0, 1.0)
        running[name] /= requests[name]["lanes"].iloc[-1]
    figure = go.Figure(
        go.Heatmap(
            z=np.array(list(running.values())).round(3),
            x=(bins * width).round(3),
            y=drawn,
            zmin=0.0,
            zmax=1.0,
            colorscale=[[0.0, "#ffffff"], [0.001, "#d4e6f3"], [1.0, "#08468c"]],
            colorbar={"title": "lanes running", "tickformat": ".0%", "thickness": 12},
            hovertemplate="%{y}, %{x:.1f} s: %{z:.0%} of its lanes run<extra></extra>",
        )
    )
    figure.update_xaxes(title_text="seconds")
    figure.update_yaxes(title_text="replica", type="category", autorange="reversed")
    figure.update_layout(title={"text": f"{run.name}: bubble {bubble(run):.0%}", "font": {"size": 14}})
    return _styled(figure, height=150 + 22 * max(len(rows), 4), margin_top=40)


def _lines(runs: Sequence[Run], panels: dict[str, list[pd.Series]]) -> list[go.Figure]:
    """Return one figure with one panel per quantity and one line per run; a panel has the values of all runs."""
    figure = make_subplots(1, len(panels), subplot_titles=list(panels), horizontal_spacing=0.1)
    named: set[str] = set()
    for column, panel in enumerate(panels.values(), 1):
        for index, (run, values) in enumerate(zip(runs, panel, strict=True)):
            if len(values):
                mode = "lines+markers" if len(values) < 50 else "lines"
                style = {"mode": mode, "line_color": colour(index), "legendgroup": run.name}
                shown = run.name not in named
                figure.add_scatter(
                    x=values.index, y=values, name=run.name, showlegend=shown, row=1, col=column, **style
                )
                named.add(run.name)
    figure.update_xaxes(title_text="training step")
    figure.update_yaxes(rangemode="tozero")
    return _styled(figure)


def _range(place: int) -> str:
    after = [other for other in POSITIONS if other > place]
    return f"{place}-{after[0] - 1}" if after else f"{place}-"


def colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]


def _styled(figure: go.Figure, height: int = 340, margin_top: int = 30) -> list[go.Figure]:
    """Return the figure in the page's style, or nothing if it is empty."""
    figure.update_layout(
        template="plotly_white",
        height=height,
        margin={"l": 60, "r": 20, "t": margin_top, "b": 50},
        font={"family": "system-ui, sans-serif", "size": 13},
        legend={"orientation": "h", "y": -0.25},
        hovermode="closest",
    )
    return [figure] if figure.data else []
