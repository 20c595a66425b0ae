"""Two pictures of a profile: stacked time by context and policy, and wall ratio over context with its bound."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...eval.spec import Spec
from ...spine.figure import frame, label, plain
from ...spine.numbers import size, threads
from ...spine.results import Facts, Measured
from ...spine.style import INK, QUIET, colour
from .. import over_context
from . import tables
from .policies import UNATTACHED

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# What is stacked: the row's fields, the name in the legend, the colour.
STACK = (
    (("summaries", "ranking", "rule", "indices"), "selection", "#d55e00"),
    (("attend",), "attention", "#0072b2"),
    (("around",), "around it", "#cc79a7"),
    (("rest",), "rest of the model", "#bdbdbd"),
    (("linear layers",), "linear layers", "#8c8c8c"),
)


def both(name: str, machine: Facts, measured: Measured) -> dict[str, Figure]:
    """Draws both pictures, by file stem."""
    return {name: ratios(machine, measured), f"{name}-parts": stacked(machine, measured)}


def ratios(machine: Facts, measured: Measured) -> Figure:
    cell, _ = measured[0]
    base = tables.theirs(cell)
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    names: list[str] = []
    for r in tables.rows(measured):
        at = rows.setdefault((r["context"], r["dtype"], r["threads"]), {k: r[k] for k in ("context", "dtype")})
        at["threads"] = threads(r["threads"])
        if r["name"] == UNATTACHED:
            at["floor"] = r["floor"]
            continue
        names += [] if r["name"] in names else [r["name"]]
        at |= {r["name"]: r["over_unattached"], f"{r['name']} bound": r["bound_over_unattached"]}
    colours = {name: colour(Spec.parse(name.partition("@")[0]).colour) for name in names}
    series = [over_context.Series("floor", "attention free", QUIET, "", dashed=True)]
    series += [over_context.Series(f"{name} bound", None, colours[name], "", dashed=True) for name in names]
    series += [over_context.Series(name, name, colours[name], "os^Dvp"[i % 6]) for i, name in enumerate(names)]
    return over_context.walls(
        title=f"Prefill time over {base}'s",
        subtitle=f"{cell['label']}\ndashed: what Amdahl's law allows; {machine['cpu']}",
        rows=list(rows.values()),
        series=series,
        panels=("dtype", "threads"),
    )


def stacked(machine: Facts, measured: Measured) -> Figure:
    """Types down, contexts across, a bar for each policy."""
    from matplotlib.patches import Patch

    rows = tables.rows(measured)
    down = list(dict.fromkeys((r["dtype"], r["threads"]) for r in rows))
    across = sorted({r["context"] for r in rows})
    used = [part for part in STACK if any(r[key] for r in rows for key in part[0])]
    legend = [Patch(color=shade, label=name) for _, name, shade in used]
    cell, _ = measured[0]
    about = f"{cell['label']}; seconds of a whole prefill, {machine['cpu']}"
    figure, grid = frame("Where prefill time goes", about, len(down), len(across), legend)
    for i, kind in enumerate(down):
        for j, context in enumerate(across):
            axes = grid[i][j]
            here = [r for r in rows if (r["dtype"], r["threads"], r["context"]) == (*kind, context)]
            if not here:
                axes.set_visible(False)
                continue
            plain(axes, f"{size(context)}, {kind[0]}, {threads(kind[1])}")
            left = [0.0] * len(here)
            for keys, _, shade in used:
                lengths = [sum(r[key] for key in keys) for r in here]
                axes.barh(range(len(here)), lengths, left=left, color=shade, height=0.7)
                left = [a + b for a, b in zip(left, lengths, strict=True)]
            names = [tables.shown_name(r) for r in here] if j == 0 or not grid[i][0].get_visible() else [""] * len(here)
            axes.set_yticks(range(len(here)), names, fontsize=8, color=INK)
            axes.invert_yaxis()
            label(axes, "seconds")
    figure.subplots_adjust(left=1.9 / figure.get_size_inches()[0])
    return figure
