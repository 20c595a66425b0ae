"""One picture for a first look at a router: what it answers beside everything else that its blocks could buy.

Needs matplotlib, imported on first use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..eval import summary
from ..eval.spec import CONTROLS, Spec
from ..eval.summary import Variant
from ..spine.figure import frame, label, plain, row, widen
from ..spine.style import INK, Look, looks
from .gather import Finding, Setting, place
from .rivals import DENSE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TITLE = "Does it pay to spend blocks where the cut was close?"
SUBTITLE = (
    "{model}: dots are questions answered, lines their 95% intervals; at the right, blocks read a tile\n"
    "A router gives more blocks to tiles whose top-k cut was close. The rows below it spend as much, but elsewhere: it "
    "pays where the router is to the right of all of them. Tests on the same questions are in the tables."
)
KINDS = {  # what is read for each router, from top to bottom
    "topk": "plain top-k",
    "router": "router: more where the cut was close",
    "random": "random trigger: more for random tiles",
    "last": "last trigger: more for the last tiles",
    "matched": "uniform top-k with the router's budget",
}
NAMES = 2.3  # inches for the names of the rows
ROW, GAP = 0.23, 1.35  # inches of a row; rows from one scorer's last to the next one's first


@dataclass(frozen=True)
class Reading:
    """A setting at one budget: what was found of each router, by kind."""

    setting: Setting
    budget: int
    routers: dict[Spec, dict[str, Finding]]


def companions(router: Spec, budget: int) -> dict[str, Variant]:
    """What a router is read beside, by kind."""
    found = {"topk": summary.plain(router), "router": router}
    found |= {control: replace(router, control=control) for control in CONTROLS}
    return {kind: (str(found[kind]), budget) for kind in KINDS}


def read(setting: Setting) -> Reading | None:
    """Reads a setting at its smallest budget that has a router with a control; None if no budget has."""
    routers = [f.spec for f in setting.findings if f.spec.router and not f.spec.control]
    for budget in sorted({f.line.budget for f in setting.findings}):
        by_router: dict[Spec, dict[str, Finding]] = {}
        for router in dict.fromkeys(routers):
            there = {kind: setting.find(*variant) for kind, variant in companions(router, budget).items()}
            mine = {kind: finding for kind, finding in there.items() if finding is not None}
            if "router" in mine and set(mine) & set(CONTROLS):
                by_router[router] = mine
        if by_router:
            return Reading(setting, budget, by_router)
    return None


def router_read(model: str, settings: Sequence[Setting]) -> Figure | None:
    """A row for each task, a column for each context; None where no router was run with a control."""
    readings = [kinds for setting in settings if (kinds := read(setting)) is not None]
    if not readings:
        return None
    names, at = _rows(readings)
    styles = looks(f.spec for reading in readings for kinds in reading.routers.values() for f in kinds.values())
    tasks = list(dict.fromkeys(r.setting.task for r in readings))
    contexts = sorted({r.setting.context for r in readings})
    height = -min(y for y, _ in names) + 1.2
    figure, grid = frame(
        TITLE, SUBTITLE.format(model=model), len(tasks), len(contexts), panel=(4.0, ROW * height)
    )  # fmt: skip
    widen(figure, NAMES)
    for i, task in enumerate(tasks):
        first = True
        for j, context in enumerate(contexts):
            axes = grid[i][j]
            shown = next((r for r in readings if (r.setting.task, r.setting.context) == (task, context)), None)
            if shown is None:
                axes.set_visible(False)
                continue
            _panel(axes, shown, at, styles)
            axes.set_ylim(0.6 - height, 0.6)
            axes.set_yticks(
                [y for y, _ in names], [name for _, name in names] if first else [], fontsize=8.5, color=INK
            )
            for name in axes.get_yticklabels():
                name.set_fontweight("bold" if name.get_text().startswith("scorer") else "normal")
            first = False
    for column in zip(*grid, strict=True):
        lowest = [axes for axes in column if axes.get_visible()][-1]
        label(lowest, "questions answered")
    return figure


def _rows(readings: Sequence[Reading]) -> tuple[list[tuple[float, str]], dict[tuple[Spec, str], float]]:
    """The names of all rows with their heights, and the height of each router's each kind: the same in every panel."""
    names: list[tuple[float, str]] = [(0, "dense: every block")]
    at: dict[tuple[Spec, str], float] = {}
    y = 0.0
    for router in dict.fromkeys(spec for r in readings for spec in r.routers):
        there = {kind for r in readings for kind in r.routers.get(router, {})}
        y -= GAP
        names.append((y, _head(router)))
        for kind in (k for k in KINDS if k in there):
            y -= 1
            at[router, kind] = y
            names.append((y, KINDS[kind]))
    return names, at


def _head(router: Spec) -> str:
    options = str(router).partition(":")[2]
    return f"scorer {router.scorer}" + (f", {options}" if options else "")


def _panel(axes: Axes, reading: Reading, at: dict[tuple[Spec, str], float], styles: dict[Spec, Look]) -> None:
    setting = reading.setting
    some = next(iter(reading.routers.values()))["router"]
    plain(axes, f"{place(setting)}\nbudget {some.budget_text}, {setting.questions} questions")
    dense = setting.find(*DENSE)
    if dense is not None:
        axes.axvline(dense.accuracy.value, color=INK, linewidth=0.8, linestyle=":", zorder=1)
        row(axes, dense.accuracy, 0, Look("dense", INK, "o", False), dense.line.effective_budget)
    for router, found in reading.routers.items():
        for kind, finding in found.items():
            row(axes, finding.accuracy, at[router, kind], styles[finding.spec], finding.line.effective_budget)
    axes.set_xlim(-0.03, 1.03)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0%", "25%", "50%", "75%", "100%"])
    axes.grid(axis="y", visible=False)
