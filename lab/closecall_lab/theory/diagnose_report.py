"""A dump's findings as tables, for a terminal and as Markdown."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..spine.numbers import known_mean
from ..spine.table import Column, Table
from .analysis import BY_TILE, Scales, ScorerDiagnosis, analyse
from .dump import Dump
from .signals import SIGNALS, Mean

BY_ROW = ("mass", "mass-gain")
FREE = ("margin", "gap", "spread", "tail", "tail-gain")  # read off the ranked tile scores, which the router has anyway


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value


def _shown(mean: Mean) -> str | None:
    if not mean.n:
        return None
    return f"{mean.value:+.2f}" + ("" if math.isnan(mean.error) else f" ± {mean.error:.2f}")


def setting(facts: dict[str, Any]) -> str:
    prompts = "1 prompt" if facts["n"] == 1 else f"{facts['n']} prompts"
    return (
        f"{facts['model']}, {facts['task']} at {facts['context']} tokens, {prompts}, {facts['prefill']} prefill; "
        f"budget {facts['budget']}: tile budget {facts['tile_budget']}, expanded {facts['expanded_budget']}, "
        f"q {facts['q']:g}"
    )


def _mean(scales: Sequence[Scales], name: str) -> float | None:
    return known_mean(getattr(s, name) for s in scales)


def _median_bound(scales: Sequence[Scales], name: str) -> float | None:
    known = [x for s in scales if not math.isnan(x := s.of_bounds(name))]
    return float(np.median(known)) if known else None


def _regime(scales: Sequence[Scales]) -> str | None:
    regimes = [b.regime for s in scales for b in s.bounds]
    if not regimes:
        return None
    noisy = sum(x == "noise-dominated" for x in regimes)
    return "noise-dominated" if noisy == len(regimes) else f"noise-dominated in {noisy} of {len(regimes)} layers"


def scales_table(findings: Sequence[ScorerDiagnosis]) -> Table:
    """Makes the paper's table, with the columns that it left out."""
    rows = []
    for f in findings:
        for precision, scales in (("float32", f.scales), ("bfloat16", f.scales_bf16)):
            row: dict[str, Any] = {"scorer": f.scorer, "scores": precision, "regime": _regime(scales)}
            row |= {name: _mean(scales, name) for name in ("variation", "spread_q", "cutoff_q", "tied")}
            row["tau"] = float(np.median([s.tau for s in scales])) if precision == "float32" else None
            for name in ("spacing_p10", "spacing_p50"):
                row[name] = _mean(scales, name) if precision == "float32" else None
            row |= {name: _median_bound(scales, name) for name in ("gamma", "active_band_mass", "eps_bar", "bound")}
            rows.append(row)
    first = findings[0]
    columns = [
        Column("scorer", left=True),
        Column("scores", left=True),
        Column("CV(r)", "variation", ".2f"),
        Column("r_q", "spread_q", ".2f"),
        Column("tau-hat", "tau", ".2f"),
        Column("g_q+/tau-hat", "cutoff_q", ".3f"),
        Column("ties at the cut", "tied", ".1%"),
        Column("spacing p10", spec=".4f"),
        Column("p50", "spacing_p50", ".3f"),
        Column("gamma_q/tau-hat", "gamma", ".3f"),
        Column("m_q(CV) active", "active_band_mass", ".2f"),
        Column("eps-bar", "eps_bar", ".3g"),
        Column("bound", spec=".3f"),
        Column("regime", left=True),
    ]
    notes = [
        "means over layers of each layer's number; tau-hat: median over layers of the median over heads; gamma_q, "
        "m_q, eps-bar and the bound: medians over layers and prompts, on scores divided by their head's tau-hat",
        "g_q+: q-quantile of the gap at the cut where it is not 0; spacing: between neighbours away "
        "from it, over tau-hat: median over cells of each cell's 10th percentile and median",
        *(_not_numbers(f) for f in findings if f.not_numbers or f.silent),
    ]
    return Table(f"Scales and regime: {setting(first.facts)}", columns, rows, notes)


