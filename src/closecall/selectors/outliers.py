"""The block's mean and its most outlying keys."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..policy import SCORERS, Policy
from ..scorers import Scorer, per_block
from .parameters import check_whole


@SCORERS.register("outliers")
@dataclass(frozen=True)
class Outliers(Scorer):
    """The largest of the row's products with the block's `m` most outlying keys and with the mean of its other keys.

    A needle is a key unlike its neighbours: the `m` keys most distant from the block's mean are stored as they are (of
    equally distant ones the earlier), the others only by their mean, rounded to the keys' own type as if it were a key.
    m = 0 is `mean`, but for that rounding. Stores m + 1 vectors a block.

    The estimated mass counts the stored keys exactly and takes the others to score their mean: by Jensen's inequality a
    lower bound.
    """

    m: int = 3

    def __post_init__(self) -> None:
        check_whole("m", self.m, 0, "outlying keys a block")

    @property
    def vectors_per_block(self) -> int:
        return self.m + 1

    def check(self, policy: Policy) -> None:
        if self.m >= policy.block:
            raise ValueError(f"m = {self.m} outlying keys of blocks of {policy.block} keys: use a smaller m")
        super().check(policy)

    def summarise(self, keys: Tensor, block: int) -> tuple[Tensor, ...]:
        """The mean of the other keys, and the `m` outlying ones; zeros for what a short block does not have."""

        def plane(b: Tensor, number: int) -> Tensor:
            n = b.shape[-2]
            if n <= (self.m if number < 0 else number):
                return torch.zeros_like(b[..., 0, :])
            apart = (b - b.sum(-2, keepdim=True) / n).square().sum(-1).nan_to_num(nan=torch.inf)
            by_distance = apart.sort(dim=-1, descending=True, stable=True).indices
            wanted = by_distance[..., number, None] if number >= 0 else by_distance[..., self.m :]
            found = b.gather(-2, wanted[..., None].expand(*wanted.shape, b.shape[-1]))
            return (found.sum(-2) / found.shape[-2]).to(keys.dtype).to(b.dtype)  # of one key, the key

        return tuple(per_block(keys, block, lambda b, i=i: plane(b, i)) for i in range(-1, self.m))  # type: ignore[misc]

    def row_scores(self, rows: Tensor, summary: tuple[Tensor, ...]) -> Tensor:
        best, *others = (rows.to(s.dtype) @ s.transpose(-1, -2) for s in summary)
        for other in others:
            torch.maximum(best, other, out=best)
        return best

    def log_mass(self, rows: Tensor, summary: tuple[Tensor, ...], scale: float, n_keys: int) -> Tensor:
        mean, *stored = (scale * (rows.to(s.dtype) @ s.transpose(-1, -2)) for s in summary)
        total = mean.add_(math.log(n_keys - len(stored)))
        for one in stored:
            total = torch.logaddexp(total, one)
        return total
