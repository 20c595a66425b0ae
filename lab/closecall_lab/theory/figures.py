"""The pictures of a diagnosis. Needs matplotlib, imported on first use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.stats import rankdata  # type: ignore[import-untyped]

from ..spine.figure import frame, plain, widen
from ..spine.style import BUDGET, COLOURS, INK
from . import signals
from .analysis import BY_TILE, ScorerDiagnosis, cells_of
from .certified import LEVELS, Share
from .diagnose_report import setting
from .signals import Array

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GAP = 0.85  # inches between panels
_COLOUR = {"mean": COLOURS["router"], "quest": COLOURS["router-on-quest"]}


def colour(scorer: str) -> str:
    return _COLOUR.get(scorer, COLOURS["auto"])


def _where(finding: ScorerDiagnosis) -> str:
    text = setting(finding.facts)
    half = text.index("; ") + 2
    return f"{text[:half].rstrip('; ')}\n{text[half:]}"


def margins(findings: Sequence[ScorerDiagnosis]) -> Figure:
    """Draws sigma by layer, which shows why one threshold for all layers fails."""
    from matplotlib.ticker import MaxNLocator

    figure, grid = frame("Margins by layer", _where(findings[0]), 1, len(findings), gap=GAP)
    for axes, f in zip(grid[0], findings, strict=True):
        parts = [f.cells["margin"][f.cells["layer"] == n] for n in f.layers]
        low, quarter, middle, three, high = (
            np.array([max(float(np.quantile(p, x)), 1e-6) for p in parts]) for x in (0.05, 0.25, 0.5, 0.75, 0.95)
        )
        axes.fill_between(f.layers, low, high, color=colour(f.scorer), alpha=0.15, linewidth=0, label="5% to 95%")
        axes.fill_between(f.layers, quarter, three, color=colour(f.scorer), alpha=0.3, linewidth=0, label="quartiles")
        axes.plot(f.layers, middle, "-o", color=colour(f.scorer), markersize=4, linewidth=1.6, label="median cell")
        axes.plot(f.layers, _thresholds(f), "--", color=INK, linewidth=1.2, label="calibrated threshold")
        axes.set_yscale("log")
        axes.set_ylim(bottom=float(low.min()) / 8)  # room for the legend
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.legend(frameon=False, fontsize=8, labelcolor=INK, loc="lower left", ncols=2)
        plain(axes, f.scorer, "layer", "margin sigma")
    return figure


def _thresholds(f: ScorerDiagnosis) -> list[float]:
    """Returns each layer's q-quantile of the margins, averaged over heads."""
    unit = cells_of(f.cells).unit.numpy()
    mean = signals.by_tile(f.cells["margin"].astype(np.float64), unit)
    layer = f.cells["layer"][np.unique(unit, return_index=True)[1]]
    return [float(np.quantile(mean[layer == n], f.facts["q"])) for n in f.layers]


def value(findings: Sequence[ScorerDiagnosis]) -> Figure:
    """V* and the true gain against sigma: does a small margin mean that expansion pays?"""
    figure, grid = frame("What expansion is worth, by margin", _where(findings[0]), len(findings), 2, gap=GAP)
    for row, f in zip(grid, findings, strict=True):
        place = within(f.cells["margin"], cells_of(f.cells).pool.numpy())
        truth = f.cells["lost"] - f.cells["lost_expanded"]
        for axes, worth, what in (
            (row[0], f.estimate.value.numpy(), "V* (Monte Carlo)"),
            (row[1], truth, "true mass regained"),
        ):
            x, middle, low, high = binned(place, worth)
            axes.fill_between(x, low, high, color=colour(f.scorer), alpha=0.2, linewidth=0, label="quartiles")
            axes.plot(x, middle, "-o", color=colour(f.scorer), markersize=4, linewidth=1.6, label="mean")
            axes.set_xlim(0, 1)
            axes.set_ylim(bottom=0)
            axes.legend(frameon=False, fontsize=8, labelcolor=INK, loc="best")
            plain(
                axes,
                f"{f.scorer}: {what}",
                "rank of sigma in its layer and prompt, from closest call to clearest",
                what,
            )
    return figure


