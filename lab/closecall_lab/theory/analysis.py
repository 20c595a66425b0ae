"""What a dump says: scales and regime, Monte-Carlo regret of every trigger, q* by layer, and which signal is right.

tau-hat is one number for each layer and head (root mean square over its cells), as scores of different heads live on
different scales. Monte Carlo and closed form run on scores divided by it, that is with tau = 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from closecall.triggers.calibrated import threshold_at

from . import signals
from .bounds import RegretBound, regret_bound, spread_variation
from .cells import COLUMNS
from .dump import Dump
from .gaps import Tiles, numbered
from .monte_carlo import Estimate, Regret, estimate, oracle, regret
from .qstar import Gain, at_cost, gain
from .signals import Array, Mean
from .triggers import Cells, fire

# Triggers that expand a tile for all heads at once, and those that expand single cells: the best choice that each is
# compared with is of the same kind.
BY_TILE = ("quantile", "calibrated", "tail-gain", "mass-gain", "random", "last")
BY_CELL = ("per-cell", "gap", "absolute")


@dataclass(frozen=True)
class Scales:
    """The paper's table for one layer: cutoff and spread as measured, tau-hat, and the closed form on scores / tau."""

    layer: int
    variation: float  # CV(r)
    spread_q: float  # q-quantile of r
    tau: float  # median over heads
    cutoff_q: float  # q-quantile of g / tau where g > 0
    tied: float  # share of cells whose cut goes through a tie
    spacing_p10: float  # median over cells of the 10th percentile of their spacings away from the cut, over tau
    spacing_p50: float  # and of their median
    bounds: tuple[RegretBound, ...]  # one for each prompt; none as bfloat16

    def of_bounds(self, name: str) -> float:
        found = [float(getattr(b, name)) for b in self.bounds]
        return float(np.median(found)) if found else math.nan


@dataclass(frozen=True)
class Fired:
    """One trigger: what it loses by the model of the theory, and what it regains in truth."""

    name: str
    regret: Regret
    regained: float  # softmax mass that its expansions regain, mean over all cells and their rows
    best: float  # and the best choice of as many, of the same kind
    gold_lost: float  # share of cells with gold blocks that lack one; NaN where nothing is asked


@dataclass(frozen=True)
class Signal:
    """How a signal's ranking of tiles agrees with the truth, and whether it is higher where gold blocks are dropped."""

    name: str
    regained: Mean  # Spearman's with what expansion regains, tiles ranked within a layer of a prompt
    lost: Mean  # and with what the plain cut loses
    cells: Mean  # as `regained`, for single cells instead of tiles
    gold: float  # AUC over pairs of cells of the same layer
    by_layer: dict[int, Mean]  # `regained` of each layer


@dataclass(frozen=True, eq=False)
class ScorerDiagnosis:
    """All about one scorer. `cells` are its columns without the cells whose scores are not numbers."""

    scorer: str
    facts: dict[str, Any]
    cells: dict[str, Array]
    not_numbers: int
    silent: int  # cells of heads whose tau-hat is 0: no block is misplaced there, V* is 0
    scales: list[Scales]
    scales_bf16: list[Scales]
    estimate: Estimate
    triggers: list[Fired]
    q_star: dict[int, float]
    gain: Gain
    signals: list[Signal] = field(default_factory=list)

    @property
    def layers(self) -> list[int]:
        return [s.layer for s in self.scales]

    def signal(self, name: str) -> Signal:
        return next(s for s in self.signals if s.name == name)


def analyse(dump: Dump, scorer: str, *, samples: int = 32, seed: int = 0) -> ScorerDiagnosis:
    """Reads a dump in two passes; scores are never all in memory."""
    q = dump.facts["q"]
    everything = dump.columns(list(COLUMNS), scorer)
    known = ~np.isnan(everything["margin"])
    if not known.any():
        raise ValueError(f"{dump.path}: no cell of scorer {scorer!r} has scores that are numbers")
    cells = {name: values[known] for name, values in everything.items()}
    tau = head_noise(cells)
    estimates, bounds = _sampled(dump, scorer, known, cells, tau, q, samples, seed)
    fired = fire_all(cells, q, seed)
    extra = torch.from_numpy((cells["expanded"] - cells["keep"]).astype(np.int64))
    quantile = fired["quantile"]
    best = at_cost(estimates, extra, int(extra[quantile].sum()))
    by_layer = best.by(torch.from_numpy(cells["layer"].astype(np.int64)))
    return ScorerDiagnosis(
        scorer=scorer,
        facts=dump.facts,
        cells=cells,
        not_numbers=int((~known).sum()),
        silent=int((tau == 0).sum()),
        scales=_scales(cells, tau, q, "", bounds),
        scales_bf16=_scales(cells, tau, q, "_bf16", {}),
        estimate=estimates,
        triggers=[_judge(name, marks, estimates, cells) for name, marks in fired.items()],
        q_star=by_layer,
        gain=gain(estimates, extra, quantile),
        signals=rate_signals(cells, seed),
    )


