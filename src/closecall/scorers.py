"""Scorers: how well a query row matches a key block, judged from a summary of the block.

A scorer is one small class: `summarise` pools the keys of each block, `row_scores` scores rows against the summaries.
The reduction over a tile's rows is a choice of its own (`AGGREGATES`), and so is the rule that cuts the ranking.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .policy import SCORERS, Component

# Reductions of row scores [..., rows, blocks] to tile scores [..., blocks]. The paper's is the maximum: dropping a
# block that one row badly wants is worse than dropping one that many rows want a little. A row whose score is NaN
# has no say in a maximum; in a mean it cannot be left out.
AGGREGATES: dict[str, Callable[[Tensor], Tensor]] = {
    "max": lambda rows: rows.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf).amax(-2),
    "mean": lambda rows: rows.mean(-2),
}


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """Scores and softmax are accumulated in float32 at least, whatever the input type."""
    return torch.promote_types(dtype, torch.float32)


def blocks_of(keys: Tensor, block: int) -> Iterator[Tensor]:
    """The blocks of keys `[..., N, D]` in order; the last may be shorter and is never padded."""
    yield from torch.split(keys, block, dim=-2)


@dataclass(frozen=True)
class Scorer(Component):
    """Turns keys into block summaries, and query rows plus summaries into scores (before `scale`)."""

    def summarise(self, keys: Tensor, block: int) -> tuple[Tensor, ...]:
        """Summaries `[..., n_blocks, D]` of keys `[..., N, D]`, over real keys only."""
        raise NotImplementedError

    def row_scores(self, rows: Tensor, summary: tuple[Tensor, ...]) -> Tensor:
        """Scores `[..., rows, n_blocks]` of query rows `[..., rows, D]`."""
        raise NotImplementedError

    def describe(self) -> str:
        return f"{self.name} scores"


@SCORERS.register("mean")
@dataclass(frozen=True)
class Mean(Scorer):
    """Eq. 1: the row's product with the block's mean key (SSA)."""

    def summarise(self, keys: Tensor, block: int) -> tuple[Tensor, ...]:
        wide = keys.to(accumulator(keys.dtype))
        return (torch.stack([b.sum(-2) / b.shape[-2] for b in blocks_of(wide, block)], dim=-2),)

    def row_scores(self, rows: Tensor, summary: tuple[Tensor, ...]) -> Tensor:
        (mean,) = summary
        return rows.to(mean.dtype) @ mean.transpose(-1, -2)


@SCORERS.register("quest")
@dataclass(frozen=True)
class Quest(Scorer):
    """Eq. 2: the largest product any key inside the block's coordinate-wise box could have with the row (Quest)."""

    def summarise(self, keys: Tensor, block: int) -> tuple[Tensor, ...]:
        wide = keys.to(accumulator(keys.dtype))
        high = torch.stack([b.amax(-2) for b in blocks_of(wide, block)], dim=-2)
        low = torch.stack([b.amin(-2) for b in blocks_of(wide, block)], dim=-2)
        return high, low

    def row_scores(self, rows: Tensor, summary: tuple[Tensor, ...]) -> Tensor:
        # max(q kmax, q kmin) is q kmax where q > 0 and q kmin elsewhere.
        high, low = summary
        wide = rows.to(high.dtype)
        if not (high.isfinite().all() and low.isfinite().all()):  # 0 * inf would spoil the products below
            one = wide.unsqueeze(-2)
            return torch.where(one > 0, one * high.unsqueeze(-3), one * low.unsqueeze(-3)).sum(-1)
        return wide.clamp(min=0) @ high.transpose(-1, -2) + wide.clamp(max=0) @ low.transpose(-1, -2)


@SCORERS.register("auto")
@dataclass(frozen=True)
class Auto(Quest):
    """`quest`, until `attach` finds that the model normalises queries and keys per head and takes `mean` instead.

    The paper's reversal: QK-Norm flattens the boxes that Quest's bound is made of.
    """
