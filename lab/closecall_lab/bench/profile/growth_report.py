"""How cost grows with context: exponents, and where selection's quadratic part begins to matter."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from closecall.policy import Policy

from ...spine.inputs import size, threads, three_digits
from ...spine.plot import QUIET
from ...spine.results import Facts
from ...spine.table import Column, Table
from .parts import Lap, allowed, selection

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Measured = Sequence[tuple[Facts, Facts]]
MATTERS = 0.1  # of attention + selection: from here on the quadratic part is said to matter
COLOURS = {"attention": "#0072b2", "selection": "#d55e00", "both": "#111827"}


def exponent(contexts: Sequence[float], seconds: Sequence[float]) -> float:
    """The slope of log seconds over log context, by least squares."""
    x, y = np.log(contexts), np.log(seconds)
    x = x - x.mean()
    return float((x * (y - y.mean())).sum() / (x * x).sum())


def local(contexts: Sequence[float], seconds: Sequence[float]) -> list[float | None]:
    """The slope from the context before; None for the first."""
    pairs = list(zip(contexts, seconds, strict=True))
    return [
        None,
        *(math.log(t1 / t0) / math.log(n1 / n0) for (n0, t0), (n1, t1) in itertools.pairwise(pairs)),
    ]


@dataclass(frozen=True)
class Growth:
    """seconds = linear * n + quadratic * n**2, neither negative."""

    linear: float
    quadratic: float

    @classmethod
    def fit(cls, contexts: Sequence[float], seconds: Sequence[float]) -> Growth:
        """Least squares of relative errors, so that the shortest context counts as much as the longest."""
        n, t = np.asarray(contexts, float), np.asarray(seconds, float)
        terms = np.stack([n / t, n * n / t], 1)
        one = np.ones(len(n))
        linear, quadratic = np.linalg.lstsq(terms / n.max(), one, rcond=None)[0] / n.max()
        if linear < 0 or quadratic < 0:  # the better of the two alone
            alone = [float(terms[:, i] @ one / (terms[:, i] @ terms[:, i])) for i in (0, 1)]
            errors = [float(((terms[:, i] * alone[i] - 1) ** 2).sum()) for i in (0, 1)]
            linear, quadratic = (alone[0], 0.0) if errors[0] <= errors[1] else (0.0, alone[1])
        return cls(float(linear), float(quadratic))

    def at(self, n: float) -> float:
        return self.linear * n + self.quadratic * n * n


def matters(chosen: Growth, attended: Growth, share: float = MATTERS) -> float | None:
    """The context at which selection's quadratic part is that share of attention + selection; None if it never is.

    Solves quadratic * n = share * (linear parts + quadratic parts * n).
    """
    linear = chosen.linear + attended.linear
    slope = chosen.quadratic - share * (chosen.quadratic + attended.quadratic)
    return share * linear / slope if slope > 0 else None


def _median(laps: Sequence[Lap], of: Any) -> float:
    return float(np.median([of(lap) for lap in laps]))


def series(measured: Measured) -> dict[tuple[str, int, str], dict[str, list[float]]]:
    """By type, threads and policy: contexts, and seconds of selection, attention and both."""
    found: dict[tuple[str, int, str], dict[str, list[float]]] = {}
    for cell, result in sorted(measured, key=lambda pair: pair[0]["context"]):
        for name, laps in result["laps"].items():
            one = found.setdefault((cell["dtype"], cell["threads"], name), {})
            values = {
                "context": float(cell["context"]),
                "selection": _median(laps, selection),
                "attention": _median(laps, lambda lap: lap["attend"]),
                "both": _median(laps, allowed),
            }
            for key, value in values.items():
                one.setdefault(key, []).append(value)
    return found


def _lines(name: tuple[str, int, str], one: dict[str, list[float]]) -> list[dict[str, Any]]:
    slopes = {key: local(one["context"], one[key]) for key in ("attention", "both")}
    # Where the budget covers everything there is no selection, and a logarithm of nothing is none.
    slopes["selection"] = [None] * len(one["context"])
    there = [i for i, t in enumerate(one["selection"]) if t > 0]
    for i, slope in zip(there, local([one["context"][i] for i in there], [one["selection"][i] for i in there]),
                        strict=True) if there else ():  # fmt: skip
        slopes["selection"][i] = slope
    return [
        {"dtype": name[0], "threads": name[1], "name": name[2], "context": int(n)}
        | {key: one[key][i] for key in ("selection", "attention", "both")}
        | {f"{key} slope": slopes[key][i] for key in slopes}
        for i, n in enumerate(one["context"])
    ]


def conclusions(name: tuple[str, int, str], one: dict[str, list[float]]) -> list[str]:
    """Fitted exponents and the context where selection's quadratic part matters, in sentences."""
    who = f"{name[2]}, {name[0]}, {threads(name[1])}"
    there = [i for i, t in enumerate(one["selection"]) if t > 0]
    if len(there) < 2:
        return [f"{who}: fewer than two contexts at which something is selected, so there is nothing to fit."]
    contexts, chosen, attended, both = (
        [one[k][i] for i in there] for k in ("context", "selection", "attention", "both")
    )
    fits = {"selection": chosen, "attention": attended, "both": both}
    powers = ", ".join(f"{key} n^{exponent(contexts, t):.2f}" for key, t in fits.items())
    said = [f"{who}: fitted over {size(int(contexts[0]))} to {size(int(contexts[-1]))}: {powers}."]
    if len(there) > 2:
        grown = Growth.fit(contexts, chosen)
        at = matters(grown, Growth.fit(contexts, attended))
        where = (
            "never"
            if at is None
            else f"from {at / 1024:,.0f}K tokens on"
            + ("" if contexts[0] <= at <= contexts[-1] else " (beyond what was measured)")
        )
        said.append(
            f"{who}: selection's quadratic part is {MATTERS:.0%} of attention + selection {where}; fitted as "
            f"{grown.linear:.3g} n + {grown.quadratic:.3g} n^2 seconds."
        )
    return said