def head_noise(cells: dict[str, Array]) -> Array:
    """Returns tau-hat of each cell's layer and head; a tile of one row has no differences of its own."""
    unit = numbered(torch.from_numpy(np.stack([cells["layer"], cells["head"]]))).numpy()
    own = cells["tau"].astype(np.float64)
    known = ~np.isnan(own)
    n = int(unit.max()) + 1
    square = np.bincount(unit[known], own[known] ** 2, n)
    count = np.bincount(unit[known], minlength=n)
    if (count == 0).any():
        raise ValueError("a head has no tile of two rows: tau-hat needs adjacent rows")
    found: Array = np.sqrt(square / count)[unit]
    return found


def _sampled(
    dump: Dump, scorer: str, known: Array, cells: dict[str, Array], tau: Array, q: float, samples: int, seed: int
) -> tuple[Estimate, dict[int, list[RegretBound]]]:
    """Samples all cells by Monte Carlo, and evaluates the closed form for every layer of every prompt."""
    parts: list[Estimate] = []
    bounds: dict[int, list[RegretBound]] = {}
    start, at = 0, 0
    for batch in dump.scores(scorer):
        mine = known[start : start + len(batch)]
        start += len(batch)
        scores, n = batch[mine], int(mine.sum())
        if not n:
            continue
        here = slice(at, at + n)
        at += n
        noisy = tau[here] > 0
        zero = torch.zeros(n)
        part = Estimate(zero, zero.clone(), torch.zeros(2, n), samples)
        if noisy.any():
            tiles = _tiles(scores[noisy] / tau[here][noisy, None], cells, np.flatnonzero(noisy) + here.start)
            drawn = estimate(tiles, 1.0, samples=samples, seed=seed + here.start)
            marks = torch.from_numpy(noisy)
            part.error[marks], part.error_expanded[marks] = drawn.error, drawn.error_expanded
            part.halves[:, marks] = drawn.halves
            for layer, which in _groups(cells["layer"][here][noisy], cells["example"][here][noisy]):
                one = Tiles(tiles.scores[which], tiles.keep[which], tiles.expanded[which])
                spread = one.scores[:, 0] - one.at(one.keep)
                variation = spread_variation(spread)
                beta = 0.0 if math.isnan(variation) else variation
                bounds.setdefault(layer, []).append(regret_bound(one, 1.0, q, beta=beta))
        parts.append(part)
    return Estimate.cat(parts), bounds


def _tiles(scores: Array, cells: dict[str, Array], which: Array) -> Tiles:
    keep, expanded = (torch.from_numpy(cells[name][which].astype(np.int64)) for name in ("keep", "expanded"))
    return Tiles(torch.from_numpy(scores.astype(np.float32)), keep, expanded)


def _groups(layer: Array, example: Array) -> Iterator[tuple[int, Tensor]]:
    """Yields every layer of every prompt with the indices of its cells."""
    for pair in np.unique(np.stack([layer, example]), axis=1).T:
        yield int(pair[0]), torch.from_numpy(np.flatnonzero((layer == pair[0]) & (example == pair[1])))


def _scales(
    cells: dict[str, Array], tau: Array, q: float, ending: str, bounds: dict[int, list[RegretBound]]
) -> list[Scales]:
    scales = []
    for layer in np.unique(cells["layer"]):
        here = cells["layer"] == layer
        r, g = (cells[f"{name}{ending}"][here].astype(np.float64) for name in ("spread", "cutoff"))
        noise = tau[here]
        active = (g > 0) & (noise > 0)
        noisy = noise > 0
        scales.append(
            Scales(
                layer=int(layer),
                variation=spread_variation(torch.from_numpy(r)),
                spread_q=float(np.quantile(r, q)),
                tau=float(np.median(np.unique(noise))),
                cutoff_q=float(np.quantile(g[active] / noise[active], q)) if active.any() else math.nan,
                tied=float((g == 0).mean()),
                **{name: _median(cells[name][here][noisy] / noise[noisy]) for name in ("spacing_p10", "spacing_p50")},
                bounds=tuple(bounds.get(int(layer), ())),
            )
        )
    return scales


def _median(values: Array) -> float:
    """Returns the median of the values that are numbers, NaN if none is."""
    known = values[~np.isnan(values)]
    return float(np.median(known)) if len(known) else math.nan


