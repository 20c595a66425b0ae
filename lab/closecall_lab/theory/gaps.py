"""Order statistics of ranked tile scores (Eq. 12), and what stands in for the constants of the paper's Appendix D."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Tiles:
    """Ranked scores of many (sequence, head, tile) cells, each with more unforced blocks than the plain cut keeps.

    scores:   float `[n, W]`, best first, -inf past the end. Blocks beyond the stored ones can only add to an
              identification error, so what is computed from fewer blocks is about those blocks.
    keep:     int64 `[n]`, how many of them the plain cut keeps: tile budget less forced blocks, the paper's k.
    expanded: int64 `[n]`, how many an expanded tile keeps, the paper's rho k; at least `keep`.
    """

    scores: Tensor
    keep: Tensor
    expanded: Tensor

    def __post_init__(self) -> None:
        s, keep, expanded = self.scores, self.keep, self.expanded
        if s.ndim != 2 or not s.is_floating_point() or 0 in s.shape:
            raise ValueError(
                f"scores must be floats [tiles, blocks] with at least one tile, got {s.dtype} {[*s.shape]}"
            )
        for name, x in (("keep", keep), ("expanded", expanded)):
            if x.dtype != torch.int64 or x.shape != s.shape[:1]:
                raise ValueError(f"{name} must be int64 [{len(s)}], one number a tile, got {x.dtype} {[*x.shape]}")
        bad = s.isnan() | (s == torch.inf)
        if bool(bad.any()):
            t, b = bad.nonzero()[0].tolist()
            raise ValueError(f"scores[{t}, {b}] is {float(s[t, b])}: leave out tiles with scores that are not numbers")
        if bool((s[:, 1:] > s[:, :-1]).any()):
            t = int((s[:, 1:] > s[:, :-1]).any(1).nonzero()[0])
            raise ValueError(f"scores[{t}] rise: rank every tile's scores, best first")
        wrong = (keep < 1) | (expanded < keep) | (self.blocks <= keep)
        if bool(wrong.any()):
            t = int(wrong.nonzero()[0])
            raise ValueError(
                f"tile {t} has {int(self.blocks[t])} blocks, keep {int(keep[t])}, expanded {int(expanded[t])}: "
                "needs 1 <= keep <= expanded and more blocks than keep"
            )

    @classmethod
    def of(cls, scores: Tensor, keep: int, expanded: int) -> Tiles:
        """Makes tiles that all have the same cut."""
        return cls(scores, *(torch.full((len(scores),), x, device=scores.device) for x in (keep, expanded)))

    @property
    def blocks(self) -> Tensor:
        """int64 `[n]`: how many blocks are ranked."""
        return (self.scores > -torch.inf).sum(1)

    @property
    def extra(self) -> Tensor:
        """int64 `[n]`: how many more blocks expansion keeps."""
        return self.expanded.minimum(self.blocks) - self.keep

    def as_bfloat16(self) -> Tiles:
        """The same tiles with scores rounded to bfloat16, as a bfloat16 scorer would rank them (ties included)."""
        return Tiles(self.scores.bfloat16().to(self.scores.dtype), self.keep, self.expanded)

    def at(self, rank: Tensor) -> Tensor:
        """The scores at one rank per tile; -inf past the end."""
        found = self.scores.gather(1, rank.clamp(max=self.scores.shape[1] - 1)[:, None])[:, 0]
        return found.masked_fill(rank >= self.scores.shape[1], -torch.inf)


@dataclass(frozen=True, eq=False)
class Gaps:
    """Eq. 12 per tile, in the type of the scores.

    cutoff:    g, from the last kept score to the first dropped one.
    expansion: G, from the last kept score to the first one dropped even after expansion; inf where none is.
    spread:    r, from the best score to the first dropped one.
    margin:    sigma = g / r, what the router reads; 0 where r is 0.
    """

    cutoff: Tensor
    expansion: Tensor
    spread: Tensor
    margin: Tensor


def gaps(tiles: Tiles) -> Gaps:
    last_in, first_out = tiles.at(tiles.keep - 1), tiles.at(tiles.keep)
    spread = tiles.scores[:, 0] - first_out
    cutoff = last_in - first_out
    margin = torch.where(spread > 0, cutoff / spread.where(spread > 0, 1.0), 0.0)
    return Gaps(cutoff, last_in - tiles.at(tiles.expanded), spread, margin)


def floors(tiles: Tiles) -> Tensor:
    """Per tile, its smallest spacing other than the one at the cut: the largest Delta_2 for which (A1) holds there."""
    spacing = tiles.scores[:, :-1] - tiles.scores[:, 1:]
    rank = torch.arange(spacing.shape[1], device=spacing.device)
    other = (rank != tiles.keep[:, None] - 1) & (rank < tiles.blocks[:, None] - 1)
    return spacing.masked_fill(~other, torch.inf).amin(1)


def numbered(x: Tensor) -> Tensor:
    """int64 `[n]`: equal numbers for equal entries of `[n]`, or equal columns of `[m, n]`, ascending from 0."""
    inverse: Tensor = torch.unique(x, dim=-1, return_inverse=True)[1]
    return inverse


def check_tau(tau: float) -> float:
    if not 0 < tau < float("inf"):
        raise ValueError(
            f"tau must be a positive number, got {tau!r}: without noise no block is misplaced and every V* is 0"
        )
    return float(tau)
