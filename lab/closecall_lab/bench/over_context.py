"""Ratios over context length, one panel per kind of cell. Needs matplotlib, imported on first use."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..spine import figure
from ..spine.style import INK

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PANEL = (3.35, 2.4)  # inches
LABEL_GAP = 0.075  # of the panel's height: what two labels at line ends need between them


@dataclass(frozen=True)
class Series:
    """A line: the row's field, what it is called (None: not named in the panel), and how it looks."""

    key: str
    label: str | None
    colour: str
    marker: str
    dashed: bool = False


@dataclass(frozen=True)
class Scale:
    """The vertical axis: speed-ups go on a logarithmic one, parts of a whole on a linear one that starts at 0."""

    label: str
    low: float
    high: float
    ticks: tuple[float, ...]
    log: bool

    def height(self, value: float) -> float:
        """How far up the panel a value lies, from 0 to 1."""
        if self.log:
            return math.log2(value / self.low) / math.log2(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


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


def _label_ends(axes: Axes, lines: list[tuple[Series, list[tuple[int, float]]]], scale: Scale) -> None:
    """Names the lines where they end: no legend to match colours with."""
    named = [(series, points) for series, points in lines if series.label is not None]
    heights = _apart([scale.height(points[-1][1]) for _, points in named], LABEL_GAP)
    for (series, points), height in zip(named, heights, strict=True):
        axes.annotate(
            f"{times(points[-1][1])}  {series.label}",
            xy=(1, height), xycoords="axes fraction", xytext=(8, 0), textcoords="offset points",
            color=series.colour, va="center", fontsize=9, linespacing=1.1,
        )  # fmt: skip


def _panel(axes: Axes, rows: Sequence[Row], series: Sequence[Series], scale: Scale, title: str) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    figure.plain(axes, title)
    if scale.log:
        axes.set_yscale("log", base=2)
    lines = [(s, points) for s in series if (points := _points(rows, s.key))]
    for s, points in lines:
        xs, ys = zip(*points, strict=True)
        style, width = ("--", 1) if s.dashed else ("-", 2)
        axes.plot(
            xs, ys, style, color=s.colour, marker=s.marker, markersize=5, linewidth=width, clip_on=False, zorder=3
        )
    axes.axhline(1, color=INK, linewidth=1, zorder=2)
    axes.set_ylim(scale.low, scale.high)
    figure.contexts(axes, sorted({x for _, points in lines for x, _ in points}))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}x"))
    axes.yaxis.set_major_locator(FixedLocator(scale.ticks))
    axes.yaxis.set_minor_locator(NullLocator())
    _label_ends(axes, lines, scale)


def speedups(
    title: str, subtitle: str, rows: Sequence[Row], series: Sequence[Series], panels: tuple[str, str]
) -> Figure:
    """How many times faster we are."""
    values = _values(rows, series)
    low = 2.0 ** (math.log2(min(1.0, *values)) - 0.35)
    high = 2.0 ** (math.log2(max(2.0, *values)) + 0.25)
    scale = Scale("times faster than", low, high, tuple(2.0**i for i in range(-6, 12)), log=True)
    return _grid(title, subtitle, rows, series, panels, scale)


def walls(title: str, subtitle: str, rows: Sequence[Row], series: Sequence[Series], panels: tuple[str, str]) -> Figure:
    """Our time as a part of another's."""
    high = 1.1 * max(1.0, *_values(rows, series))
    scale = Scale("time, relative", 0.0, high, tuple(i / 4 for i in range(int(4 * high) + 1)), log=False)
    return _grid(title, subtitle, rows, series, panels, scale)


def _values(rows: Sequence[Row], series: Sequence[Series]) -> list[float]:
    return [y for s in series for _, y in _points(rows, s.key)] or [1.0]


def _grid(
    title: str, subtitle: str, rows: Sequence[Row], series: Sequence[Series], panels: tuple[str, str], scale: Scale
) -> Figure:
    """A grid of panels, columns by the rows' field `panels[0]` and lines of panels by `panels[1]`."""
    across = list(dict.fromkeys(r[panels[0]] for r in rows))
    down = list(dict.fromkeys(r[panels[1]] for r in rows))
    # Labels stand right of every panel: 0.075 inches a letter, and room for the number before it.
    gutter = 0.75 + 0.075 * max(len(line) for s in series for line in (s.label or "").splitlines() or [""])
    picture, grid = figure.frame(
        title, subtitle, len(down), len(across), panel=PANEL, gap=gutter, right=gutter, share_y=True
    )
    for i, d in enumerate(down):
        for j, a in enumerate(across):
            here = [r for r in rows if (r[panels[0]], r[panels[1]]) == (a, d)]
            if here:
                _panel(grid[i][j], here, series, scale, f"{a}, D = {d}" if panels[1] == "dim" else f"{a}, {d}")
            else:
                grid[i][j].set_visible(False)
    for axes in grid[-1]:
        figure.label(axes, "context (tokens)")
    figure.label(grid[0][0], y=scale.label)
    return picture
