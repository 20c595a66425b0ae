"""Water-filling: one threshold on tile scores for all heads and tiles of a layer."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..ranking import Ranked
from .base import RULES
from .pooled import Pooled, ordered


@RULES.register("fill")
@dataclass(frozen=True)
class Fill(Pooled):
    """Keeps the blocks of highest tile score in the pool, whatever head and tile they are of.

    This is made for scores that can be compared between tiles: shares of softmax mass. With `aggregate="mass"` it keeps
    the most estimated mass that the budget can buy; with `"mass-max"` the blocks that some row wants most. Logits are
    larger for some heads than for others whatever they mean: with `"max"` such heads take all but the floor.
    """

    def wanted(self, ranked: Ranked) -> Tensor:
        return ordered(ranked.scores)

    def describe(self) -> str:
        return f"keep the blocks of highest score, {self._bounds()}"
