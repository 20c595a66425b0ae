"""MInference: its two estimates of where a head looks, vertical and slash lines, and whole blocks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from .base import SCORERS, Chunk, Scorer, View, mean_key, products
from .parameters import check_whole


@SCORERS.register("minference")
@dataclass(frozen=True)
class VerticalSlash(Scorer):
    """What the last `window` rows attend to, as vertical lines (keys) and slash lines (distances): a row's vote for a
    block is the weight of all lines that cross it there.

    Jiang et al.: "MInference 1.0: Accelerating Pre-filling for Long-Context LLMs via Dynamic Sparse Attention", 2024,
    arXiv:2407.02490. There an offline search gives each head its pattern and numbers of lines, the heaviest lines are
    kept and attention is computed along them; here every head has this pattern and no line is cut off: a block's vote
    is the sum over its keys j of vertical[j] + slash[i - j] for the row at i, and the rule cuts. Like `snapkv` it looks
    ahead to the end of the prompt, and sees another window in every chunk of a chunked prefill.

    Costs `window` rows of attention. Stores two numbers per key.
    """

    votes: ClassVar[bool] = True
    window: int = 64

    def __post_init__(self) -> None:
        check_whole("window", self.window, 1, "rows at the end of the prompt")

    def scan(self, view: View) -> Iterator[tuple[Chunk, Tensor]]:
        n = view.k.shape[0]
        vertical, slash = view.q.new_zeros((2, view.q.shape[0], n), dtype=torch.float64)
        for piece in view.last(self.window):
            attended = view.attention(piece).flatten(-2)[:, 0, :, :n].double()  # [G, rows, keys]
            vertical[:, : attended.shape[-1]] += attended.sum(1)
            for r, i in enumerate(piece.positions[0].tolist()):
                slash[:, : i + 1] += attended[:, r, : i + 1].flip(-1)  # distance 0 first
        # Sums over runs of keys and of distances are differences of running sums.
        keys_before, nearer = (pad(x.cumsum(-1), (1, 0)) for x in (vertical, slash))
        for chunk in view.chunks(4 * view.n_blocks):
            after = chunk.positions[..., None] + 1  # how many keys a row sees
            edge = (torch.arange(chunk.seen + 1, device=after.device) * view.block).minimum(after)
            running = keys_before[:, edge] - nearer[:, after - edge]
            yield chunk, running.diff(dim=-1).clamp(min=0).to(chunk.rows.dtype)


@SCORERS.register("minference-block")
@dataclass(frozen=True)
class PooledBlock(Scorer):
    """The product of the tile's mean query and the block's mean key.

    MInference's estimate for heads with no lines (see `minference`), where it is put through a softmax over blocks and
    the best ones are kept. Here the tile's rows share the score, which keeps the order; its estimated mass takes every
    row and key of the pair to score so, beside each row's own exact mass in the forced blocks. One vector per block.
    """

    @property
    def vectors_per_block(self) -> int:
        return 1

    def scan(self, view: View) -> Iterator[tuple[Chunk, Tensor]]:
        mean = mean_key(view.k, view.block)
        more = math.log(view.block) if view.mass else 0.0
        for chunk in view.chunks():
            pooled = chunk.rows.mean(2, keepdim=True)
            yield chunk, view.scale * products(pooled, mean[: chunk.seen]) + more
