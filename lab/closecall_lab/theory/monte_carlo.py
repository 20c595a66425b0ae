"""Identification errors, the value of expansion and the regret of any trigger, by sampling; no spacing is assumed.

The model is the paper's: given a tile's scores s, the blocks' true relevances are mu ~ N(s, tau^2 I). With k blocks
kept, the plain cut misses one of the true best k when any dropped block beats any kept one; the expanded cut when the
best block it drops is beaten by fewer than k of the blocks it keeps. The second event implies the first, draw by
draw, so V* is an average of zeros and ones: never negative.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .gaps import Tiles, check_tau, numbered

_AT_ONCE = 1 << 18  # numbers drawn at once: they stay in a core's cache


@dataclass(frozen=True, eq=False)
class Estimate:
    """Per tile, means over `samples` draws, float32 `[n]`. Draws come in two independent halves, so that what one half
    chooses the other can judge."""

    error: Tensor  # of the plain cut
    error_expanded: Tensor
    halves: Tensor  # [2, n]: V* by either half
    samples: int

    @property
    def value(self) -> Tensor:
        """V*: what expanding the tile is worth."""
        return self.halves.mean(0)

    @property
    def variance(self) -> Tensor:
        """Unbiased, of each tile's `value`, float64."""
        v = self.value.double()
        return v * (1 - v) / (self.samples - 1)

    @property
    def half_variances(self) -> Tensor:
        """Unbiased, of the two `halves`, each from its own draws; float64 `[2, n]`."""
        v = self.halves.double()
        return v * (1 - v) / (self.samples // 2 - 1)

    @staticmethod
    def cat(parts: Sequence[Estimate]) -> Estimate:
        """The estimate of all tiles from those of consecutive parts of them."""
        samples = {p.samples for p in parts}
        if len(samples) != 1:
            raise ValueError(f"parts must have equally many samples, got {sorted(samples)}")
        joined = {f: torch.cat([getattr(p, f) for p in parts], -1) for f in ("error", "error_expanded", "halves")}
        return Estimate(**joined, samples=samples.pop())


def _groups(tiles: Tiles) -> Iterator[tuple[int, int, int, Tensor]]:
    """(keep, expanded, columns, tiles) for tiles that share a cut, in slices small enough to draw at once."""
    which, blocks = numbered(torch.stack([tiles.keep, tiles.expanded])), tiles.blocks
    for i in range(int(which.max()) + 1):
        mine = (which == i).nonzero()[:, 0]
        keep, expanded, width = (int(x) for x in (tiles.keep[mine[0]], tiles.expanded[mine[0]], blocks[mine].max()))
        for part in torch.split(mine, max(1, _AT_ONCE // width)):
            yield keep, min(expanded, width), width, part


def _missed(mu: Tensor, keep: int, expanded: int) -> tuple[Tensor, Tensor]:
    """Whether the plain and the expanded cut miss one of the best `keep` by relevances `[blocks, draws]`, of which the
    first ones are kept."""
    missed = mu[keep:].amax(0) > mu[:keep].amin(0)
    if expanded == len(mu):
        return missed, torch.zeros_like(missed)
    beyond = mu[expanded:].amax(0)
    return missed, (mu[:expanded] > beyond).sum(0, dtype=torch.int32) < keep


def estimate(tiles: Tiles, tau: float, *, samples: int = 64, seed: int = 0) -> Estimate:
    """Samples every tile `samples` times (an even number). The same seed and tiles give the same numbers."""
    check_tau(tau)
    if not isinstance(samples, int) or isinstance(samples, bool) or samples < 4 or samples % 2:
        raise ValueError(f"samples must be an even number of at least 4 (two halves), got {samples!r}")
    generator = torch.Generator(tiles.scores.device).manual_seed(seed)
    wide = tiles.scores.dtype
    # Two errors, two halves of V*.
    counts = torch.zeros(4, len(tiles.keep), dtype=torch.int32, device=tiles.scores.device)
    for keep, expanded, width, part in _groups(tiles):
        once = tiles.scores[part, :width].T.contiguous()  # blocks down, tiles across: reductions are vertical
        together = max(1, min(samples // 2, _AT_ONCE // once.numel()))  # draws of the same tiles at once
        scores = once.repeat(1, together)
        draw = torch.empty_like(scores, dtype=torch.promote_types(wide, torch.float32))
        for half in (0, 1):
            for done in range(0, samples // 2, together):
                n = min(together, samples // 2 - done) * len(part)
                mu = draw.normal_(generator=generator).mul_(tau).add_(scores)[:, :n]
                missed, missed_expanded = _missed(mu, keep, expanded)
                events = (missed, missed_expanded, missed & ~missed_expanded)
                for row, event in zip((0, 1, 2 + half), events, strict=True):
                    counts[row, part] += event.view(-1, len(part)).sum(0, dtype=torch.int32)
    found = counts.float()
    return Estimate(found[0] / samples, found[1] / samples, found[2:] / (samples // 2), samples)


@dataclass(frozen=True)
class Regret:
    """What a trigger lost against the best choice of as many tiles: identification error averaged over all tiles.

    `low` lets one half of the draws choose the best tiles and the other judge them, so it is at most the truth on
    average; `high` lets all draws do both, so it is at least the truth. They meet as samples grow. `error` bounds the
    standard error of `low`, given what was chosen: of the draws only, the tiles are taken as they are.
    """

    low: float
    high: float
    error: float
    avoided: float  # identification error that the trigger avoids, averaged over all tiles
    avoided_error: float
    fired: float  # share of tiles


def _best(value: Tensor, size: Tensor, pool: Tensor, room: Tensor) -> Tensor:
    """Marks, in each pool, the units of largest value that fit into the pool's room, in order; ties to the later."""
    order = torch.arange(len(value) - 1, -1, -1, device=value.device)
    order = order[value[order].sort(descending=True, stable=True).indices]
    order = order[pool[order].sort(stable=True).indices]
    used = size[order].cumsum(0)
    before = torch.zeros_like(room).index_add_(0, pool, size).cumsum(0)
    before = torch.cat([before.new_zeros(1), before[:-1]])
    chosen = torch.empty(len(value), dtype=torch.bool, device=value.device)
    chosen[order] = used - before[pool[order]] <= room[pool[order]]
    return chosen


def oracle(value: Tensor, fired: Tensor, pool: Tensor | None = None, unit: Tensor | None = None) -> Tensor:
    """bool `[n]`: the best tiles by `value`, in each pool as many as `fired` has there.

    pool: `[n]`, tiles among which a trigger shares out its budget (a sequence in a layer); None is one pool.
    unit: `[n]`, tiles that fire together (the heads of a tile); None is each alone. A unit lies in one pool.
    """
    n = len(value)
    pool = torch.zeros(n, dtype=torch.int64) if pool is None else numbered(pool)
    unit = torch.arange(n) if unit is None else numbered(unit)
    n_units, n_pools = int(unit.max()) + 1, int(pool.max()) + 1
    size = torch.zeros(n_units, dtype=torch.int64).index_add_(0, unit, torch.ones_like(unit))
    worth = torch.zeros(n_units, dtype=torch.float64).index_add_(0, unit, value.double()) / size
    home = torch.zeros(n_units, dtype=torch.int64).scatter_(0, unit, pool)
    if bool((home[unit] != pool).any()):
        raise ValueError("a unit's tiles lie in more than one pool: number units per pool")
    room = torch.zeros(n_pools, dtype=torch.int64).index_add_(0, pool, fired.to(torch.int64))
    return _best(worth, size, home, room)[unit]


def regret(estimates: Estimate, fired: Tensor, *, pool: Tensor | None = None, unit: Tensor | None = None) -> Regret:
    """Estimates the regret of the trigger that expands the tiles marked in `fired`, bool `[n]`.

    The best choice it is compared with is made within the same `pool` and `unit` (see `oracle`).
    """
    n = len(estimates.error)
    if fired.dtype != torch.bool or tuple(fired.shape) != (n,):
        raise ValueError(f"fired must be bool [{n}], one mark a tile, got {fired.dtype} {[*fired.shape]}")
    weights = fired.double()
    low, error = 0.0, 0.0
    for chooser, judge in ((0, 1), (1, 0)):
        weight = oracle(estimates.halves[chooser], fired, pool, unit).double() - weights
        low += float((weight * estimates.halves[judge]).sum()) / 2 / n
        error += math.sqrt(float((weight.square() * estimates.half_variances[judge]).sum())) / 2 / n
    best = oracle(estimates.value, fired, pool, unit).double()
    return Regret(
        low=low,
        high=float(((best - weights) * estimates.value).sum()) / n,
        error=error,
        avoided=float((weights * estimates.value).sum()) / n,
        avoided_error=math.sqrt(float((weights * estimates.variance).sum())) / n,
        fired=float(weights.mean()),
    )
