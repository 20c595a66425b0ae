"""How cost grows with context: exponents, and where selection's quadratic part begins to matter."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from closecall.policy import Policy

from ..spine import figure as spine
from ..spine.numbers import size, threads, three_digits
from ..spine.results import Facts, Measured
from ..spine.style import QUIET
from ..spine.table import Column, Table
from .base import cell_columns, medians_note, where

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MATTERS = 0.1  # of attention + selection: from here on the quadratic part is said to matter
LONG = 128 * 1024  # from here on the exponent is told apart
BASELINES = ("sdpa", "dense")
COLOURS = {"attention": "#0072b2", "selection": "#d55e00", "both": "#111827", "sdpa": "#e69f00", "dense": "#009e73"}
LABELS = {key: key for key in COLOURS} | {"sdpa": "torch SDPA", "dense": "our kernel, dense"}
Lap = dict[str, float]
Row = dict[str, Any]
Key = tuple[str, int, int, str]  # type, head dim, threads, policy


def exponent(contexts: Sequence[float], seconds: Sequence[float]) -> float:
    """The slope of log seconds over log context, by least squares."""
    return float(np.polyfit(np.log(contexts), np.log(seconds), 1)[0])


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
        from scipy.optimize import nnls  # type: ignore[import-untyped]

        n, t = np.asarray(contexts, float), np.asarray(seconds, float)
        terms = np.stack([n / t, n * n / t], 1)
        sizes = np.linalg.norm(terms, axis=0)
        linear, quadratic = nnls(terms / sizes, np.ones(len(n)))[0] / sizes
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


def _medians(laps: Sequence[Lap], step: str | None = None) -> float:
    return float(np.median([sum(lap.values()) if step is None else lap[step] for lap in laps]))


def series(measured: Measured) -> dict[Key, list[Row]]:
    """Lists a row for each context, by type, head dim, threads and policy, with the baselines' whole times."""
    by_kind: dict[Key, list[Row]] = {}
    for cell, result in sorted(measured, key=lambda pair: pair[0]["context"]):
        n = cell["context"]
        times = n / result["dense_rows"]
        whole = {name: times * _medians(result["laps"][name]) for name in BASELINES}
        for name, laps in result["laps"].items():
            if name in BASELINES:
                continue
            row = {
                "context": n,
                "selection": _medians(laps, "select"),
                "attention": _medians(laps, "attend"),
                "both": _medians(laps),
                "share": float(np.median([lap["select"] / sum(lap.values()) for lap in laps])),
                "extra_mib": result["extra_mib"][name],
                "times": times,
            }
            row |= whole | {f"vs_{base}": whole[base] / row["both"] for base in BASELINES}
            by_kind.setdefault((cell["dtype"], cell["dim"], cell["threads"], name), []).append(row)
    return by_kind


def _column(rows: Sequence[Row], key: str) -> list[float]:
    return [row[key] for row in rows]


def conclusions(name: Key, rows: Sequence[Row]) -> list[str]:
    """Fitted exponents and the context where selection's quadratic part matters, in sentences."""
    who = f"{name[3]}, {name[0]}, {threads(name[2])}"
    if len(rows) < 2:
        return [f"{who}: one context, so there is nothing to fit."]
    contexts, chosen, attended, both = (_column(rows, k) for k in ("context", "selection", "attention", "both"))
    fits = {"selection": chosen, "attention": attended, "both": both}
    powers = ", ".join(f"{key} n^{exponent(contexts, t):.2f}" for key, t in fits.items())
    lines = [f"{who}: fitted over {size(int(contexts[0]))} to {size(int(contexts[-1]))}: {powers}."]
    if (long := [i for i, n in enumerate(contexts) if n >= LONG]) and len(long) > 1:
        power = exponent([contexts[i] for i in long], [both[i] for i in long])
        lines.append(f"{who}: from {size(int(contexts[long[0]]))} on, selection + attention grow like n^{power:.2f}.")
    if len(rows) > 2:
        grown = Growth.fit(contexts, chosen)
        at = matters(grown, Growth.fit(contexts, attended))
        where = (
            "never"
            if at is None
            else f"from {at / 1024:,.0f}K tokens on"
            + ("" if contexts[0] <= at <= contexts[-1] else " (beyond what was measured)")
        )
        lines.append(
            f"{who}: selection's quadratic part is {MATTERS:.0%} of attention + selection {where}; fitted as "
            f"{grown.linear:.3g} n + {grown.quadratic:.3g} n^2 seconds."
        )
    return lines


COLUMNS = (
    *cell_columns(),
    Column("policy", "name", left=True),
    Column("selection s", lambda r: three_digits(r["selection"])),
    Column("attention s", lambda r: three_digits(r["attention"])),
    Column("share", spec=".1%"),
    Column("both n^", "slope", ".2f"),
    Column("SDPA s", lambda r: _marked(r, "sdpa"), left=True),
    Column("dense s", lambda r: _marked(r, "dense"), left=True),
    Column("vs SDPA", "vs_sdpa", ".1f"),
    Column("vs our dense", "vs_dense", ".1f"),
    Column("extra MiB", "extra_mib", ".0f"),
)


