"""H2O: blocks that collected most attention so far."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .base import SCORERS, Chunk, Scorer, View


@SCORERS.register("h2o")
@dataclass(frozen=True)
class H2O(Scorer):
    """The attention that a block's keys were given by all rows up to the tile's last: heavy hitters.

    Zhang et al.: "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models", 2023,
    arXiv:2306.14048. There keys are evicted one by one from a cache and do not come back, and attention is that over
    the keys still there; here blocks are ranked anew for each tile, by exact attention over all keys, and the recent
    keys that H2O keeps are the tile's own blocks. Rows of earlier calls are gone: a chunk of a prefill counts its own
    only. Votes are a tile's: all reductions over rows that do not normalise give the same, and so do both that do.

    Costs as much as attention, so it ranks well or badly but saves no time. Stores nothing but a number per block.
    """

    votes: ClassVar[bool] = True

    def scan(self, view: View) -> Iterator[tuple[Chunk, Tensor]]:
        before = view.q.new_zeros((view.q.shape[0], view.n_blocks), dtype=torch.float64)  # sums over thousands of rows
        for chunk in view.chunks(view.k.shape[0]):
            attended = view.attention(chunk).sum(-1).sum(-2, dtype=torch.float64)  # [G, tiles, seen]
            total = before[:, None, : chunk.seen] + attended.cumsum(1)
            before[:, : chunk.seen] = total[:, -1]
            yield chunk, total[:, :, None].to(chunk.rows.dtype)
