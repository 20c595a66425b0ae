"""MoBA: every row gates its own few blocks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .base import SCORERS, Chunk, Scorer, View, mean_key, products
from .parameters import check_whole
from .reductions import shares


@SCORERS.register("moba")
@dataclass(frozen=True)
class MoBA(Scorer):
    """A row gates its own block and, of those before it, the `gates - 1` with the largest product of row and mean key.

    Its vote for a block is 1 if it gates it, plus the block's share in a softmax over the products of all blocks before
    its own. So under `max` a block that any row gates stands before all that none does, and under `mean` the vote is
    the share of the tile's rows that gate the block, plus how strongly they lean to it. Blocks tied at the last gate
    all pass.

    Lu et al.: "MoBA: Mixture of Block Attention for Long-Context LLMs", 2025, arXiv:2502.13189. There models are
    trained so, and each row attends to the blocks of its gate alone; here a tile's rows share what the rule keeps.
    One vector per block.
    """

    votes: ClassVar[bool] = True
    gates: int = 8

    def __post_init__(self) -> None:
        check_whole("gates", self.gates, 1, "blocks that a row gates")

    @property
    def vectors_per_block(self) -> int:
        return 1

    def scan(self, view: View) -> Iterator[tuple[Chunk, Tensor]]:
        mean = mean_key(view.k, view.block)
        for chunk in view.chunks():
            product = view.scale * products(chunk.rows.flatten(0, 2), mean[: chunk.seen])
            product = product.view(*chunk.rows.shape[:3], chunk.seen)
            block = torch.arange(chunk.seen, device=product.device)
            own = chunk.positions[..., None] // view.block  # [tiles, rows, 1]
            product = product.nan_to_num(nan=-torch.inf).masked_fill(block >= own, -torch.inf)
            n = min(self.gates - 1, chunk.seen)
            least = product.topk(n, -1).values[..., -1:] if n else torch.full_like(product[..., :1], torch.inf)
            gated = ((product >= least) & product.isfinite()) | (block == own)
            yield chunk, gated + shares(product)
