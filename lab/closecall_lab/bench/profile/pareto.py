"""`closecall pareto`: accuracy from an evaluation store joined with wall ratios from profiles."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from closecall.models import catalogue
from closecall.models.load import own_name

from ...eval.spec import Spec
from ...eval.statistics import Estimate
from ...eval.store import Store
from ...eval.summary import Variant
from ...report.gather import gather
from ...report.tables import estimate
from ...spine.figure import frame, handle, label, plain, shares
from ...spine.numbers import size, threads
from ...spine.page import Page, Section
from ...spine.results import Facts
from ...spine.results import Store as Results
from ...spine.style import INK, QUIET, looks
from ...spine.table import Column, Table
from . import tables
from .policies import DENSE, named
from .shapes import ALIASES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

QUALITY = 0.80  # of dense's accuracy: the paper's line for a win
TIE = 0.02  # walls that differ by less are equal: single figures move by as much from run to run
Profiles = dict[tuple[str, int], dict["Kind", dict[Variant, "Wall"]]]  # by model and context, by kind
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
        """The accuracy as a part of dense's; None if either is unknown."""
        if self.accuracy is None or not self.dense_accuracy:
            return None
        return self.accuracy.value / self.dense_accuracy

    @property
    def sure(self) -> bool:
        """Whether even the low end of the accuracy's interval keeps the quality."""
        return self.accuracy is not None and self.accuracy.low >= QUALITY * (self.dense_accuracy or 0)

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
            won = "Pareto win" if over_dense < 1 - TIE else "wins over SDPA only"
            return won if self.sure else f"{won}, perhaps"
        return "keeps quality, loses speed" if over_sdpa > 1 + TIE else "keeps quality, ties speed"


def _model(name: str) -> str:
    """One name for a model, whichever of its names was typed."""
    known = catalogue.find(ALIASES.get(name.lower(), name))
    return known.name if known else own_name(name)


def walls(paths: Sequence[Path]) -> Profiles:
    """Reads walls by model and context, then by type, threads and device. A cell's later measurement counts."""
    profiles: Profiles = {}
    for path in paths:
        if not path.exists():
            raise ValueError(f"no such profile: {path}. `closecall profile --out {path.parent} ...` makes one")
        for record in Results(path).records:
            cell: Facts = record["cell"]
            if cell.get("what") not in ("model", "shape"):
                continue
            kind = (cell["dtype"], cell["threads"], cell["device"])
            here = profiles.setdefault((_model(cell["model"]), cell["context"]), {}).setdefault(kind, {})
            for spec, budget, _ in cell["variants"]:
                row = tables.row(cell, record["result"], named(spec, budget))
                here[spec, budget] = Wall(row["over_unattached"], row["over_dense"])
    if not profiles:
        raise ValueError(
            f"no profile of a model or a shape is in {', '.join(map(str, paths))}: run `closecall profile` first"
        )
    return profiles


def frontier(points: Sequence[Point]) -> list[Point]:
    """The points marked that no other beats on one side without losing on the other."""

    def dominated(p: Point) -> bool:
        return any(_better(o, p) for o in points if o.complete)

    return [Point(**(vars(p) | {"frontier": p.complete and not dominated(p)})) for p in points]


def _better(a: Point, b: Point) -> bool:
    (wall_a, right_a), (wall_b, right_b) = _spot(a), _spot(b)
    pairs = ((right_a, right_b), (-wall_a, -wall_b))
    return all(x >= y for x, y in pairs) and any(x > y for x, y in pairs)


@dataclass(frozen=True)
class Joined:
    """Points, one list for each model, task, context and kind of profile; and what there is to say about them."""

    groups: list[list[Point]]
    notes: list[str]


