"""What all pictures share: the frame with its head and legend, plain panels, and files that are the same every time.

Needs matplotlib, imported on first use.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import files
from .numbers import Estimate, size
from .style import INK, QUIET, Look

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GRID = "#e5e7eb"
PANEL = (4.3, 2.9)  # inches
LEFT, RIGHT, BELOW = 0.75, 0.3, 0.6
ACROSS, DOWN = 0.55, 0.75  # inches between panels
LINE = 1.55 / 72  # inches of height for a point of type


def frame(
    title: str, subtitle: str, down: int, across: int, legend: Sequence[Any] = (), *,
    panel: tuple[float, float] = PANEL, gap: float = ACROSS, right: float = RIGHT, share_y: bool = False,
    name_lines: int = 2,
) -> tuple[Figure, Any]:  # fmt: skip
    """A figure with its head, a legend under it, and a grid of panels, `gap` inches between them.

    The names of the first row's panels have room for `name_lines` lines.
    """
    from matplotlib.figure import Figure

    width = max(LEFT + right + panel[0] * across + gap * (across - 1), 7.6)
    head = [(line, 13, "bold", INK) for line in textwrap.wrap(title, int(8.2 * width))]
    head += [(x, 9, "normal", QUIET) for line in subtitle.splitlines() for x in textwrap.wrap(line, int(14.5 * width))]
    per_row = max(1, int((width - 0.5) / (0.55 + 0.082 * max((len(h.get_label()) for h in legend), default=1))))
    columns = min(len(legend), per_row)
    rows = math.ceil(len(legend) / columns) if legend else 0
    above = 0.2 + sum(points * LINE for _, points, _, _ in head) + 0.19 * rows + 0.13 + 0.16 * name_lines
    height = above + BELOW + panel[1] * down + DOWN * (down - 1)
    figure = Figure(figsize=(width, height), dpi=160, facecolor="white")
    grid = figure.subplots(down, across, squeeze=False, sharey=share_y)
    y = 0.15
    for line, points, weight, colour in head:
        figure.text(0.25 / width, 1 - y / height, line, fontsize=points, fontweight=weight, color=colour, va="top")
        y += points * LINE
    if legend:
        figure.legend(
            handles=list(legend), loc="upper left", bbox_to_anchor=(0.15 / width, 1 - y / height), ncols=columns,
            frameon=False, fontsize=8.5, labelcolor=INK, handlelength=2.2, columnspacing=1.4, borderaxespad=0.2,
        )  # fmt: skip
    figure.subplots_adjust(
        left=LEFT / width, right=1 - right / width, top=1 - above / height, bottom=BELOW / height,
        wspace=gap / panel[0], hspace=DOWN / panel[1],
    )  # fmt: skip
    return figure, grid


def widen(figure: Figure, inches: float) -> None:
    """Makes room at the left for long names of rows; the panels stay as large as they were."""
    width = figure.get_figwidth()
    figure.set_figwidth(width + inches)
    figure.subplots_adjust(left=(LEFT + inches) / (width + inches), right=1 - (RIGHT + 0.2) / (width + inches))
    for text in figure.texts:
        text.set_x(0.25 / (width + inches))


def plain(axes: Axes, title: str, x: str = "", y: str = "") -> None:
    """A panel without borders and ticks, named at the upper left."""
    axes.set_title(title, loc="left", fontsize=9.5, color=INK, fontweight="bold")
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(which="both", length=0, colors=QUIET, labelsize=8.5)
    for side in axes.spines.values():
        side.set_visible(False)
    label(axes, x, y)


def broken(name: str, width: int = 48) -> str:
    """A panel's name in lines of at most `width` characters, broken behind commas: policies have no other place."""
    lines = [""]
    for part in name.replace(",", ",\0").split("\0"):
        if lines[-1] and len(lines[-1]) + len(part) > width:
            lines.append("")
        lines[-1] += part
    return "\n".join(lines)


def label(axes: Axes, x: str = "", y: str = "") -> None:
    if x:
        axes.set_xlabel(x, color=QUIET, fontsize=8.5)
    if y:
        axes.set_ylabel(y, color=QUIET, fontsize=8.5)


def contexts(axes: Axes, ticks: Sequence[float]) -> None:
    """A horizontal axis of context lengths, logarithmic, with these ticks and no others."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(list(ticks)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: size(round(x))))
    axes.xaxis.set_minor_locator(NullLocator())


def row(axes: Axes, estimate: Estimate, y: float, look: Look, blocks: float) -> None:
    """A dot with its interval at height `y`, and at the right end of the panel how many blocks a tile reads."""
    axes.plot([estimate.low, estimate.high], [y, y], color=look.colour, linewidth=1.6, alpha=0.6, zorder=2)
    axes.plot(
        [estimate.value], [y], look.marker, color=look.colour, markerfacecolor=look.fill, markersize=6.5, zorder=3,
        clip_on=False,
    )  # fmt: skip
    axes.annotate(
        f"{blocks:.1f}", (1.0, y), xycoords=("axes fraction", "data"), xytext=(3, 0), textcoords="offset points",
        va="center", fontsize=8, color=QUIET, annotation_clip=False,
    )  # fmt: skip


def shares(axes: Axes) -> None:
    """A vertical axis from 0 to 1, with room for markers at both ends."""
    axes.set_ylim(-0.04, 1.04)
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1])


def handle(look: Look, **changes: Any) -> Any:
    """What stands for a policy in a legend."""
    from matplotlib.lines import Line2D

    style: dict[str, Any] = {
        "color": look.colour, "marker": look.marker, "markerfacecolor": look.fill, "linestyle": look.line,
        "markersize": 5.5, "linewidth": 1 if look.control else 1.8, "label": look.label,
    }  # fmt: skip
    return Line2D([], [], **(style | changes))


def image(figure: Figure, suffix: str) -> bytes:
    """The same bytes for the same figure: no date, no random names inside."""
    import matplotlib

    buffer = BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "closecall"}):
        figure.savefig(buffer, format=suffix, metadata={"Date": None} if suffix == "svg" else {"Software": None})
    return buffer.getvalue()


def save(figures: Mapping[str, Figure], out: Path) -> list[Path]:
    """Every figure as `STEM.png` and `STEM.svg`."""
    return [
        files.write(out / f"{stem}.{suffix}", image(figure, suffix))
        for stem, figure in figures.items()
        for suffix in ("png", "svg")
    ]
