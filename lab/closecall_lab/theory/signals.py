"""How well a signal that a trigger could rank by predicts what the cut really lost.

A trigger ranks the tiles of one sequence in one layer (a pool), so ranks are compared pool by pool and averaged; its
standard error is that of the mean over prompts, whose pools are not independent of each other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.stats import rankdata  # type: ignore[import-untyped]

Array = np.ndarray[Any, Any]

# Name: what is ranked. Each is oriented so that more of it should mean more to lose.
SIGNALS = {
    "margin": "the method: less sigma",
    "gap": "less g, the absolute gap at the cut",
    "spread": "less r, the spread above the cut",
    "tail": "softmax share of the dropped blocks among the tile's own ranked scores",
    "tail-gain": "softmax share of the blocks that expansion adds, likewise",
    "mass": "estimated dropped mass: row scores as logits, normalised by row",
    "mass-gain": "estimated mass of the blocks that expansion adds",
    "position": "later tiles",
    "random": "chance",
}


def of(cells: Mapping[str, Array], seed: int = 0) -> dict[str, Array]:
    """The signals of stored cells."""
    chance = np.random.default_rng(seed)
    return {
        "margin": -cells["margin"],
        "gap": -cells["cutoff"],
        "spread": -cells["spread"],
        "tail": cells["tail"],
        "tail-gain": cells["tail"] - cells["tail_expanded"],
        "mass": cells["estimated"],
        "mass-gain": cells["estimated"] - cells["estimated_expanded"],
        "position": cells["tile"].astype(np.float64),
        "random": chance.random(len(cells["tile"])),
    }


def spearman(x: Array, y: Array) -> float:
    """Rank correlation; NaN where either is constant or there are fewer than three."""
    if len(x) < 3:
        return math.nan
    a, b = (r - r.mean() for r in (rankdata(x), rankdata(y)))
    size = math.sqrt(float((a * a).sum()) * float((b * b).sum()))
    return float((a * b).sum()) / size if size else math.nan


def auc(signal: Array, event: Array, group: Array) -> float:
    """The chance that the signal is higher where the event is than where it is not, ties for half, among pairs of the
    same group; NaN where there is no such pair."""
    won, pairs = 0.0, 0
    for mine in (group == g for g in np.unique(group)):
        n, others = int(event[mine].sum()), int((~event[mine]).sum())
        won += float(rankdata(signal[mine])[event[mine]].sum()) - n * (n + 1) / 2
        pairs += n * others
    return won / pairs if pairs else math.nan


@dataclass(frozen=True)
class Mean:
    """A mean over prompts and its standard error; NaN of none, and no error of one."""

    value: float
    error: float
    n: int

    @classmethod
    def over(cls, by_prompt: Mapping[Any, list[float]]) -> Mean:
        means = [float(np.mean(known)) for v in by_prompt.values() if (known := [x for x in v if not math.isnan(x)])]
        if not means:
            return cls(math.nan, math.nan, 0)
        spread = float(np.std(means, ddof=1)) / math.sqrt(len(means)) if len(means) > 1 else math.nan
        return cls(float(np.mean(means)), spread, len(means))


def by_tile(x: Array, unit: Array) -> Array:
    """Means over the heads of a tile, one for each unit."""
    found: Array = np.bincount(unit, x) / np.bincount(unit)
    return found


def pool_correlations(signal: Array, truth: Array, pool: Array) -> dict[int, float]:
    """Spearman's within each pool."""
    order = np.argsort(pool, kind="stable")
    names, starts = np.unique(pool[order], return_index=True)
    parts = np.split(order, starts[1:])
    return {int(p): spearman(signal[mine], truth[mine]) for p, mine in zip(names, parts, strict=True)}