def _not_numbers(f: ScorerDiagnosis) -> str:
    remarks = []
    if f.not_numbers:
        remarks.append(f"{f.not_numbers} cells with scores that are not numbers, left out of everything here")
    if f.silent:
        remarks.append(f"{f.silent} cells of heads with tau-hat 0, whose V* is 0")
    return f"{f.scorer}: " + "; ".join(remarks)


def triggers_table(f: ScorerDiagnosis) -> Table:
    columns = [
        Column("trigger", "name", left=True),
        Column("expands", lambda t: "tiles" if t.name in BY_TILE else "cells", left=True),
        Column("fired", "regret.fired", ".1%"),
        Column("errors avoided", lambda t: f"{t.regret.avoided:.4f} ± {t.regret.avoided_error:.4f}"),
        Column(
            "regret (Monte Carlo)",
            lambda t: f"{max(t.regret.low, 0.0):.4f} to {t.regret.high:.4f} ± {t.regret.error:.4f}",
        ),
        Column("mass regained", "regained", ".5f"),
        Column("of the best", lambda t: t.regained / t.best if t.best > 0 else None, ".0%"),
        Column("gold lost", lambda t: _known(t.gold_lost), ".1%"),
    ]
    calibrated = any(t.name == "calibrated" for t in f.triggers)
    notes = [
        f"{f.estimate.samples} draws a cell; errors avoided and regret: identification errors a cell, by the paper's "
        "model; ± is one standard error of the draws",
        "mass regained: true softmax mass of the blocks that expansion adds, mean over all cells; of the best: against "
        "the best choice of as many tiles (or cells) of each layer and prompt",
        "gold lost: of the (head, tile) cells where something is asked, those that lack a gold block",
        *(["calibrated: thresholds by layer, from the other prompts"] if calibrated else []),
    ]
    return Table(f"Triggers on {f.scorer}", columns, f.triggers, notes)


def layers_table(f: ScorerDiagnosis) -> Table:
    value = f.estimate.value.numpy()
    best = best_signal(f)
    rows = []
    for s in f.scales:
        here = f.cells["layer"] == s.layer
        rows.append(
            {
                "layer": s.layer,
                "margin": float(np.median(f.cells["margin"][here])),
                "tau": s.tau,
                "value": float(value[here].mean()),
                "lost": float(f.cells["lost"][here].mean()),
                "regained": float((f.cells["lost"] - f.cells["lost_expanded"])[here].mean()),
                "q": f.q_star.get(s.layer),
                "sigma": _shown(f.signal("margin").by_layer[s.layer]),
                "best": _shown(f.signal(best).by_layer[s.layer]),
            }
        )
    columns = [
        Column("layer"),
        Column("sigma", "margin", ".4f"),
        Column("tau-hat", "tau", ".2f"),
        Column("V*", "value", ".3f"),
        Column("mass lost", "lost", ".4f"),
        Column("expansion regains", "regained", ".4f"),
        Column("q*", "q", ".2f"),
        Column("rank correlation of sigma", "sigma"),
        Column(f"of {best}", lambda r: r["best"]),
    ]
    g = f.gain
    more = (g.best - g.avoided) / g.avoided if g.avoided else math.nan
    notes = [
        "sigma: median; V*, mass lost by the plain cut and regained by expanding every tile: means over cells",
        f"q*: share of cells that the best use of the quantile's blocks would expand; over all layers {g.q_star:.2f} "
        f"for q = {f.facts['q']:g}. It avoids {g.best:.0f} identification errors instead of {g.avoided:.0f} "
        f"({more:+.0%}, standard error of the difference at most {g.error:.0f})",
        "rank correlation: Spearman's with what expansion regains, tiles of one prompt, mean ± standard error over "
        "prompts; signs are such that +1 is a perfect signal",
    ]
    return Table(f"Layers under {f.scorer}", columns, rows, notes)


def best_signal(f: ScorerDiagnosis, among: Sequence[str] = FREE) -> str:
    """The signal, other than sigma, that agrees best with what expansion regains."""
    known = [s for s in f.signals if s.name in among and s.name != "margin" and s.regained.n]
    return max(known, key=lambda s: s.regained.value).name if known else among[-1]


