"""Quest's box, shrunk towards the block's mean."""

from __future__ import annotations

from dataclasses import dataclass

from .base import SCORERS, Planes
from .parameters import check_shrink
from .planes import PlaneScorer


@SCORERS.register("box")
@dataclass(frozen=True)
class Box(PlaneScorer):
    """The largest product any point of the shrunk box `mean + c (kmax - mean)` to `mean + c (kmin - mean)` can have.

    Both sides are rounded to the keys' own type. c = 1 is `quest`, and c = 0, but for that rounding, `mean`. Quest's
    corner is a key that hardly ever exists: with D coordinates their maxima come from up to D different keys, and
    blocks with one odd coordinate each look better than they are. Half-way is an estimate rather than a bound, and
    still two vectors a block. Its estimated mass takes every key to score so.
    """

    c: float = 0.5

    def __post_init__(self) -> None:
        check_shrink(self.c)

    @property
    def planes(self) -> Planes:
        return Planes(box=True, shrink=self.c)
