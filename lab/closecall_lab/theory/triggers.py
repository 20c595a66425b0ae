"""Triggers on stored tiles: which ones each would expand, for the regret of any of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from closecall.registry import unknown
from closecall.triggers.base import lowest

from .gaps import numbered

NAMES = ("quantile", "per-cell", "gap", "absolute", "random", "last")


@dataclass(frozen=True, eq=False)
class Cells:
    """Says which pool, tile and head each stored cell belongs to; int64 `[n]` each.

    pool: a sequence in a layer, among whose tiles a trigger shares out its budget
    tile: the tile's number in its sequence
    head: so that (pool, tile) names the heads that a tile-wise trigger expands together
    """

    pool: Tensor
    tile: Tensor
    head: Tensor

    @property
    def unit(self) -> Tensor:
        """int64 `[n]`: the same number for the heads of one tile."""
        return numbered(torch.stack([self.pool, self.tile]))


def fire(
    name: str, margin: Tensor, cutoff: Tensor, cells: Cells, q: float, *, threshold: float = 0.05, seed: int = 0
) -> Tensor:
    """bool `[n]`: the tiles that a trigger expands, from margins sigma and cutoff gaps g `[n]`.

    `quantile` (the method: smallest margin averaged over heads), `random` and `last` expand whole tiles, ceil(q T) of a
    pool's; `per-cell` and `gap` the ceil(q n) single cells of smallest margin or gap; `absolute` every cell whose
    margin is at most `threshold`. Ties go to the later tile.
    """
    if name not in NAMES:
        raise unknown("trigger", name, NAMES)
    if name == "absolute":
        return margin <= threshold
    if name in ("per-cell", "gap"):
        order = torch.argsort(cells.head * (int(cells.tile.max()) + 1) + cells.tile, stable=True)
        key = (margin if name == "per-cell" else cutoff)[order].double()
        chosen = torch.empty_like(margin, dtype=torch.bool)
        chosen[order] = lowest(key, torch.ones_like(key, dtype=torch.bool), numbered(cells.pool)[order], q)
        return chosen
    unit = cells.unit  # ascending by pool, then by tile
    n = int(unit.max()) + 1
    pool = torch.zeros(n, dtype=torch.int64).scatter_(0, unit, numbered(cells.pool))
    if name == "quantile":
        heads = torch.zeros(n, dtype=torch.float64).index_add_(0, unit, torch.ones_like(margin, dtype=torch.float64))
        key = torch.zeros(n, dtype=torch.float64).index_add_(0, unit, margin.double()) / heads
    elif name == "random":
        key = torch.rand(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    else:
        key = torch.zeros(n, dtype=torch.float64)  # ties go to the later tile
    return lowest(key, torch.ones(n, dtype=torch.bool), pool, q)[unit]
