"""The block's mean, or shrunk box, and its most outlying keys."""

from __future__ import annotations

from dataclasses import dataclass

from ..registry import Setting
from .base import SCORERS, Planes
from .parameters import check_shrink, check_whole
from .planes import PlaneScorer


@SCORERS.register("outliers")
@dataclass(frozen=True)
class Outliers(PlaneScorer):
    """The largest of the row's products with the block's `m` most outlying keys and with what stands for the others.

    A needle is a key unlike its neighbours: the `m` keys most distant from the block's mean are stored as they are (of
    equally distant ones the earlier). The others are stored as their mean (`c` = 0), or as their box shrunk towards it
    (`box` of the others, two vectors), rounded to the keys' own type as if they were keys. m = 0 is `box`
    or, but for that rounding, `mean`. Stores m + 1 vectors a block, or m + 2. A block too short for so many repeats
    its last one.

    The estimated mass counts the stored keys exactly and takes the others to score what stands for them; with the mean,
    by Jensen's inequality, that is a lower bound.
    """

    m: int = 3
    c: float = 0.0

    def __post_init__(self) -> None:
        check_whole("m", self.m, 0, "outlying keys a block")
        check_shrink(self.c)

    @property
    def planes(self) -> Planes:
        return Planes(box=self.c > 0, shrink=self.c if self.c > 0 else None, outliers=self.m)

    def check(self, policy: Setting) -> None:
        if self.m >= policy.block:
            raise ValueError(f"m = {self.m} outlying keys of blocks of {policy.block} keys: use a smaller m")
        super().check(policy)
