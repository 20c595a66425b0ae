"""Control: the last tiles, as many as the quantile would take."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .base import TRIGGERS, TileShare


@TRIGGERS.register("last")
@dataclass(frozen=True)
class Last(TileShare):
    """Control: as many tiles as the quantile, always the last ones."""

    def tile_key(self, margin: Tensor, sequence: Tensor) -> Tensor:
        return torch.zeros_like(sequence)  # ties go to the later tile

    def describe(self, q: float) -> str:
        return f"the last {q:.0%} of tiles"