def within(x: Array, pool: Array) -> Array:
    """Ranks each value within its pool, from 0 (smallest) to 1."""
    found = np.empty(len(x))
    for mine in (pool == p for p in np.unique(pool)):
        found[mine] = (rankdata(x[mine]) - 0.5) / mine.sum()
    return found


def binned(x: Array, y: Array, bins: int = 20) -> tuple[Array, ...]:
    """Cuts points into equal parts by x; returns each part's median x, mean y and quartiles of y."""
    parts = [p for p in np.array_split(np.argsort(x, kind="stable"), bins) if len(p)]
    found = [(float(np.median(x[p])), float(y[p].mean()), *np.quantile(y[p], (0.25, 0.75))) for p in parts]
    return tuple(np.array(column) for column in zip(*found, strict=True))


def regrets(findings: Sequence[ScorerDiagnosis]) -> Figure:
    """Regret of every trigger by the theory's model, and what each really regains."""
    figure, grid = frame("Triggers: regret, and mass regained", _where(findings[0]), len(findings), 2, gap=GAP)
    widen(figure, 0.7)
    for row, f in zip(grid, findings, strict=True):
        names = [f"{t.name}, {t.regret.fired:.0%}" for t in f.triggers]
        y = -np.arange(len(names), dtype=float)
        for i, t in enumerate(f.triggers):
            shade = colour(f.scorer) if t.name in BY_TILE else BUDGET
            low, high = max(t.regret.low, 0.0), t.regret.high
            row[0].plot([low, high], [-i, -i], color=shade, linewidth=6, solid_capstyle="butt")
            row[0].plot([low - 2 * t.regret.error, high + 2 * t.regret.error], [-i, -i], color=INK, linewidth=1)
            row[1].barh(-i, t.regained / t.best if t.best > 0 else 0.0, height=0.6, color=shade)
        row[0].set_yticks(y, names, fontsize=8.5, color=INK)
        row[1].set_yticks(y, ["" for _ in names])
        row[0].set_xlim(left=0)
        row[1].set_xlim(0, 1.02)
        for axes in row:
            axes.set_ylim(-len(names) + 0.4, 0.6)
        plain(
            row[0],
            f"{f.scorer}: regret by Monte Carlo (%: fired; grey: by cell)",
            "identification errors a cell, ± 2 s.e.",
            "",
        )
        plain(row[1], f"{f.scorer}: true mass regained", "as a share of the best choice of as many", "")
    return figure


def tightness(shares: Sequence[Share], where: str) -> Figure:
    """How many rows lost at most so much, and how many can be proved to."""
    scorers = list(dict.fromkeys(s.scorer for s in shares))
    figure, grid = frame("Certificates: proved, and true", where, 1, len(scorers), gap=GAP)
    for axes, scorer in zip(grid[0], scorers, strict=True):
        mine = [s for s in shares if s.scorer == scorer]
        for i, s in enumerate(mine):
            style: dict[str, Any] = {"color": colour(scorer), "alpha": 1 - 0.65 * i / max(1, len(mine) - 1)}
            proved, true = (np.array(x) / s.rows for x in (s.certified, s.really))
            axes.plot(LEVELS, proved, "-", linewidth=1.8, label=f"tile budget {s.tile_budget}: proved", **style)
            axes.plot(LEVELS, true, "--", linewidth=1.2, label="true", **style)
        axes.set_xscale("log")
        axes.set_ylim(0, 1.02)
        axes.legend(frameon=False, fontsize=8, labelcolor=INK, loc="lower right", ncols=2)
        plain(axes, scorer, "softmax mass dropped, at most", "share of rows (all heads and layers)")
    return figure


def drawn(findings: Sequence[ScorerDiagnosis], certified: Sequence[Share]) -> dict[str, Figure]:
    """Every picture, by file stem."""
    made = {"margins": margins(findings), "value": value(findings), "regret": regrets(findings)}
    if certified:
        facts = findings[0].facts
        where = f"{facts['model']}, {facts['task']} at {facts['context']} tokens, first prompt\nrouter on the scorer, q"
        made["tightness"] = tightness(certified, f"{where} {facts['q']:g}, at each budget")
    return made
