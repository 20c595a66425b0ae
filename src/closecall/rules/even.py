"""Uniform top-k with a budget between two whole numbers: the control that spends exactly what a router spent."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..checks import exact, is_number
from ..ranking import Decision, Ranked, margins
from .base import RULES, Rule


def spread(eligible: Tensor, sequence: Tensor, share: float) -> Tensor:
    """Marks `round(share * E)` of the E eligible tiles of every sequence, evenly spaced. All `[B, T]`."""
    number = eligible.cumsum(1)  # 1 for the batch row's first eligible tile, and so on
    first = torch.ones_like(eligible)
    first[:, 1:] = sequence[:, 1:] != sequence[:, :-1]
    before = torch.where(first, number - eligible.to(number.dtype), 0).cummax(1).values
    number = number - before  # 1 for the sequence's first eligible tile
    p, q = exact(share).as_integer_ratio()  # integers: no rounding, no dependence on the device
    now, last = ((2 * n * p + q) // (2 * q) for n in (number, number - 1))
    return eligible & (now > last)


@RULES.register("even")
@dataclass(frozen=True)
class Even(Rule):
    """Every tile alike: the best `keep` blocks, forced ones included, where `keep` need not be whole.

    A tile that sees more than floor(keep) blocks keeps that many, and an evenly spaced share of those tiles, as large
    as the fraction says, one more. Scores play no part in which ones.
    """

    keep: float = 66.0

    def __post_init__(self) -> None:
        if not is_number(self.keep) or not 1 <= self.keep < math.inf:
            raise ValueError(f"keep must be a number of blocks a tile, at least 1, got {self.keep!r}")

    @property
    def tile_budget(self) -> int:
        return math.floor(self.keep)

    def remedy(self, tile_budget: int) -> str:
        return f"use keep {tile_budget} or more"

    def limit(self, n_blocks: int) -> int:
        return min(math.ceil(self.keep), n_blocks)

    def decide(self, ranked: Ranked) -> Decision:
        margin = margins(ranked, self.tile_budget)
        eligible = ranked.visible > self.tile_budget
        share = self.keep - self.tile_budget
        more = spread(eligible, ranked.sequence, share).to(ranked.visible.dtype)
        counts = (ranked.visible.clamp(max=self.tile_budget) + more)[:, None].expand_as(margin)
        return Decision(counts, margin, torch.zeros_like(margin, dtype=torch.bool))

    def describe(self) -> str:
        return f"keep {self.keep:.4g} blocks a tile, all tiles alike"
