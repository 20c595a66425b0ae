"""The block's mean key (the paper's Eq. 1)."""

from __future__ import annotations

from dataclasses import dataclass

from .base import SCORERS, Planes
from .planes import PlaneScorer


@SCORERS.register("mean")
@dataclass(frozen=True)
class Mean(PlaneScorer):
    """Eq. 1: the row's product with the block's mean key (SSA). Its estimated mass is, by Jensen, a lower bound."""

    @property
    def planes(self) -> Planes:
        return Planes(box=False)
