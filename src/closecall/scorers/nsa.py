"""NSA-style importance: attention to compressed keys, shared by the heads of a group."""

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


@SCORERS.register("nsa")
@dataclass(frozen=True)
class NSA(Scorer):
    """A row's attention to compressed keys, added up over each block and over the query heads that share its keys.

    A block has `parts` compressed keys: one starts every `block / parts` keys and is the mean of twice as many, so
    neighbours overlap. A row attends (softmax) to those that end at or before it. What a compressed key gets is halved
    between the two stretches of keys it covers, and a block's vote is the sum over its own stretches. All heads of a
    group have the same votes, and so keep the same blocks.

    Yuan et al.: "Native Sparse Attention: Hardware-Aligned and Natively Trainable Sparse Attention", 2025,
    arXiv:2502.11089. There the compression is learned and models are trained with it, and each row chooses its own
    blocks; here it is the mean, and a tile's rows choose together. The defaults are its sizes: 32 keys at every 16th of
    blocks of 64. `parts` vectors per block.
    """

    votes: ClassVar[bool] = True
    parts: int = 4

    def __post_init__(self) -> None:
        check_whole("parts", self.parts, 1, "compressed keys a block")

    @property
    def vectors_per_block(self) -> int:
        return self.parts

    def check(self, policy: Setting) -> None:
        if policy.block % self.parts:
            raise ValueError(f"parts = {self.parts} must divide the block of {policy.block} keys")
        super().check(policy)

    def scan(self, view: View) -> Iterator[tuple[Chunk, Tensor]]:
        step = view.block // self.parts
        wide = view.k.to(accumulator(view.k.dtype))
        short = max(0, 2 * step - wide.shape[0])  # too few keys for even one: one that ends too late for every row
        compressed = pad(wide, (0, 0, 0, short)).unfold(0, 2 * step, step).mean(-1)
        ends = torch.arange(compressed.shape[0], device=wide.device) * step + 2 * step - 1
        for chunk in view.chunks(view.n_blocks * self.parts):
            n = min(chunk.seen * self.parts, compressed.shape[0])
            product = view.scale * products(chunk.rows.flatten(0, 2), compressed[:n])
            product = product.view(*chunk.rows.shape[:3], n)
            product = product.masked_fill(ends[:n] > chunk.positions[..., None], -torch.inf)
            shared = shares(product)
            shared = pad(shared, (1, chunk.seen * self.parts - n))  # stretch s lies in the compressed keys s - 1 and s
            stretches = (shared[..., :-1] + shared[..., 1:]) / 2
            importance = torch.unflatten(stretches, -1, (chunk.seen, self.parts)).sum(-1).sum(0)
            yield chunk, importance.expand(chunk.rows.shape[0], -1, -1, -1)
