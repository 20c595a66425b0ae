"""Max-ratio: the blocks that come within a factor of the tile's best one."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..checks import check_share
from ..ranking import Ranked
from .base import RULES
from .pooled import Weighed, ordered


@RULES.register("max-ratio")
@dataclass(frozen=True)
class MaxRatio(Weighed):
    """Keeps the blocks that weigh at least `ratio` times what the best unforced block of the tile weighs.

    Without `ratio` it is chosen for each pool so that the budget is met. With it, each head and tile keeps what the
    ratio says, within floor and cap, and no budget is met.
    """

    floor: float = 0
    ratio: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ratio is not None:
            check_share("ratio", self.ratio, "of the best block's weight")

    def wanted(self, ranked: Ranked) -> Tensor:
        """The ratio, or its logarithm where scores are logits."""
        best = ranked.scores[..., :1]
        if self.shares:
            return ordered((ranked.scores / best).nan_to_num(nan=1.0, neginf=-torch.inf))  # 0 / 0: as good as the best
        return ordered((ranked.scores - best).nan_to_num(nan=0.0, neginf=-torch.inf))  # so of infinities

    def fixed_level(self) -> int | None:
        if self.ratio is None:
            return None
        least = self.ratio if self.shares else math.log(self.ratio)
        return int(ordered(torch.tensor(least))) - 1

    def describe(self) -> str:
        if self.ratio is None:
            return f"blocks within the same factor of the tile's best, {self._bounds()}"
        return f"blocks of at least {self.ratio:g} of the best one's weight, {self.least} to {self.most} a tile"
