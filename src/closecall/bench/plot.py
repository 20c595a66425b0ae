"""Speed-up over context length, one panel per kind of cell. Needs matplotlib, imported on first use."""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .inputs import size

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, QUIET, GRID = "#111827", "#6b7280", "#e5e7eb"
LABEL_GAP = 0.075  # of the panel's height: what two labels at line ends need between them


@dataclass(frozen=True)
class Series:
    """A line: the row's field, what it is called, and how it looks."""

    key: str
    label: str
    colour: str
    marker: str


Row = dict[str, Any]


def times(ratio: float) -> str:
    return f"{ratio:.1f}x" if ratio >= 9.95 else f"{ratio:.2f}x"


def _points(rows: Sequence[Row], key: str) -> list[tuple[int, float]]:
    return sorted((r["context"], r[key]) for r in rows if r.get(key) is not None)


def _apart(heights: list[float], gap: float) -> list[float]:
    """Heights moved as little as upward pushing allows, so that neighbours are at least `gap` apart."""
    order = sorted(range(len(heights)), key=heights.__getitem__)
    moved = list(heights)
    for below, above in itertools.pairwise(order):
        moved[above] = max(moved[above], moved[below] + gap)
    return moved


def _label_ends(axes: Axes, lines: list[tuple[Series, list[tuple[int, float]]]], low: float, high: float) -> None:
    """Names the lines where they end: no legend to match colours with."""
    span = math.log2(high / low)
    heights = _apart([math.log2(points[-1][1] / low) / span for _, points in lines], LABEL_GAP)
    for (series, points), height in zip(lines, heights, strict=True):
        axes.annotate(
            f"{times(points[-1][1])}  {series.label}",
            xy=(1, height), xycoords="axes fraction", xytext=(8, 0), textcoords="offset points",
            color=series.colour, va="center", fontsize=9, linespacing=1.1,
        )  # fmt: skip


def _panel(axes: Axes, rows: Sequence[Row], series: Sequence[Series], low: float, high: float) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    lines = [(s, points) for s in series if (points := _points(rows, s.key))]
    contexts = sorted({x for _, points in lines for x, _ in points})
    for s, points in lines:
        xs, ys = zip(*points, strict=True)
        axes.plot(xs, ys, color=s.colour, marker=s.marker, markersize=5, linewidth=2, clip_on=False, zorder=3)
    axes.axhline(1, color=INK, linewidth=1, zorder=2)
    axes.set_ylim(low, high)
    axes.xaxis.set_major_locator(FixedLocator(contexts))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: size(round(x))))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}x"))
    axes.yaxis.set_major_locator(FixedLocator([2.0**i for i in range(-6, 12)]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_minor_locator(NullLocator())
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, colors=QUIET)
    for side in axes.spines.values():
        side.set_visible(False)
    _label_ends(axes, lines, low, high)


def speedups(
    title: str, subtitle: str, rows: Sequence[Row], series: Sequence[Series], panels: tuple[str, str]
) -> Figure:
    """A grid of panels, columns by the rows' field `panels[0]` and lines of panels by `panels[1]`."""
    from matplotlib.figure import Figure

    across = list(dict.fromkeys(r[panels[0]] for r in rows))
    down = list(dict.fromkeys(r[panels[1]] for r in rows))
    values = [y for s in series for _, y in _points(rows, s.key)] or [1.0]
    low = 2.0 ** (math.log2(min(1.0, *values)) - 0.35)
    high = 2.0 ** (math.log2(max(2.0, *values)) + 0.25)
    width = 1.0 + 5.2 * len(across)
    head = [(line, 14, "bold", INK) for line in textwrap.wrap(title, int(7.5 * width))]
    head += [(x, 9, "normal", QUIET) for line in subtitle.splitlines() for x in textwrap.wrap(line, int(14.5 * width))]
    above = 0.55 + sum(points * 1.55 / 72 for _, points, _, _ in head)  # inches over the panels
    height = above + 0.55 + 3.0 * len(down)
    figure = Figure(figsize=(width, height), dpi=160, facecolor="white")
    grid = figure.subplots(len(down), len(across), squeeze=False, sharey=True)
    for i, d in enumerate(down):
        for j, a in enumerate(across):
            mine = [r for r in rows if (r[panels[0]], r[panels[1]]) == (a, d)]
            if not mine:
                grid[i][j].set_visible(False)
                continue
            _panel(grid[i][j], mine, series, low, high)
            name = f"{a}, D = {d}" if panels[1] == "dim" else f"{a}, {d}"
            grid[i][j].set_title(name, loc="left", fontsize=10, color=INK, fontweight="bold")
    for axes in grid[-1]:
        axes.set_xlabel("context (tokens)", color=QUIET, fontsize=9)
    grid[0][0].set_ylabel("times faster than", color=QUIET, fontsize=9)
    y = 0.15
    for line, points, weight, colour in head:
        figure.text(0.4 / width, 1 - y / height, line, fontsize=points, fontweight=weight, color=colour, va="top")
        y += points * 1.55 / 72
    figure.subplots_adjust(
        left=0.75 / width, right=1 - 1.85 / width, top=1 - above / height, bottom=0.55 / height, wspace=0.5, hspace=0.32
    )
    return figure
