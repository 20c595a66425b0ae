"""`closecall pareto`: accuracy from an evaluation store joined with wall ratios from profiles."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from closecall.models import catalogue as panel
from closecall.models.load import own_name

from ...eval.panel import Spec
from ...eval.statistics import Estimate
from ...eval.store import Store
from ...report.gather import gather
from ...report.tables import estimate
from ...spine.inputs import size, threads
from ...spine.page import Page, Section
from ...spine.plot import INK, QUIET
from ...spine.results import Facts
from ...spine.results import Store as Results
from ...spine.table import Column, Table
from . import report
from .shapes import ALIASES
from .variants import DENSE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

QUALITY = 0.80  # of dense's accuracy: the paper's line for a win
TIE = 0.02  # walls that differ by less are equal: single figures move by as much from run to run
Variant = tuple[str, int]
Kind = tuple[str, int, str]  # type, threads, device


@dataclass(frozen=True)
class Wall:
    """What a profile says of a policy."""

    over_sdpa: float
    over_dense: float


@dataclass(frozen=True)
class Point:
    """A policy on one model, task and context. What was not measured is None."""

    model: str
    task: str | None
    context: int
    kind: Kind | None
    policy: str
    budget: int
    accuracy: Estimate | None
    dense_accuracy: float | None
    wall: Wall | None
    frontier: bool = False

    @property
    def quality(self) -> float | None:
        """Of dense's accuracy, the part that is left."""
        if self.accuracy is None or not self.dense_accuracy:
            return None
        return self.accuracy.value / self.dense_accuracy

    @property
    def complete(self) -> bool:
        return self.accuracy is not None and self.wall is not None

    @property
    def verdict(self) -> str:
        if self.accuracy is None:
            return "wall only: not evaluated"
        if self.wall is None:
            return "accuracy only: not profiled"
        if self.policy == DENSE:
            return "our dense kernel"
        if self.dense_accuracy is None:
            return "no verdict: dense was not evaluated"
        if self.quality is None:
            return "no verdict: dense answers nothing"
        if self.quality < QUALITY:
            return "loses quality"
        over_sdpa, over_dense = self.wall.over_sdpa, self.wall.over_dense
        if over_sdpa < 1 - TIE:
            return "Pareto win" if over_dense < 1 - TIE else "wins over SDPA, not over our dense kernel"
        return "keeps quality, loses speed" if over_sdpa > 1 + TIE else "keeps quality, ties speed"


def _model(name: str) -> str:
    """One name for a model, whichever of its names was typed."""
    known = panel.find(ALIASES.get(name.lower(), name))
    return known.name if known else own_name(name)


def walls(paths: Sequence[Path]) -> dict[tuple[str, int], dict[Kind, dict[Variant, Wall]]]:
    """By model and context, by type, threads and device. Where a cell is there twice, the later one counts."""
    found: dict[tuple[str, int], dict[Kind, dict[Variant, Wall]]] = {}
    for path in paths:
        if not path.exists():
            raise ValueError(f"no such profile: {path}. `closecall profile --out {path.parent} ...` makes one")
        for record in Results(path).records:
            cell: Facts = record["cell"]
            if cell.get("what") not in ("model", "shape"):
                continue
            kind = (cell["dtype"], cell["threads"], cell["device"])
            here = found.setdefault((_model(cell["model"]), cell["context"]), {}).setdefault(kind, {})
            named = {
                (spec, budget): (spec if not budget else f"{spec}@{budget}") for spec, budget, _ in cell["variants"]
            }
            for variant, name in named.items():
                row = report.row(cell, record["result"], name)
                here[variant] = Wall(row["over_unattached"], row["over_dense"])
    if not found:
        raise ValueError(
            f"no profile of a model or a shape is in {', '.join(map(str, paths))}: run `closecall profile` first"
        )
    return found


def frontier(points: Sequence[Point]) -> list[Point]:
    """The points marked that no other beats on one side without losing on the other."""

    def dominated(p: Point) -> bool:
        return any(_better(o, p) for o in points if o.complete)

    return [Point(**(vars(p) | {"frontier": p.complete and not dominated(p)})) for p in points]


def _better(a: Point, b: Point) -> bool:
    (wall_a, right_a), (wall_b, right_b) = _spot(a), _spot(b)
    pairs = ((right_a, right_b), (-wall_a, -wall_b))
    return all(x >= y for x, y in pairs) and any(x > y for x, y in pairs)


def join(
    store: Store, profiles: dict[tuple[str, int], dict[Kind, dict[Variant, Wall]]], models: Sequence[str] | None
) -> list[list[Point]]:
    """One list for each model, task, context and kind of profile; what has only one of the two numbers included."""
    names = {fingerprint: _model(str(facts["name"])) for fingerprint, facts in store.models().items()}
    found: list[list[Point]] = []
    evaluated = set()
    for setting in gather(store, models=models).settings:
        place = (names[setting.fingerprint], setting.context)
        evaluated.add(place)
        accuracies = {f.variant: f.accuracy for f in setting.findings}
        dense = accuracies[DENSE, 0].value if (DENSE, 0) in accuracies else None
        kinds: dict[Kind | None, dict[Variant, Wall]] = dict(profiles.get(place, {}).items()) or {None: {}}
        for kind, timed in kinds.items():
            variants = [*accuracies, *(v for v in timed if v not in accuracies)]
            found.append(
                frontier(
                    [
                        Point(
                            setting.model,
                            setting.task,
                            setting.context,
                            kind,
                            *v,
                            accuracies.get(v),
                            dense,
                            timed.get(v),
                        )
                        for v in variants
                    ]
                )
            )
    wanted = None if models is None else {_model(m) for m in models}
    for (model, context), timings in profiles.items():
        if (model, context) not in evaluated and (wanted is None or model in wanted):
            found += [
                [Point(model, None, context, kind, *v, None, None, wall) for v, wall in timed.items()]
                for kind, timed in timings.items()
            ]
    return [group for group in found if group]


