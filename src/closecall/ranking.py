"""What passes between backends, rules and kernels: backends rank (`Ranked`), rules count (`Decision`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .geometry import Geometry

# From this process's margins [B, H, T] (or how much a pooled rule wants each block, [B, H, T, W]) to those of all heads
# of the layer (of its KV heads where these decide, see `Ranked`), and which of them are its own: where heads are spread
# over tensor-parallel ranks, rules see them all.
AllHeads = Callable[[Tensor], tuple[Tensor, slice]]


def alone(margin: Tensor) -> tuple[Tensor, slice]:
    """The `AllHeads` of a process that has all heads itself."""
    return margin, slice(None)


@dataclass(frozen=True, eq=False)
class Source:
    """The queries and keys that were ranked, for rules that judge rows and not only tile scores."""

    q: Tensor
    k: Tensor
    geometry: Geometry
    scale: float
    sinks: int


@dataclass(frozen=True, eq=False)
class Ranked:
    """The visible, unforced blocks of every tile, best first; ties go to the lower block index.

    H counts those who decide: the query heads, or under `share="group"` the KV heads, each for the query heads that
    read it.
    """

    order: Tensor  # int32 [B, H, T, W]: block indices, the sentinel past the end
    scores: Tensor  # float32 [B, H, T, W]: their scores, -inf past the end; a NaN score counts as -inf
    visible: Tensor  # int64 [B, T]: number of visible blocks
    forced: Tensor  # int64 [B, T]: number of forced blocks
    sequence: Tensor  # int64 [B, T]: the tile's sequence
    all_heads: AllHeads = alone
    source: Source | None = None  # always there when `select` asks a rule
    asking: Tensor | None = None  # int64 [B, T], as in the geometry: for rules that protect last tiles

    def at(self, ranks: Tensor) -> Tensor:
        """float32 `[B, H, T, n]`: the scores of the blocks at ranks `[B, H, T, n]`, the best at rank 0."""
        return self.scores.gather(-1, ranks)


@dataclass(frozen=True, eq=False)
class Decision:
    """How many blocks each tile keeps, and how sure the rule was. All tensors are `[B, H, T]`."""

    counts: Tensor  # integers, forced blocks included; at most the visible blocks and the rule's `limit`
    margin: Tensor  # float32: how decisive the cut was (Eq. 4); NaN where nothing was cut
    triggered: Tensor  # bool: the tiles that got more than the others


def margins(ranked: Ranked, tile_budget: int) -> Tensor:
    """Eq. 4 per (sequence, head, tile): how decisive the cut at `tile_budget` was, NaN where nothing was cut.

    `(s[c-1] - s[c]) / (s[0] - s[c])` over the unforced scores, c = tile_budget - forced. Zero, the least decided value,
    where the denominator is zero or infinities leave the quotient undefined.
    """
    width = ranked.scores.shape[-1]
    cut = (tile_budget - ranked.forced).clamp(1, width - 1) if width > 1 else torch.ones_like(ranked.forced)
    if width == 1:  # one slot: no tile can have more visible blocks than the budget
        return torch.full(ranked.scores.shape[:-1], torch.nan, device=ranked.scores.device)
    margin = _margin(ranked, cut[:, None].expand(ranked.scores.shape[:-1]))
    eligible = (ranked.visible > tile_budget)[:, None]
    return margin.masked_fill(~eligible, torch.nan)


def _margin(ranked: Ranked, cut: Tensor) -> Tensor:
    """Eq. 4 where the first block left out has rank `cut [B, H, T]`."""
    ranks = torch.stack([torch.zeros_like(cut), (cut - 1).clamp(min=0), cut], -1)
    best, last_in, first_out = ranked.at(ranks).unbind(-1)
    return ((last_in - first_out) / (best - first_out)).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def margins_at(ranked: Ranked, counts: Tensor) -> Tensor:
    """Eq. 4 at the cut that `counts` makes, NaN where nothing was cut; 1 where no ranked block was kept at all."""
    free = counts - ranked.forced[:, None]
    margin = _margin(ranked, free.clamp(0, ranked.scores.shape[-1] - 1))
    margin = margin.masked_fill(free == 0, 1.0)
    return margin.masked_fill(counts >= ranked.visible[:, None], torch.nan)