def _marked(row: Row, name: str) -> str:
    """Times that were multiplied begin with a sign that says so."""
    return ("~" if row["times"] > 1 else "") + three_digits(row[name])


def table(machine: Facts, measured: Measured) -> Table:
    cell, _ = measured[0]
    by_kind = series(measured)
    listed = []
    for name, rows in by_kind.items():
        slopes = local(_column(rows, "context"), _column(rows, "both"))
        told = dict(zip(("dtype", "dim", "threads", "name"), name, strict=True))
        listed += [told | row | {"slope": slope} for row, slope in zip(rows, slopes, strict=True)]
    forms = sorted({r["sdpa_form"] for _, r in measured})
    notes = [
        *(line for name, rows in by_kind.items() for line in conclusions(name, rows)),
        *dict.fromkeys(str(Policy.from_json(p)) for c, _ in measured for _, _, p in c["variants"]),
        "share: selection's, of selection + attention. n^: the exponent of context, from the row above.",
        "~: measured on rows from the middle of the prompt, which see half of the keys, and multiplied by "
        "context / rows: " + ", ".join(f"{size(n)} on {rows} rows" for n, rows in _multiplied(measured)) + ".",
        "vs SDPA, vs our dense: their time over selection + attention. extra MiB: beyond q, k, v and the output.",
        f"SDPA is torch's flash kernel: {' or '.join(forms)}.",
        medians_note(measured),
    ]
    if not _multiplied(measured):
        notes = [line for line in notes if not line.startswith("~")]
    return Table(f"How cost grows with context: {where(machine, cell)}", COLUMNS, listed, notes, keys=5)


def _multiplied(measured: Measured) -> list[tuple[int, int]]:
    return sorted({(c["context"], r["dense_rows"]) for c, r in measured if r["dense_rows"] < c["context"]})


def figure(machine: Facts, measured: Measured) -> Figure:
    """Three panels under each other for every policy and type: time, selection's share, memory."""
    from matplotlib.lines import Line2D
    from matplotlib.ticker import PercentFormatter

    by_kind = series(measured)
    legend = [
        Line2D([], [], color=colour, marker="o", linestyle="--" if key in BASELINES else "-", label=LABELS[key])
        for key, colour in COLOURS.items()
    ]
    legend.append(Line2D([], [], color=QUIET, marker="o", markerfacecolor="white", linestyle="--", label="multiplied"))
    names = [
        f"{spine.broken(policy)}\n{dtype}, D = {dim}, {threads(n_threads)}" for dtype, dim, n_threads, policy in by_kind
    ]
    made, grid = spine.frame(
        "How time and memory grow with context", where(machine, measured[0][0]), 3, len(by_kind), legend,
        name_lines=max(name.count("\n") + 1 for name in names),
    )  # fmt: skip
    for across, (name, rows) in enumerate(zip(names, by_kind.values(), strict=True)):
        contexts = _column(rows, "context")
        for down, title in enumerate((name, "", "")):
            spine.plain(grid[down][across], title)
            spine.contexts(grid[down][across], contexts)
        for key, colour in COLOURS.items():
            dashed = "--" if key in BASELINES else "-"
            grid[0][across].plot(contexts, _column(rows, key), dashed, color=colour, linewidth=1.6)
            for row in rows:
                hollow = key in BASELINES and row["times"] > 1
                grid[0][across].plot(
                    row["context"], row[key], "o", color=colour, markersize=4,
                    markerfacecolor="white" if hollow else colour,
                )  # fmt: skip
        grid[0][across].set_yscale("log")
        last = rows[-1]
        ahead = f"at {size(last['context'])}: {last['vs_sdpa']:.0f}x SDPA, {last['vs_dense']:.0f}x dense"
        grid[0][across].text(0.03, 0.95, ahead, transform=grid[0][across].transAxes, va="top", fontsize=8)
        grid[1][across].plot(contexts, _column(rows, "share"), "o-", color=COLOURS["selection"], markersize=4)
        grid[1][across].set_ylim(0, max(0.2, 1.1 * max(_column(rows, "share"))))
        grid[1][across].yaxis.set_major_formatter(PercentFormatter(1))
        memory = [(row["context"], row["extra_mib"]) for row in rows if row["extra_mib"]]
        if memory:
            grid[2][across].plot(*zip(*memory, strict=True), "o-", color=COLOURS["both"], markersize=4)
            grid[2][across].set_yscale("log")
        spine.label(grid[2][across], "context (tokens)")
    for down, label in enumerate(("seconds", "selection's share", "extra MiB")):
        spine.label(grid[down][0], y=label)
        ends = [axes.get_ylim() for axes in grid[down]]  # one scale, so that policies can be compared
        for axes in grid[down]:
            axes.set_ylim(min(low for low, _ in ends), max(high for _, high in ends))
    return made
