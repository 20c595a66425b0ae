"""Scorers whose summaries are planes: a mean or a box of each block's keys, and its most outlying keys beside it.

`PlaneScorer` is the specification of what backends have kernels for. A scorer of this kind only says which planes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..registry import must_define
from .base import Planes, Scorer, mean_key, per_block, products

_FIXED = ("summarise", "row_scores", "log_mass", "scan")


@dataclass(frozen=True)
class PlaneScorer(Scorer):
    """Scores rows by planes. A subclass defines `planes` and, where it has parameters, checks them."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        changed = [name for name in _FIXED if name in cls.__dict__]
        if changed:
            raise TypeError(
                f"{cls.__name__} defines {', '.join(changed)}, but kernels know nothing of a scorer except its planes: "
                "derive it from closecall.Scorer"
            )

    @property
    def planes(self) -> Planes:
        raise must_define(self, "planes (a property)", "closecall.scorers.base.Planes")

    @property
    def vectors_per_block(self) -> int:
        return self.planes.vectors

    def summarise(self, keys: Tensor, block: int) -> tuple[Tensor, ...]:
        """What stands for the block's keys, one vector or two, and its outlying keys."""
        planes = self.planes
        if planes.outliers is not None:
            together = per_block(keys, block, lambda b: _beside_outliers(b, planes, keys.dtype))
            return torch.unflatten(together, -1, (planes.vectors, -1)).unbind(-2)
        if not planes.box:
            return (mean_key(keys, block),)
        sides = per_block(keys, block, lambda b: b.amax(-2)), per_block(keys, block, lambda b: b.amin(-2))
        if planes.shrink is None:
            return sides
        mean = mean_key(keys, block)
        shrunk = (torch.lerp(mean, side, planes.shrink) for side in sides)  # lerp is exact at both ends
        return tuple(side.to(keys.dtype).to(mean.dtype) for side in shrunk)

    def _products(self, rows: Tensor, summary: tuple[Tensor, ...]) -> list[Tensor]:
        """The row's scores for what stands for the keys, and for each outlying one."""
        n_sides = 2 if self.planes.box else 1
        wide = rows.to(summary[0].dtype)
        first = box_scores(rows, summary[0], summary[1]) if self.planes.box else products(wide, summary[0])
        return [first, *(products(wide, s) for s in summary[n_sides:])]

    def row_scores(self, rows: Tensor, summary: tuple[Tensor, ...]) -> Tensor:
        best, *others = self._products(rows, summary)
        for other in others:
            torch.fmax(best, other, out=best)  # a NaN has no say, as among rows
        return best

    def log_mass(self, rows: Tensor, summary: tuple[Tensor, ...], scale: float, n_keys: int) -> Tensor:
        """Outlying keys count as they are; the others as if each scored what stands for them."""
        first, *stored = (scale * part for part in self._products(rows, summary))
        total = first.add_(math.log(n_keys - len(stored)))
        for one in stored:
            total = torch.logaddexp(total, one)
        return total


def _beside_outliers(keys: Tensor, planes: Planes, dtype: torch.dtype) -> Tensor:
    """`[..., blocks, vectors * D]` of `[..., blocks, keys, D]`. Of equally distant keys the earlier is more outlying; a
    block too short for so many repeats its last one. A NaN anywhere in a block makes all of it NaN."""
    n, outliers, shrink = keys.shape[-2], planes.outliers or 0, 1.0 if planes.shrink is None else planes.shrink
    apart = (keys - keys.sum(-2, keepdim=True) / n).square().sum(-1).nan_to_num(nan=torch.inf, posinf=torch.inf)
    order = apart.sort(dim=-1, descending=True, stable=True).indices
    ordered = keys.gather(-2, order[..., None].expand_as(keys))
    others = ordered[..., min(outliers, n - 1) :, :]
    mean = others.sum(-2) / others.shape[-2]
    sides = [torch.lerp(mean, side, shrink) for side in (others.amax(-2), others.amin(-2))] if planes.box else [mean]
    stored = (ordered[..., min(i, n - 1), :] for i in range(outliers))
    made = torch.stack([*sides, *stored], -2).to(dtype).to(keys.dtype).flatten(-2)
    return made.masked_fill(keys.isnan().flatten(-2).any(-1, keepdim=True), torch.nan)


def box_scores(rows: Tensor, high: Tensor, low: Tensor) -> Tensor:
    """The largest product of every row with any point of every block's box: q high where q > 0, q low elsewhere."""
    wide = rows.to(high.dtype)
    finite = high.isfinite() & low.isfinite()
    whole = bool(finite.all())
    above, below = (high, low) if whole else (high.where(finite, 0.0), low.where(finite, 0.0))
    scores = products(wide.clamp(min=0), above) + products(wide.clamp(max=0), below)
    if not whole:  # 0 * inf would have spoiled the products: block by block, no row meets the side it does not look at
        for b in (~finite.all(-1)).reshape(-1, finite.shape[-2]).any(0).nonzero()[:, 0].tolist():
            up, down = high[..., b, None, :], low[..., b, None, :]
            scores[..., b] = torch.where(wide > 0, wide * up, wide * down).sum(-1)
    return scores
