"""The block's mean key (the paper's Eq. 1)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .base import SCORERS, Scorer, mean_key


@SCORERS.register("mean")
@dataclass(frozen=True)
class Mean(Scorer):
    """Eq. 1: the row's product with the block's mean key (SSA). Its estimated mass is, by Jensen, a lower bound."""

    @property
    def vectors_per_block(self) -> int:
        return 1

    def summarise(self, keys: Tensor, block: int) -> tuple[Tensor, ...]:
        return (mean_key(keys, block),)

    def row_scores(self, rows: Tensor, summary: tuple[Tensor, ...]) -> Tensor:
        (mean,) = summary
        return rows.to(mean.dtype) @ mean.transpose(-1, -2)
