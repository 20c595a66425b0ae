"""XAttention: antidiagonal sums as cheap logits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..registry import Setting
from .base import SCORERS, Chunk, Scorer, View, accumulator, products
from .parameters import check_whole
from .reductions import shares


@SCORERS.register("xattention")
@dataclass(frozen=True)
class XAttention(Scorer):
    """Attention between groups of `stride` rows and groups of `stride` keys, judged by one antidiagonal of each pair.

    The logit of a pair of groups is the mean of the products on its antidiagonal (first row with last key, and so on),
    which meets every row and every key of the pair once; a group of rows gives a softmax over the groups of keys that
    begin at or before its last row, and its vote for a block is what the block's groups get. A group cut short at the
    end of the sequence is judged by the products it has.

    Xu, Xiao, Huang, Guo, Han: "XAttention: Block Sparse Attention with Antidiagonal Scoring", 2025, arXiv:2503.16428.
    There a block's votes are added up over a tile (`aggregate="mean"` ranks the same) and the fewest blocks that reach
    a threshold are kept; here any rule cuts. Costs 1/stride of attention's products. Stores nothing: reads all keys.
    """

    votes: ClassVar[bool] = True
    stride: int = 8

    def __post_init__(self) -> None:
        check_whole("stride", self.stride, 1, "rows and keys a group")

    def check(self, policy: Setting) -> None:
        for what, size in (("block", policy.block), ("tile", policy.tile)):
            if size % self.stride:
                raise ValueError(f"stride = {self.stride} must divide the {what} of {size}")
        super().check(policy)

    def _grouped(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Groups `[..., groups, stride, D]` of `[..., n, D]`, and which of their members exist, `[groups, stride]`."""
        short = -x.shape[-2] % self.stride
        real = torch.arange(x.shape[-2] + short, device=x.device) < x.shape[-2]
        return torch.unflatten(pad(x, (0, 0, 0, short)), -2, (-1, self.stride)), real.view(-1, self.stride)

    def scan(self, view: View) -> Iterator[tuple[Chunk, Tensor]]:
        keys, real_keys = self._grouped(view.k.to(accumulator(view.k.dtype)))
        flat_keys, real_keys = keys.flatten(-2), real_keys.to(keys.dtype)
        per_block = view.block // self.stride
        for chunk in view.chunks(view.k.shape[0] // self.stride**2):  # one row in `stride`
            n = min(chunk.seen * per_block, keys.shape[0])
            rows, real_rows = self._grouped(chunk.rows)
            flat_rows = rows.flip(-2).flatten(-2)  # [G, tiles, groups, stride * D]
            pairs = real_rows.flip(-1).to(keys.dtype) @ real_keys[:n].T  # products on the antidiagonal: [groups, keys]
            logits = view.scale * products(flat_rows, flat_keys[:n]) / pairs
            last = chunk.positions[:, self.stride - 1 :: self.stride]
            if last.shape[1] < rows.shape[2]:
                last = torch.cat([last, chunk.positions[:, -1:]], 1)
            begins = torch.arange(n, device=keys.device) * self.stride
            unseen = (begins > last[..., None]) | (pairs == 0)
            shared = shares(logits.masked_fill(unseen, -torch.inf))
            shared = pad(shared, (0, chunk.seen * per_block - n))
            yield chunk, torch.unflatten(shared, -1, (chunk.seen, per_block)).sum(-1)