def _clearly(better: Mean, than: Mean) -> bool:
    """Whether one mean exceeds the other by two standard errors. A single prompt has none, so nothing is clear."""
    return better.value - than.value > 2 * math.hypot(better.error, than.error)


def verdict(f: ScorerDiagnosis) -> str:
    """Says in plain words whether sigma is a good signal here, and which would be better."""
    sigma, free, rows = (f.signal(name).regained for name in ("margin", best_signal(f), best_signal(f, BY_ROW)))
    if not sigma.n:
        return "tiles do not differ in what expansion regains: no signal can be judged"
    good = "a good" if sigma.value > 0.5 else "a weak" if sigma.value > 0.1 else "no useful"
    sentence = f"sigma is {good} signal here ({_shown(sigma)} rank correlation with the mass that expansion regains)"
    if _clearly(free, sigma):
        sentence = f"{sentence}; {best_signal(f)}, from the same ranked scores, is better ({_shown(free)})"
    else:
        sentence = f"{sentence}; no other signal from the ranked scores is clearly better"
    if _clearly(rows, max(sigma, free, key=lambda m: m.value if m.n else -math.inf)):
        sentence = (
            f"{sentence}; {best_signal(f, BY_ROW)}, an exponential a row and block more, agrees better ({_shown(rows)})"
        )
    return sentence


def _asked(f: ScorerDiagnosis) -> list[str]:
    asked = f.cells["gold"] > 0
    if not asked.any():
        return []
    lost = int((f.cells["gold_lost"][asked] > 0).sum())
    return [
        f"gold lost: of {int(asked.sum())} cells where something is asked, {lost} drop a gold block; pairs by layer"
    ]


def signals_table(f: ScorerDiagnosis) -> Table:
    columns = [
        Column("signal", "name", left=True),
        Column("what it ranks by", lambda s: SIGNALS[s.name], left=True),
        Column("regained", lambda s: _shown(s.regained)),
        Column("lost", lambda s: _shown(s.lost)),
        Column("regained, by cell", lambda s: _shown(s.cells)),
        Column("gold lost, AUC", lambda s: _known(s.gold), ".2f"),
    ]
    notes = [
        verdict(f),
        "Spearman's rank correlation with the true mass that expansion regains, or that the plain cut loses: tiles (or "
        "cells) of one layer of one prompt, then means; ± is one standard error over prompts",
        *_asked(f),
        f"{', '.join(FREE)} are read off the ranked scores of a tile; mass and mass-gain take one exponential more for "
        "every row and block, and the forced blocks' logits",
    ]
    return Table(f"Which signal predicts the loss, {f.scorer}", columns, f.signals, notes)


def tables(findings: Sequence[ScorerDiagnosis]) -> list[Table]:
    found = [scales_table(findings)]
    for f in findings:
        found += [triggers_table(f), signals_table(f), layers_table(f)]
    return found


def findings_of(dump: Dump, *, samples: int = 32, seed: int = 0) -> list[ScorerDiagnosis]:
    return [analyse(dump, scorer, samples=samples, seed=seed) for scorer in dump.facts["scorers"]]


def command(facts: dict[str, Any]) -> str:
    """Writes the command that repeats the diagnosis."""
    options = ("model", "task", "context", "n", "seed", "budget", "q", "rho", "prefill")
    said = "".join(f" --{name} {facts[name]}" for name in options)
    return f"closecall diagnose{said} --tile-factor {facts['tile_factor']:g} --scorers {','.join(facts['scorers'])}"


def markdown(
    findings: Sequence[ScorerDiagnosis], more: Sequence[Table] = (), pictures: Sequence[str] = (), certified: str = ""
) -> str:
    """One page. `more`: further tables; `pictures`: files beside it; `certified`: the budgets of `--certify`."""
    facts = findings[0].facts
    head = [f"# Diagnosis: {setting(facts)}", "", f"Weights: {facts.get('label', facts['model'])}."]
    head += ["", f"Made by `{command(facts)}{f' --certify {certified}' if certified else ''}`."]
    body = [table.markdown(2) for table in (*tables(findings), *more)]
    shown = [f"![{name.removesuffix('.png')}]({name})\n" for name in pictures]
    return "\n".join([*head, "", *body, *shown])