def _budget(p: Point) -> str | None:
    if not p.budget:
        return None
    tile = Spec.parse(p.policy).tile_budget(p.budget)
    return f"{p.budget} ({tile} a tile)" if tile is not None else str(p.budget)


COLUMNS = (
    Column("model", lambda r: r["p"].model, left=True),
    Column("context", lambda r: size(r["p"].context)),
    Column("task", lambda r: r["p"].task, left=True),
    Column("type", lambda r: r["p"].kind and r["p"].kind[0], left=True),
    Column("threads", lambda r: r["p"].kind and r["p"].kind[1]),
    Column("policy", lambda r: r["p"].policy, left=True),
    Column("budget (tile budget)", lambda r: _budget(r["p"]), left=True),
    Column("accuracy", lambda r: estimate(r["p"].accuracy)),
    Column("of dense's", lambda r: r["p"].quality, ".2f"),
    Column("wall vs SDPA", lambda r: r["p"].wall and r["p"].wall.over_sdpa, ".2f"),
    Column("wall vs our dense", lambda r: r["p"].wall and r["p"].wall.over_dense, ".2f"),
    Column("frontier", lambda r: "yes" if r["p"].frontier else None, left=True),
    Column("verdict", lambda r: r["p"].verdict, left=True),
)
NOTES = (
    "accuracy: from the evaluation store, 95% interval. wall: the whole prefill over that of the same model with torch "
    "SDPA, and over that with our own kernel run dense, from the profile.",
    f"Pareto win: faster than both by more than {TIE:.0%}, at {QUALITY:.0%} of dense's accuracy or more.",
    "frontier: no other policy of the same setting is as accurate and as fast, and better in one of the two.",
)


def table(groups: Sequence[Sequence[Point]]) -> Table:
    return Table("Speed and accuracy", COLUMNS, [{"p": p} for group in groups for p in group], NOTES)


def _where(p: Point) -> str:
    kind = f", {p.kind[0]}, {threads(p.kind[1])}" if p.kind else ""
    return f"{p.model}, {p.task}, {size(p.context)}{kind}"


def figure(groups: Sequence[Sequence[Point]]) -> Figure | None:
    """Accuracy over wall ratio, with the frontier as a line. None where no policy has both numbers."""
    from matplotlib.lines import Line2D

    from ...report.figures import frame, handle, plain, shares
    from ...spine.style import looks

    shown = [[p for p in group if p.complete] for group in groups]
    shown = [group for group in shown if group]
    if not shown:
        return None
    styles = looks(Spec.parse(p.policy) for group in shown for p in group)
    legend = [handle(look, linestyle="") for look in styles.values()]
    legend.append(Line2D([], [], color=QUIET, linestyle="--", label="frontier"))
    across = min(3, len(shown))
    down = -(-len(shown) // across)
    made, grid = frame("Speed and accuracy", "prefill time over the SDPA model's", down, across, legend)
    for i, axes in enumerate(grid.flat):
        if i >= len(shown):
            axes.set_visible(False)
            continue
        plain(axes, _where(shown[i][0]))
        shares(axes)
        best = sorted(_spot(p) for p in shown[i] if p.frontier)
        axes.plot(*zip(*best, strict=True), "--", color=QUIET, linewidth=1, drawstyle="steps-post", zorder=2)
        for p in shown[i]:
            look = styles[Spec.parse(p.policy)]
            axes.plot(
                *([x] for x in _spot(p)), marker=look.marker, color=look.colour, markerfacecolor=look.fill,
                markersize=6, clip_on=False, zorder=3,
            )  # fmt: skip
        axes.axvline(1, color=INK, linewidth=1, zorder=1)
        axes.set_xlim(left=0)
        axes.set_xlabel("prefill time, as a part of SDPA's", color=QUIET, fontsize=8.5)
    grid[0][0].set_ylabel("accuracy", color=QUIET, fontsize=8.5)
    return made


def _spot(p: Point) -> tuple[float, float]:
    """Where a complete point lies in the picture."""
    assert p.wall is not None
    assert p.accuracy is not None
    return p.wall.over_sdpa, p.accuracy.value


def page(groups: Sequence[Sequence[Point]], *, plots: bool) -> Page:
    drawn = figure(groups) if plots else None
    pictures = {"pareto-frontier": drawn} if drawn is not None else {}
    section = Section("Every policy", tables=[table(groups)], figures=list(pictures))
    missing = sum(not p.complete for group in groups for p in group)
    lead = (
        [f"{missing} rows have only one of the two numbers; they are listed, and not in the picture."]
        if missing
        else []
    )
    return Page("closecall pareto", lead, [section], pictures, {"pareto-frontier": "Accuracy over prefill time"})


def to_json(groups: Sequence[Sequence[Point]]) -> str:
    def facts(p: Point) -> dict[str, Any]:
        return asdict(p) | {"quality": p.quality, "verdict": p.verdict}

    return json.dumps([facts(p) for group in groups for p in group], indent=1) + "\n"
