"""Control: random tiles, as many as the quantile would take."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .base import TRIGGERS, TileShare


@TRIGGERS.register("random")
@dataclass(frozen=True)
class Random(TileShare):
    """Control: as many tiles as the quantile, drawn by a seed. A tile's draw does not depend on the batch."""

    seed: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.seed, int) or isinstance(self.seed, bool) or not 0 <= self.seed < 2**31:
            raise ValueError(f"seed must be a whole number in [0, 2^31), got {self.seed!r}")

    def tile_key(self, margin: Tensor, sequence: Tensor) -> Tensor:
        # The tile's number within its own sequence, so that packing and batching change nothing.
        tile = torch.arange(sequence.shape[1], device=sequence.device).expand_as(sequence)
        new = torch.ones_like(sequence, dtype=torch.bool)
        new[:, 1:] = sequence[:, 1:] != sequence[:, :-1]
        number = tile - torch.where(new, tile, 0).cummax(1).values
        # Xorshift mixing in 31 bits; int64 never overflows.
        x = ((number + 1) * 2654435761 + self.seed * 40503 + 12345) & 0x7FFFFFFF
        for shift, factor in ((16, 73244475), (15, 73244475), (16, 1)):
            x = ((x ^ (x >> shift)) * factor) & 0x7FFFFFFF
        return x

    def describe(self, q: float) -> str:
        return f"a random {q:.0%} of tiles (seed {self.seed})"
