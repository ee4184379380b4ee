"""Draws runs side by side with plotly. Each function returns its figures, none if no run has the data."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from rhyme_verl.commands.report.run import Run
from rhyme_verl.histopipe.lengths import rank_correlation
from rhyme_verl.telemetry.rollout_stats import POSITIONS

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#4d4d4d", "#b8a200")  # by Okabe and Ito
TIME_BINS = 600
MAX_ROWS = 64  # replicas in a timeline; of more, an even selection is drawn
MAX_POINTS = 2000  # per scatter plot
OCTAVE = float(np.log10(2.0))  # distance between ticks of a logarithmic axis
Series = tuple[list[int], list[float]]


def reward(runs: Sequence[Run]) -> list[go.Figure]:
    return _lines(runs, {"mean reward": lambda run: run.series("critic/rewards/mean", "critic/score/mean")})


def rollout_time(runs: Sequence[Run]) -> list[go.Figure]:
    return _lines(
        runs,
        {
            "seconds per rollout": lambda run: (
                _by_step(run, lambda step: run.largest("busy_seconds", step))
                if run.rollouts
                else run.series("rhyme/rollout/busy_s", "timing_s/gen")
            ),
            "generated tokens per second": lambda run: (
                _rate(run, "tokens", None) if run.rollouts else run.series("rhyme/rollout/tokens_per_s")
            ),
        },
    )


def drafting(runs: Sequence[Run]) -> list[go.Figure]:
    return _lines(
        runs,
        {
            "acceptance rate": lambda run: (
                _rate(run, "num_accepted_tokens", "num_draft_tokens")
                if run.rollouts
                else run.series("rhyme/spec/acceptance_rate")
            ),
            "accepted per verify": lambda run: (
                _rate(run, "num_accepted_tokens", "num_drafts")
                if run.rollouts
                else run.series("rhyme/spec/accepted_per_verify")
            ),
        },
    )


def drafted_and_accepted(runs: Sequence[Run]) -> list[go.Figure]:
    """Stack accepted and rejected draft tokens, with one panel per run."""
    drawn = []
    for run in runs:
        steps, tokens = _counts(run, "num_draft_tokens", "rhyme/spec/draft_tokens")
        _, accepted_tokens = _counts(run, "num_accepted_tokens", "rhyme/spec/accepted_tokens")
        if any(tokens):
            drawn.append((run, steps, np.array(tokens), np.array(accepted_tokens)))
    if not drawn:
        return []
    figure = make_subplots(1, len(drawn), subplot_titles=[run.name for run, *_ in drawn], shared_yaxes=True)
    for column, (_, steps, drafted, accepted) in enumerate(drawn, 1):
        shared = {"legendgroup": "tokens", "showlegend": column == 1}
        figure.add_bar(x=steps, y=accepted, name="accepted", marker_color=COLOURS[2], row=1, col=column, **shared)
        figure.add_bar(
            x=steps, y=drafted - accepted, name="rejected", marker_color="#c9ccd1", row=1, col=column, **shared
        )
    figure.update_layout(barmode="stack", bargap=0.1)
    figure.update_xaxes(title_text="training step")
    figure.update_yaxes(title_text="draft tokens", col=1)
    return [_styled(figure)]


def acceptance_by_epoch(runs: Sequence[Run]) -> list[go.Figure]:
    figure = make_subplots(1, 2, subplot_titles=["acceptance rate", "accepted per verify"], horizontal_spacing=0.1)
    found = False
    for index, run in enumerate(runs):
        epochs = run.epochs()
        for column, by in ((1, "num_draft_tokens"), (2, "num_drafts")):
            counts = {epoch: run.total(by, steps) for epoch, steps in epochs.items()}
            known = [epoch for epoch, count in counts.items() if count]
            values = [run.total("num_accepted_tokens", epochs[epoch]) / counts[epoch] for epoch in known]
            if known:
                found = True
                style = {"marker_color": _colour(index), "legendgroup": run.name, "showlegend": column == 1}
                figure.add_bar(x=known, y=values, name=run.name, row=1, col=column, **style)
    figure.update_xaxes(title_text="epoch", dtick=1)
    figure.update_yaxes(rangemode="tozero")
    return [_styled(figure)] if found else []


def acceptance_by_place(runs: Sequence[Run]) -> list[go.Figure]:
    figure = go.Figure()
    for index, run in enumerate(runs):
        drafted = [run.total(f"draft_tokens_from_{position}") for position in POSITIONS]
        accepted = [run.total(f"accepted_tokens_from_{position}") for position in POSITIONS]
        known = [i for i, count in enumerate(drafted) if count]
        if known:
            figure.add_scatter(
                x=[_range(i) for i in known],
                y=[accepted[i] / drafted[i] for i in known],
                customdata=[drafted[i] for i in known],
                hovertemplate="%{y:.1%} of %{customdata:,} draft tokens",
                name=run.name,
                mode="lines+markers",
                line_color=_colour(index),
            )
    figure.update_xaxes(title_text="token of the answer at which the draft began", type="category")
    figure.update_yaxes(title_text="acceptance rate", tickformat=".0%", rangemode="tozero")
    return [_styled(figure)] if figure.data else []


def lengths(runs: Sequence[Run]) -> list[go.Figure]:
    """Plot actual versus predicted tokens and the diagonal, with one panel per run."""
    drawn = [run for run in runs if run.schedule]
    if not drawn:
        return []
    titles = [f"{run.name}: rank correlation {_rank_correlation(run):.2f}" for run in drawn]
    figure = make_subplots(1, len(drawn), subplot_titles=titles, shared_yaxes=True)
    for column, run in enumerate(drawn, 1):
        lines = run.schedule[:: len(run.schedule) // MAX_POINTS + 1]
        predicted = [max(line["predicted"], 1.0) for line in lines]
        actual = [max(line["tokens"], 1) for line in lines]
        marker = {"color": _colour(runs.index(run)), "size": 4, "opacity": 0.35}
        place = {"row": 1, "col": column, "showlegend": False}
        figure.add_scatter(x=predicted, y=actual, mode="markers", marker=marker, name=run.name, **place)
        ends = [min(predicted + actual), max(predicted + actual)]
        line = {"color": "#4d4d4d", "width": 1, "dash": "dot"}
        figure.add_scatter(x=ends, y=ends, mode="lines", line=line, hoverinfo="skip", **place)
    figure.update_xaxes(title_text="predicted tokens", type="log", dtick=OCTAVE, tickformat=".0f")
    figure.update_yaxes(type="log", dtick=OCTAVE, tickformat=".0f")
    figure.update_yaxes(title_text="actual tokens", col=1)
    return [_styled(figure, height=420)]


def timelines(runs: Sequence[Run]) -> list[go.Figure]:
    """Draw one timeline per run: the more lanes of a replica run, the darker it is; white is bubble."""
    return [_timeline(run) for run in runs if run.schedule]


def history(runs: Sequence[Run]) -> list[go.Figure]:
    return _lines(
        runs,
        {
            "tokens in the store": lambda run: _history(run, "tokens", 1.0),
            "MiB in the store": lambda run: _history(run, "bytes", 2.0**20),
        },
    )


def answer_lengths(runs: Sequence[Run]) -> list[go.Figure]:
    """Plot length quantiles of the recorded training answers by epoch."""
    figure = go.Figure()
    for index, run in enumerate(runs):
        if run.trace is None:
            continue
        table = run.trace.filter(~run.trace.column("validate").to_numpy(zero_copy_only=False))
        epochs, tokens = table.column("epoch").to_numpy(), table.column("length").to_numpy()
        for quantile, dash in ((0.5, "solid"), (0.99, "dot")):
            figure.add_scatter(
                x=np.unique(epochs),
                y=[np.quantile(tokens[epochs == epoch], quantile) for epoch in np.unique(epochs)],
                name=f"{run.name}, {'median' if quantile == 0.5 else 'p99'}",
                mode="lines+markers",
                line={"color": _colour(index), "dash": dash},
            )
    figure.update_xaxes(title_text="epoch", dtick=1)
    figure.update_yaxes(title_text="tokens per answer", rangemode="tozero")
    return [_styled(figure)] if figure.data else []


def bubble(run: Run) -> float | None:
    """Return the idle share of lane-seconds while any replica runs a request; None without a schedule."""
    lanes = {line["replica"]: line["lanes"] for line in run.schedule}
    busy, active, end = 0.0, 0.0, float("-inf")
    for line in sorted(run.schedule, key=lambda line: line["start"]):
        busy += line["end"] - line["start"]
        active += max(line["end"] - max(line["start"], end), 0.0)
        end = max(end, line["end"])
    return 1.0 - busy / (sum(lanes.values()) * active) if active else None


def _timeline(run: Run) -> go.Figure:
    lanes = {line["replica"]: line["lanes"] for line in run.schedule}
    names = sorted(lanes, key=lambda name: (len(name), name))
    row_of = {name: row for row, name in enumerate(names)}
    start = min(line["start"] for line in run.schedule)
    width = max(max(line["end"] for line in run.schedule) - start, 1e-3) / TIME_BINS
    running = np.zeros((len(names), TIME_BINS + 1))
    for line in run.schedule:
        row, first, last = row_of[line["replica"]], (line["start"] - start) / width, (line["end"] - start) / width
        _add_span(running[row], first, last)
    share = running[:, :TIME_BINS] / np.array([[lanes[name]] for name in names])
    rows = np.unique(np.linspace(0, len(names) - 1, min(len(names), MAX_ROWS)).astype(int))
    figure = go.Figure(
        go.Heatmap(
            z=share[rows].round(3),
            x=(np.arange(TIME_BINS) * width).round(3),
            y=[names[row] for row in rows],
            zmin=0.0,
            zmax=1.0,
            colorscale=[[0.0, "#ffffff"], [0.001, "#d4e6f3"], [1.0, "#08468c"]],
            colorbar={"title": "lanes running", "tickformat": ".0%", "thickness": 12},
            hovertemplate="%{y}, %{x:.1f} s: %{z:.0%} of its lanes run<extra></extra>",
        )
    )
    figure.update_xaxes(title_text="seconds")
    figure.update_yaxes(title_text="replica", type="category", autorange="reversed")
    figure.update_layout(title={"text": f"{run.name}: bubble {bubble(run) or 0.0:.0%}", "font": {"size": 14}})
    return _styled(figure, height=150 + 22 * max(len(rows), 4), margin_top=40)


def _add_span(bins: np.ndarray, first: float, last: float) -> None:
    """Add to each bin the part of it, between `first` and `last` (fractional bins), in which a request ran."""
    low, high = int(first), min(int(last), TIME_BINS)
    if low == high:
        bins[low] += last - first
        return
    bins[low] += 1.0 - (first - low)
    bins[low + 1 : high] += 1.0
    bins[high] += last - high


def _rank_correlation(run: Run) -> float:
    return rank_correlation(*(np.array([line[name] for line in run.schedule]) for name in ("predicted", "tokens")))


def _lines(runs: Sequence[Run], panels: dict[str, Callable[[Run], Series]]) -> list[go.Figure]:
    """Return one figure with one panel per quantity and one line per run."""
    figure = make_subplots(1, len(panels), subplot_titles=list(panels), horizontal_spacing=0.1)
    named: set[str] = set()
    for column, series in enumerate(panels.values(), 1):
        for index, run in enumerate(runs):
            steps, values = series(run)
            if not steps:
                continue
            figure.add_scatter(
                x=steps,
                y=values,
                name=run.name,
                mode="lines+markers" if len(steps) < 50 else "lines",
                line_color=_colour(index),
                legendgroup=run.name,
                showlegend=run.name not in named,
                row=1,
                col=column,
            )
            named.add(run.name)
    figure.update_xaxes(title_text="training step")
    figure.update_yaxes(rangemode="tozero")
    return [_styled(figure)] if named else []


def _by_step(run: Run, value: Callable[[int], float]) -> Series:
    steps = run.rollout_steps()
    return steps, [value(step) for step in steps]


def _rate(run: Run, numerator: str, denominator: str | None) -> Series:
    """Return a ratio of sums over replicas per step; without a denominator, per second of the rollout."""
    steps, values = [], []
    for step in run.rollout_steps():
        below = run.total(denominator, [step]) if denominator else run.largest("busy_seconds", step)
        if below:
            steps.append(step)
            values.append(run.total(numerator, [step]) / below)
    return steps, values


def _counts(run: Run, count: str, metric: str) -> Series:
    return _by_step(run, lambda step: run.total(count, [step])) if run.rollouts else run.series(metric)


def _history(run: Run, what: str, unit: float) -> Series:
    if any(f"history_store_{what}" in rollout for rollout in run.rollouts):
        return _by_step(run, lambda step: run.largest(f"history_store_{what}", step) / unit)
    steps, values = run.series(f"rhyme/history/{what}")
    return steps, [value / unit for value in values]


def _range(index: int) -> str:
    return f"{POSITIONS[index]}-{POSITIONS[index + 1] - 1}" if index + 1 < len(POSITIONS) else f"{POSITIONS[index]}-"


def _colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]


def _styled(figure: go.Figure, height: int = 340, margin_top: int = 30) -> go.Figure:
    figure.update_layout(
        template="plotly_white",
        height=height,
        margin={"l": 60, "r": 20, "t": margin_top, "b": 50},
        font={"family": "system-ui, sans-serif", "size": 13},
        legend={"orientation": "h", "y": -0.25},
        hovermode="closest",
    )
    return figure