def cells_of(cells: dict[str, Array]) -> Cells:
    pool = numbered(torch.from_numpy(np.stack([cells["layer"], cells["example"]]).astype(np.int64)))
    return Cells(pool, *(torch.from_numpy(cells[name].astype(np.int64)) for name in ("tile", "head")))


def fire_all(cells: dict[str, Array], q: float, seed: int = 0) -> dict[str, Tensor]:
    """Marks what every trigger expands, bool `[n]` each.

    `calibrated` takes its thresholds from the other prompts; with a single prompt it is left out.
    """
    where = cells_of(cells)
    margin, cutoff = (torch.from_numpy(cells[name]) for name in ("margin", "cutoff"))
    ranked = signals.of(cells, seed)
    fired = {}
    for name in (*BY_TILE, *BY_CELL):
        if name == "calibrated":
            held_out = _calibrated(cells, where, q)
            if held_out is not None:
                fired[name] = held_out
        elif name.endswith("-gain"):
            fired[name] = fire("quantile", -torch.from_numpy(ranked[name]), cutoff, where, q)
        else:
            fired[name] = fire(name, margin, cutoff, where, q, seed=seed)
    return fired


def _calibrated(cells: dict[str, Array], where: Cells, q: float) -> Tensor | None:
    """Marks tiles whose mean margin is at most the threshold that the other prompts' tiles of the layer set."""
    if len(np.unique(cells["example"])) < 2:
        return None
    unit = where.unit.numpy()
    mean = signals.by_tile(cells["margin"].astype(np.float64), unit)
    first = np.unique(unit, return_index=True)[1]
    layer, example = (cells[name][first] for name in ("layer", "example"))
    fired = np.zeros(len(mean), dtype=bool)
    for which, prompt in np.unique(np.stack([layer, example]), axis=1).T:
        others = mean[(layer == which) & (example != prompt)]
        if len(others):
            mine = (layer == which) & (example == prompt)
            fired[mine] = mean[mine] <= threshold_at(torch.from_numpy(others), q)
    return torch.from_numpy(fired[unit])


def _judge(name: str, fired: Tensor, estimates: Estimate, cells: dict[str, Array]) -> Fired:
    where = cells_of(cells)
    unit = where.unit if name in BY_TILE else None
    truth = torch.from_numpy((cells["lost"] - cells["lost_expanded"]).astype(np.float64))
    best = oracle(truth, fired, where.pool, unit)
    asked = cells["gold"] > 0
    left = np.where(fired.numpy(), cells["gold_lost_expanded"], cells["gold_lost"])[asked] > 0
    return Fired(
        name=name,
        regret=regret(estimates, fired, pool=where.pool, unit=unit),
        regained=float((truth * fired).mean()),
        best=float((truth * best).mean()),
        gold_lost=float(left.mean()) if asked.any() else math.nan,
    )


def rate_signals(cells: dict[str, Array], seed: int = 0) -> list[Signal]:
    where = cells_of(cells)
    unit, pool = where.unit.numpy(), where.pool.numpy()
    first = np.unique(unit, return_index=True)[1]
    pools, at = np.unique(pool, return_index=True)
    layer_of, prompt_of = (
        dict(zip(pools.tolist(), cells[name][at].tolist(), strict=True)) for name in ("layer", "example")
    )
    lost = cells["lost"].astype(np.float64)
    regained = lost - cells["lost_expanded"]
    asked, event = cells["gold"] > 0, cells["gold_lost"] > 0

    def over(found: dict[int, float]) -> Mean:
        by_prompt: dict[int, list[float]] = {}
        for p, value in found.items():
            by_prompt.setdefault(prompt_of[p], []).append(value)
        return Mean.over(by_prompt)

    rated = []
    for name, signal in signals.of(cells, seed).items():
        tiles = signals.by_tile(signal.astype(np.float64), unit)
        if name == "random":
            tiles = signal[first]  # a mean over heads would be chance still, but of another kind
        agree = signals.pool_correlations(tiles, signals.by_tile(regained, unit), pool[first])
        layers = sorted(set(layer_of.values()))
        rated.append(
            Signal(
                name=name,
                regained=over(agree),
                lost=over(signals.pool_correlations(tiles, signals.by_tile(lost, unit), pool[first])),
                cells=over(signals.pool_correlations(signal, regained, pool)),
                gold=signals.auc(signal[asked], event[asked], cells["layer"][asked]),
                by_layer={n: over({p: x for p, x in agree.items() if layer_of[p] == n}) for n in layers},
            )
        )
    return rated
