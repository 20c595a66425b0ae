"""Uniform top-k: every tile keeps as many blocks as its budget says."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ..checks import is_number
from ..ranking import Decision, Ranked, margins
from .base import RULES, Rule


@RULES.register("topk")
@dataclass(frozen=True)
class TopK(Rule):
    """Step 2: the best `tile_factor * budget` blocks, forced ones included."""

    budget: int = 33
    tile_factor: float = 2

    def __post_init__(self) -> None:
        if not isinstance(self.budget, int) or isinstance(self.budget, bool) or self.budget < 1:
            raise ValueError(f"budget must be a whole number of blocks, at least 1, got {self.budget!r}")
        product = self.tile_factor * self.budget if is_number(self.tile_factor) else math.nan
        if not product >= 1 or not math.isfinite(product) or product != round(product):
            raise ValueError(
                f"tile_factor * budget must be a whole number of blocks, at least 1, "
                f"got {self.tile_factor!r} * {self.budget} = {product!r}"
            )

    @property
    def tile_budget(self) -> int:
        return round(self.tile_factor * self.budget)

    def remedy(self, tile_budget: int) -> str:
        budget = math.ceil(tile_budget / self.tile_factor)
        while round(product := self.tile_factor * budget) != product:  # only whole tile budgets can be made
            budget += 1
        return f"use budget {budget} or more"

    @property
    def at_ranks(self) -> bool:
        return type(self) is TopK  # one's own may want more

    def limit(self, n_blocks: int) -> int:
        return min(self.tile_budget, n_blocks)

    def decide(self, ranked: Ranked) -> Decision:
        margin = margins(ranked, self.tile_budget)
        counts = ranked.visible.clamp(max=self.tile_budget)[:, None].expand_as(margin)
        return Decision(counts, margin, torch.zeros_like(margin, dtype=torch.bool))

    def describe(self) -> str:
        return f"keep {self.tile_budget} blocks a tile (budget {self.budget} x {self.tile_factor:g})"
