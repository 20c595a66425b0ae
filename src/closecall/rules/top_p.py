"""Top-p: as many blocks as it takes to hold a share p of a tile's estimated mass."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..checks import check_share
from ..ranking import Ranked
from .base import RULES
from .pooled import Weighed

UNIT = 2**40  # masses are summed as integers in units of 2^-40


@RULES.register("top-p")
@dataclass(frozen=True)
class TopP(Weighed):
    """Keeps the smallest prefix of the ranking whose estimated mass reaches p.

    Without `p` it is chosen for each pool so that the budget is met: blocks go where the most mass is still dropped.
    With `p`, each head and tile keeps what reaches p, within floor and cap, and no budget is met.

    With `shares` the forced blocks' mass counts as kept. With logits, the mass is the softmax of the tile scores over
    the unforced blocks. The mass of all blocks is needed, so all are ranked.
    """

    floor: float = 0
    p: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.p is not None:
            check_share("p", self.p, "a share of the estimated mass")

    def limit(self, n_blocks: int) -> int:
        return n_blocks

    def wanted(self, ranked: Ranked) -> Tensor:
        """The mass that is dropped if the ranking is cut before the block."""
        scores = ranked.scores.double()
        slot = torch.arange(scores.shape[-1], device=scores.device)
        there = slot < (ranked.visible - ranked.forced)[:, None, :, None]
        # Infinite scores: equal ones weigh the same, smaller ones nothing.
        mass = scores.clamp(0, 1) if self.shares else (scores - scores[..., :1]).nan_to_num(nan=0.0).exp()
        dropped = (mass.where(there, 0.0) * UNIT).round().to(torch.int64).flip(-1).cumsum(-1).flip(-1)
        if self.shares:
            return dropped
        whole = dropped[..., :1].double()
        return (dropped.double() / whole.where(whole > 0, 1.0) * UNIT).round().to(torch.int64)

    def fixed_level(self) -> int | None:
        return None if self.p is None else round((1 - self.p) * UNIT)

    def describe(self) -> str:
        if self.p is None:
            return f"blocks until the same share of the estimated mass is kept, {self._bounds()}"
        return f"blocks until {self.p:g} of the estimated mass is kept, {self.least} to {self.most} a tile"
