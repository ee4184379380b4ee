"""Draws a chart of points and lines as SVG text, in light or dark colours. Depends on nothing and is deterministic."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

INK = {"light": ("#24292f", "#57606a", "#d0d7de"), "dark": ("#e6edf3", "#9198a1", "#3d444d")}  # text, ticks, grid
COLOURS = {  # readable on both backgrounds, and by colour-blind readers (after Okabe and Ito)
    "light": {"blue": "#0072b2", "orange": "#d55e00", "green": "#00855f", "grey": "#6e7781"},
    "dark": {"blue": "#56b4e9", "orange": "#e69f00", "green": "#2fc59b", "grey": "#9198a1"},
}
FONT = "12px -apple-system, 'Segoe UI', Helvetica, Arial, 'DejaVu Sans', sans-serif"


@dataclass(frozen=True, kw_only=True)
class Series:
    """Points that are joined by a line if there are several.

    Attributes:
        labels: text beside the last points; (text, dx, dy) in pixels, negative dx: to the point's left.
        legend: text of the line in the panel's legend; empty: none.
    """

    x: Sequence[float]
    y: Sequence[float]
    colour: str
    dashed: bool = False
    labels: Sequence[tuple[str, float, float]] = ()
    legend: str = ""


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One chart. Ticks are the values at an axis, in order; they bound it. Both axes may be logarithmic."""

    title: str
    x_label: str
    y_label: str
    x_ticks: Sequence[float]
    y_ticks: Sequence[float]
    log: bool = False
    pad: int = 0  # pixels between the y axis and the first x tick
    series: Sequence[Series] = field(default_factory=tuple)


def draw(panels: Sequence[Panel], theme: str, alt: str, width: int = 430, height: int = 340) -> str:
    """Return an SVG with the panels side by side.

    Raises:
        ValueError: a point lies outside its panel's axes.
    """
    text, tick, grid = INK[theme]
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width * len(panels)} {height}" role="img">',
        f"<title>{escape(alt)}</title>",
        f"<style>text {{ font: {FONT}; }}</style>",
    ]
    for number, panel in enumerate(panels):
        left, right, top, bottom = number * width + 60, (number + 1) * width - 14, 34, height - 44
        x = _Scale(panel.x_ticks[0], panel.x_ticks[-1], left + panel.pad, right, panel.log)
        y = _Scale(panel.y_ticks[0], panel.y_ticks[-1], bottom, top, panel.log)

        def write(at: float, row: float, words: str, colour: str, anchor: str = "middle", more: str = "") -> None:
            lines.append(
                f'<text x="{at:.1f}" y="{row:.1f}" fill="{colour}" text-anchor="{anchor}"{more}>{escape(words)}</text>'
            )

        write(left, 16, panel.title, text, "start", ' font-weight="bold"')
        for value in panel.y_ticks:
            lines.append(f'<path d="M{left} {y(value):.1f}H{right}" stroke="{grid}"/>')
            write(left - 6, y(value) + 4, f"{value:,g}", tick, "end")
        for value in panel.x_ticks:
            write(x(value), bottom + 17, f"{value:g}", tick)
        write((left + right) / 2, height - 8, panel.x_label, text)
        middle = (top + bottom) / 2
        turned = f' transform="rotate(-90 {number * width + 12} {middle:.1f})"'
        write(number * width + 12, middle, panel.y_label, text, more=turned)
        for one in panel.series:
            colour = COLOURS[theme][one.colour]
            points = [(x(a), y(b)) for a, b in zip(one.x, one.y, strict=True)]
            dashes = ' stroke-dasharray="5 4"' if one.dashed else ""
            if len(points) > 1:
                path = "L".join(f"{a:.1f} {b:.1f}" for a, b in points)
                lines.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2"{dashes}/>')
            if one.legend:
                row = top + 10 + 18 * [other.legend for other in panel.series if other.legend].index(one.legend)
                lines.append(f'<path d="M{right - 170} {row - 4}h26" stroke="{colour}" stroke-width="2"{dashes}/>')
                write(right - 138, row, one.legend, text, "start")
            for a, b in points:
                lines.append(f'<circle cx="{a:.1f}" cy="{b:.1f}" r="{3.5 if one.dashed else 5}" fill="{colour}"/>')
            for (a, b), (words, dx, dy) in zip(
                points[-len(one.labels) :] if one.labels else (), one.labels, strict=True
            ):
                write(a + dx, b + dy, words, colour, "end" if dx < 0 else "start" if dx > 0 else "middle")
    return "\n".join([*lines, "</svg>"]) + "\n"


@dataclass(frozen=True)
class _Scale:
    first: float
    last: float
    start: float
    end: float
    log: bool

    def __call__(self, value: float) -> float:
        """Return the pixel of a value."""
        if not self.first <= value <= self.last:
            raise ValueError(f"{value:g} is outside the axis from {self.first:g} to {self.last:g}: change its ticks")
        first, last, at = (
            (math.log(self.first), math.log(self.last), math.log(value)) if self.log else (self.first, self.last, value)
        )
        return self.start + (at - first) / (last - first) * (self.end - self.start)