def table(machine: Facts, measured: Measured) -> Table:
    cell, _ = measured[0]
    found = series(measured)
    columns = [
        Column("context", lambda r: size(r["context"])),
        Column("type", lambda r: r["dtype"], left=True),
        Column("threads", lambda r: r["threads"]),
        Column("policy", lambda r: r["name"], left=True),
        Column("selection s", lambda r: three_digits(r["selection"]) if r["selection"] else None),
        Column("attention s", lambda r: three_digits(r["attention"])),
        Column("both s", lambda r: three_digits(r["both"])),
        Column("selection's share", lambda r: r["selection"] / r["both"], ".1%"),
        Column("selection n^", lambda r: r["selection slope"], ".2f"),
        Column("attention n^", lambda r: r["attention slope"], ".2f"),
        Column("both n^", lambda r: r["both slope"], ".2f"),
    ]
    listed = [line for name, one in found.items() for line in _lines(name, one)]
    made = dict.fromkeys(str(Policy.from_json(p)) for c, _ in measured for _, _, p in c["variants"])
    rounds = sorted({r["rounds"] for _, r in measured})
    notes = [
        *(line for name, one in found.items() for line in conclusions(name, one)),
        *dict.fromkeys(line for _, result in measured for line in result["measured"]),
        *made,
        "n^: the exponent of context between a row and the one above it.",
        f"Medians of {' or '.join(map(str, rounds))} interleaved rounds.",
    ]
    about = f"{cell['device']}, {cell['tier'] or 'no native code'}, torch {machine['torch']}"
    return Table(f"Cost growth, {cell['label']}: {about}", columns, listed, notes)


def figure(machine: Facts, measured: Measured) -> Figure:
    """Seconds over context, both axes logarithmic."""
    from matplotlib.lines import Line2D
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    from ...report.figures import frame, plain

    found = series(measured)
    cell, _ = measured[0]
    legend = [Line2D([], [], color=colour, marker="o", label=key) for key, colour in COLOURS.items()]
    about = f"{cell['label']}; {machine['cpu']}"
    made, grid = frame("How selection and attention grow with context", about, 1, len(found), legend)
    for axes, (name, one) in zip(grid[0], found.items(), strict=True):
        plain(axes, f"{name[2]}, {name[0]}, {threads(name[1])}")
        for key, colour in COLOURS.items():
            points = [(n, t) for n, t in zip(one["context"], one[key], strict=True) if t > 0]
            if points:
                axes.plot(*zip(*points, strict=True), color=colour, marker="o", markersize=4, linewidth=1.6)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.xaxis.set_major_locator(FixedLocator(one["context"]))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: size(round(x))))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlabel("context (tokens)", color=QUIET, fontsize=8.5)
    grid[0][0].set_ylabel("seconds", color=QUIET, fontsize=8.5)
    return made
