"""The paper's trigger: the least decided tiles of a sequence."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .base import TRIGGERS, TileShare, fixed_point


@TRIGGERS.register("quantile")
@dataclass(frozen=True)
class Quantile(TileShare):
    """The method: the tiles whose margin, averaged over all heads, is smallest in their sequence (Eq. 5)."""

    def tile_key(self, margin: Tensor, sequence: Tensor) -> Tensor:
        return fixed_point(margin).sum(1)

    def describe(self, q: float) -> str:
        return f"the least decided {q:.0%} of tiles"
