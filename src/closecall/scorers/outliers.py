"""The block's mean, or shrunk box, and its most outlying keys."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..registry import Setting
from .base import SCORERS, Scorer, box_scores, per_block
from .parameters import check_shrink, check_whole


@SCORERS.register("outliers")
@dataclass(frozen=True)
class Outliers(Scorer):
    """The largest of the row's products with the block's `m` most outlying keys and with what stands for the others.

    A needle is a key unlike its neighbours: the `m` keys most distant from the block's mean are stored as they are (of
    equally distant ones the earlier). The others are stored as their mean (`c` = 0), or as their box shrunk towards it
    (`box` of the others, two vectors), rounded to the keys' own type as if they were keys. m = 0 is `mean` or `box`,
    but for that rounding. Stores m + 1 vectors a block, or m + 2. A block too short for so many repeats its last one.

    The estimated mass counts the stored keys exactly and takes the others to score what stands for them; with the mean,
    by Jensen's inequality, that is a lower bound.
    """

    m: int = 3
    c: float = 0.0

    def __post_init__(self) -> None:
        check_whole("m", self.m, 0, "outlying keys a block")
        check_shrink(self.c)

    @property
    def vectors_per_block(self) -> int:
        return self.m + (2 if self.c else 1)

    def check(self, policy: Setting) -> None:
        if self.m >= policy.block:
            raise ValueError(f"m = {self.m} outlying keys of blocks of {policy.block} keys: use a smaller m")
        super().check(policy)

    def summarise(self, keys: Tensor, block: int) -> tuple[Tensor, ...]:
        """What stands for the other keys, one vector or two, and the `m` outlying ones."""

        def planes(b: Tensor) -> Tensor:
            n = b.shape[-2]
            apart = (b - b.sum(-2, keepdim=True) / n).square().sum(-1).nan_to_num(nan=torch.inf)
            order = apart.sort(dim=-1, descending=True, stable=True).indices
            ordered = b.gather(-2, order[..., None].expand_as(b))
            others = ordered[..., min(self.m, n - 1) :, :]
            mean = others.sum(-2) / others.shape[-2]
            sides = (others.amax(-2), others.amin(-2)) if self.c else (mean,)
            stored = (ordered[..., min(i, n - 1), :] for i in range(self.m))
            found = torch.stack([*(torch.lerp(mean, side, self.c) for side in sides), *stored], -2)
            return found.to(keys.dtype).to(b.dtype).flatten(-2)

        together = per_block(keys, block, planes)
        return torch.unflatten(together, -1, (self.vectors_per_block, -1)).unbind(-2)

    def _parts(self, rows: Tensor, summary: tuple[Tensor, ...]) -> list[Tensor]:
        """The row's scores for what stands for the others, and for each stored key."""
        sides = len(summary) - self.m
        wide = rows.to(summary[0].dtype)
        first = wide @ summary[0].mT if sides == 1 else box_scores(rows, summary[0], summary[1])
        return [first, *(wide @ s.mT for s in summary[sides:])]

    def row_scores(self, rows: Tensor, summary: tuple[Tensor, ...]) -> Tensor:
        best, *others = self._parts(rows, summary)
        for other in others:
            torch.maximum(best, other, out=best)
        return best

    def log_mass(self, rows: Tensor, summary: tuple[Tensor, ...], scale: float, n_keys: int) -> Tensor:
        first, *stored = (scale * part for part in self._parts(rows, summary))
        total = first.add_(math.log(n_keys - self.m))
        for one in stored:
            total = torch.logaddexp(total, one)
        return total