def join(store: Store, profiles: Profiles, models: Sequence[str] | None, *, everything: bool = True) -> Joined:
    """Accuracies and walls, by model, context, policy and budget; what has only one of the two numbers included.

    A policy that was evaluated but not profiled never costs the others examples: where it ran fewer, it is left out.
    `everything` also lists profiles of models that the store knows nothing of.
    """
    names = {fingerprint: _model(str(facts["name"])) for fingerprint, facts in store.models().items()}
    timed_somewhere = {v for kinds in profiles.values() for timed in kinds.values() for v in timed}
    gathered = gather(store, models=models, first=timed_somewhere)
    groups: list[list[Point]] = []
    notes = list(gathered.notes)
    evaluated = set()
    for setting in gathered.settings:
        place = (names[setting.fingerprint], setting.context)
        evaluated.add(place)
        where = f"{setting.model}, {setting.task}, {size(setting.context)}"
        notes += [f"{where}: {note}" for note in setting.notes if "left out" in note or "nothing to compare" in note]
        accuracies = {f.variant: f.accuracy for f in setting.findings}
        dense = accuracies[DENSE, 0].value if (DENSE, 0) in accuracies else None
        kinds: dict[Kind | None, dict[Variant, Wall]] = dict(profiles.get(place, {}).items()) or {None: {}}
        for kind, timed in kinds.items():
            points = [
                Point(setting.model, setting.task, setting.context, kind, *v, accuracies.get(v), dense, timed.get(v))
                for v in dict.fromkeys([*accuracies, *timed])
            ]
            groups.append(frontier(points))
    wanted = None if everything else set(names.values())
    wanted = wanted if models is None else set(map(_model, models))
    unrelated = sorted({model for model, _ in profiles if wanted is not None and model not in wanted})
    if unrelated and models is None:
        notes.append(f"Profiles of models that the store does not have are left out: {', '.join(unrelated)}.")
    for (model, context), timings in profiles.items():
        if (model, context) not in evaluated and model not in unrelated:
            groups += [
                [Point(model, None, context, kind, *v, None, None, wall) for v, wall in timed.items()]
                for kind, timed in timings.items()
            ]
    return Joined([group for group in groups if group], notes)


def _budget(p: Point) -> str | None:
    if not p.budget:
        return None
    tile = Spec.parse(p.policy).tile_budget(p.budget)
    return f"{p.budget} ({tile} a tile)" if tile is not None else str(p.budget)


COLUMNS = (
    Column("policy", lambda r: Spec.parse(r.policy).title, left=True),
    Column("budget (tile budget)", lambda r: _budget(r), left=True),
    Column("questions", "accuracy.n"),
    Column("accuracy", lambda r: estimate(r.accuracy)),
    Column("of dense's", "quality", ".2f"),
    Column("wall vs SDPA", "wall.over_sdpa", ".2f"),
    Column("wall vs our dense", "wall.over_dense", ".2f"),
    Column("frontier", lambda r: "yes" if r.frontier else None, left=True),
    Column("verdict", "verdict", left=True),
)
NOTES = (
    "accuracy: from the evaluation store, 95% interval. wall: the whole prefill over that of the same model with torch "
    "SDPA, and over that with our own kernel run dense, from the profile.",
    f"Pareto win: faster than both by more than {TIE:.0%}, at {QUALITY:.0%} of dense's accuracy or more. wins over "
    "SDPA only: not over our dense kernel. perhaps: the accuracy's interval reaches below that.",
    "frontier: no other policy of the same setting is as accurate and as fast, and better in one of the two.",
)


def _where(p: Point) -> str:
    kind = f", {p.kind[0]}, {threads(p.kind[1])}" if p.kind else ""
    return f"{p.model}, {p.task or 'not evaluated'}, {size(p.context)}{kind}"


def table(group: Sequence[Point]) -> Table:
    """The policies of one model, task, context and kind of profile."""
    return Table(_where(group[0]), COLUMNS, group, keys=2)


def figure(groups: Sequence[Sequence[Point]]) -> Figure | None:
    """Accuracy over wall ratio, with the frontier as a line. None where no policy has both numbers."""
    from matplotlib.lines import Line2D

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
        plain(axes, _where(shown[i][0]).replace(", ", "\n", 1))  # the model in a line of its own: tasks have long names
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
        label(axes, "prefill time, as a part of SDPA's")
    label(grid[0][0], y="accuracy")
    return made


def _spot(p: Point) -> tuple[float, float]:
    """Returns the place of a complete point in the picture."""
    assert p.wall is not None
    assert p.accuracy is not None
    return p.wall.over_sdpa, p.accuracy.value


def page(joined: Joined) -> Page:
    drawn = figure(joined.groups)
    pictures = {"pareto-frontier": drawn} if drawn is not None else {}
    section = Section("Every policy", tables=[table(group) for group in joined.groups], figures=list(pictures))
    missing = sum(not p.complete for group in joined.groups for p in group)
    only = f"{missing} rows have only one of the two numbers; they are listed, and not in the picture."
    lead = [*NOTES, *([only] if missing else []), *joined.notes]
    return Page("closecall pareto", lead, [section], pictures, {"pareto-frontier": "Accuracy over prefill time"})


def to_json(groups: Sequence[Sequence[Point]]) -> str:
    def facts(p: Point) -> dict[str, Any]:
        return asdict(p) | {"quality": p.quality, "verdict": p.verdict}

    return json.dumps([facts(p) for group in groups for p in group], indent=1) + "\n"
