"""Uniform top-k: every tile keeps as many blocks as its budget says."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import torch

from ..checks import exact, is_finite
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
        possible = is_finite(self.tile_factor)
        product = self._blocks(self.budget) if possible else Fraction(0)
        if product < 1 or product.denominator > 1:
            got = f"{self.tile_factor!r} * {self.budget}" + (f" = {float(product):g}" if possible else "")
            raise ValueError(f"tile_factor * budget must be a whole number of blocks, at least 1, got {got}")

    def _blocks(self, budget: int) -> Fraction:
        return exact(self.tile_factor) * budget

    @property
    def tile_budget(self) -> int:
        return int(self._blocks(self.budget))

    def remedy(self, tile_budget: int) -> str:
        budget = math.ceil(tile_budget / exact(self.tile_factor))
        while self._blocks(budget).denominator > 1:  # only whole tile budgets can be made
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
