"""Scorers: how well a query row matches a key block.

A scorer is one small class. Most judge a block by a summary of it: `summarise` pools the keys of each block,
`row_scores` scores rows against the summaries. One that must see more than summaries overrides `scan`, which is handed
a whole sequence. The reduction over a tile's rows is a choice of its own, and so is the rule that cuts the ranking.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..registry import Component, Registry, Setting, must_define
from .reductions import shares

SCORERS: Registry[Scorer] = Registry("scorer")


# Numbers in the largest tensor that a scan makes at a time, if one tile needs no more: 2 MiB in float32, of which a few
# are alive at once. That is as much as caches hold; larger ones were slower.
AT_ONCE = 2**19


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """Scores and softmax are accumulated in float32 at least, whatever the input type."""
    return torch.promote_types(dtype, torch.float32)


# Columns that every BLAS we know computes alike, for float32 and float64 and any instruction set: a multiple of all
# widths of their kernels.
_WHOLE_COLUMNS = 48


def products(rows: Tensor, vectors: Tensor) -> Tensor:
    """`rows @ vectors.mT`, in which equal vectors have equal products.

    BLAS adds up the columns that its kernels' width leaves over in another order, and blocks that tie would no longer.
    """
    n = vectors.shape[-2]
    return (rows @ pad(vectors, (0, 0, 0, -n % _WHOLE_COLUMNS)).mT)[..., :n]


def blocks_of(keys: Tensor, block: int) -> Iterator[Tensor]:
    """The blocks of keys `[..., N, D]` in order; the last may be shorter and is never padded."""
    yield from torch.split(keys, block, dim=-2)


def per_block(keys: Tensor, block: int, pool: Callable[[Tensor], Tensor]) -> Tensor:
    """`pool` of every block, in float32: from `[..., blocks, keys of a block, D]` to `[..., blocks, D]`.

    The last block may be shorter: it is pooled apart, never padded.
    """
    wide = keys.to(accumulator(keys.dtype))
    n = wide.shape[-2] // block * block
    whole, rest = wide[..., :n, :], wide[..., n:, :]
    pooled = [pool(torch.unflatten(whole, -2, (-1, block)))] if n else []
    pooled += [pool(rest.unsqueeze(-3))] if rest.shape[-2] else []
    return torch.cat(pooled, -2)


@dataclass(frozen=True, eq=False)
class Chunk:
    """Some tiles of a sequence, all with the same number of rows; or its last rows, as if they were one tile."""

    tiles: range
    rows: Tensor  # [G, tiles, rows, D], in float32
    scored: Tensor  # [G, tiles, scored, D]: the rows, or where the policy pools, means of runs and outlying rows
    pos: int  # position of the first row among the sequence's keys
    seen: int  # number of blocks that the last row sees
    outlying: Tensor | None = None  # [G, tiles, n]: the rows that stand behind the means in `scored`

    @functools.cached_property
    def positions(self) -> Tensor:
        """int64 `[tiles, rows]`: where each row sits among the sequence's keys."""
        _, n_tiles, n_rows, _ = self.rows.shape
        return (self.pos + torch.arange(n_tiles * n_rows, device=self.rows.device)).view(n_tiles, n_rows)


@dataclass(frozen=True, eq=False)
class View:
    """What a scorer sees: one sequence's keys of one head, and its rows of the G query heads that read them.

    Row i of M sits at position N - M + i of the N keys. Tiles are runs of `tile` rows, blocks of `block` keys; the last
    ones may be shorter. A block that is not forced has all its keys before the tile's first row, so it is never short.
    """

    q: Tensor  # [G, M, D]
    k: Tensor  # [N, D]
    scale: float
    block: int
    tile: int
    sinks: int
    mass: bool  # whether the reduction wants estimated log masses, not scores
    pool: int = 1  # rows per mean
    every_row: tuple[bool, ...] = ()  # by tile: those whose rows are scored one by one all the same; empty means none
    outlying: int = 0  # rows of a tile that are scored beside the means: the most distant from its mean

    @property
    def n_blocks(self) -> int:
        return -(-self.k.shape[0] // self.block)

    @property
    def most_own(self) -> int:
        """The most blocks that a tile's own rows can overlap."""
        return (self.tile + self.block - 2) // self.block + 1

    def pool_of(self, tile: int) -> int:
        """Rows per mean in that tile."""
        return 1 if self.every_row and self.every_row[tile] else self.pool

    def _chunk(self, tiles: range, first: int, n_rows: int, n_tiles: int) -> Chunk:
        rows = self.q[:, first : first + n_tiles * n_rows].to(accumulator(self.q.dtype))
        rows = torch.unflatten(rows, 1, (n_tiles, n_rows))
        pos = self.k.shape[0] - self.q.shape[1] + first
        seen = -(-(pos + n_tiles * n_rows) // self.block)
        pool = self.pool_of(tiles.start) if tiles else 1
        if pool == 1:
            return Chunk(tiles, rows, rows, pos, seen)
        means = run_means(rows, pool).to(self.q.dtype).to(rows.dtype)
        if not self.outlying:
            return Chunk(tiles, rows, means, pos, seen)
        outlying = outlying_rows(rows, self.outlying)
        return Chunk(tiles, rows, torch.cat([means, of_rows(rows, outlying)], -2), pos, seen, outlying)

    def chunks(self, per_row: int = 0) -> Iterator[Chunk]:
        """All tiles in order, as many at a time as keep tensors of `per_row` numbers a row small; at least one."""
        group, length, dim = self.q.shape
        per_row = max(per_row, self.n_blocks)
        if self.mass:  # the forced blocks' logits, and their keys gathered tile by tile
            forced = (self.sinks + self.most_own) * self.block
            per_row = max(per_row, forced, forced * dim // (group * self.tile))
        step = max(1, AT_ONCE // (group * self.tile * per_row))
        whole, rest = divmod(length, self.tile)
        for _, alike in itertools.groupby(range(whole), self.pool_of):  # tiles that are pooled, or are not
            run = list(alike)
            for t in range(run[0], run[-1] + 1, step):
                tiles = range(t, min(t + step, run[-1] + 1))
                yield self._chunk(tiles, t * self.tile, self.tile, len(tiles))
        if rest:  # a chunk of its own: rows are never padded
            yield self._chunk(range(whole, whole + 1), whole * self.tile, rest, 1)

    def last(self, window: int) -> Iterator[Chunk]:
        """The last `window` rows, or all if there are fewer, as many at a time as keep their logits small."""
        group, length, _ = self.q.shape
        step = max(1, AT_ONCE // (group * self.k.shape[0]))
        for at in range(max(0, length - window), length, step):
            yield self._chunk(range(0), at, min(step, length - at), 1)

    def logits(self, chunk: Chunk) -> Tensor:
        """`[G, tiles, rows, seen, block]`: the scaled product of every row and key, -inf where there is none to see."""
        n = chunk.seen * self.block
        keys = self.k[:n].to(chunk.rows.dtype)
        product = products((self.scale * chunk.rows).flatten(0, 2), keys)
        if keys.shape[0] < n:
            product = pad(product, (0, n - keys.shape[0]), value=-torch.inf)
        product = product.view(*chunk.rows.shape[:3], n)
        behind = torch.arange(chunk.pos, n, device=product.device) > chunk.positions[..., None]
        product[..., chunk.pos :].masked_fill_(behind, -torch.inf)  # earlier keys are seen by all rows
        return torch.unflatten(product, -1, (chunk.seen, self.block))

    def attention(self, chunk: Chunk) -> Tensor:
        """`logits` as softmax probabilities."""
        return torch.unflatten(shares(self.logits(chunk).flatten(-2)), -1, (chunk.seen, self.block))


@dataclass(frozen=True)
class Planes:
    """A block summary that fast kernels can make and score: vectors of a key's size, one plane of them for each.

    The block's keys are stored as their mean, or as their coordinate-wise `box`, two vectors; a box may be shrunk
    towards the mean, `shrink` times as wide. With `outliers`, that many keys most distant from the block's mean are
    stored as they are, and the rest stands for the other keys alone. All is rounded to the keys' own type, but for a
    mean without `outliers`. A row's score is its largest product with any stored vector or point of the box.
    `scorers/planes.py` says this in code.
    """

    box: bool
    shrink: float | None = None  # None: the box itself
    outliers: int | None = None  # None: none, and a mean is not rounded

    @property
    def vectors(self) -> int:
        return (2 if self.box else 1) + (self.outliers or 0)

    @property
    def rounded(self) -> bool:
        """Whether what stands for the block's keys is rounded to their type."""
        return self.box or self.outliers is not None


@dataclass(frozen=True)
class Scorer(Component):
    """Turns keys into block summaries, and query rows plus summaries into scores (before `scale`).

    A subclass defines `summarise` and `row_scores`; or `scan`, if summaries are not enough; or, if its summaries are
    `Planes`, it derives from `closecall.scorers.planes.PlaneScorer`, defines nothing but these, and every backend's
    kernels run it.
    """

    # Whether scores are votes: not products that softmax knows, but shares of something, at least 0. Row-normalised
    # reductions then divide a row's votes by their sum over the blocks it sees, forced ones included.
    votes: ClassVar[bool] = False

    @property
    def vectors_per_block(self) -> int | None:
        """How many vectors of a key's size are stored for a block; None if keys are read again instead."""
        return None

    @property
    def planes(self) -> Planes | None:
        """Its summaries as fast kernels know them; None where only the reference backend can score."""
        return None

    def check(self, policy: Setting) -> None:
        """Called when a policy is made with this scorer; raises if the two cannot work together."""
        stored = self.vectors_per_block
        if stored is not None and stored >= policy.block > 1:  # a key that is a block of its own is its own summary
            raise ValueError(
                f"scorer {self.name!r} would store {stored} vectors for a block of {policy.block} keys, no less than "
                "the keys themselves: use larger blocks, or a scorer that stores fewer"
            )
        if policy.pool > 1 and type(self).scan is not Scorer.scan:
            raise ValueError(
                f"scorer {self.name!r} looks at single rows and keys, so its rows cannot be pooled: use pool=1, or a "
                "scorer that judges rows by summaries alone, like mean, quest, box or outliers"
            )

    def summarise(self, keys: Tensor, block: int) -> tuple[Tensor, ...]:
        """Summaries `[..., n_blocks, D]` of keys `[..., N, D]`, over real keys only."""
        raise must_define(self, "summarise(self, keys, block)", "a tuple of tensors [..., n_blocks, D]")

    def row_scores(self, rows: Tensor, summary: tuple[Tensor, ...]) -> Tensor:
        """Scores `[..., rows, n_blocks]` of query rows `[..., rows, D]`."""
        raise must_define(self, "row_scores(self, rows, summary)", "scores [..., rows, n_blocks]")

    def log_mass(self, rows: Tensor, summary: tuple[Tensor, ...], scale: float, n_keys: int) -> Tensor:
        """Estimated log of the sum of exp(scale * product) over a block's `n_keys` keys, for every row and block.

        By default as if every key's product were the block's score.
        """
        return scale * self.row_scores(rows, summary) + math.log(n_keys)

    def scan(self, view: View) -> Iterator[tuple[Chunk, Tensor]]:
        """Yields scaled scores `[G, tiles, runs, seen]` of all tiles, chunk by chunk; log masses where `view.mass`.

        One row instead of a tile's rows stands for all of them.
        """
        summary = self.summarise(view.k, view.block)
        for chunk in view.chunks():
            rows, seen = chunk.scored.flatten(0, 2), tuple(s[..., : chunk.seen, :] for s in summary)
            if view.mass:
                scores = self.log_mass(rows, seen, view.scale, view.block)
            else:
                scores = view.scale * self.row_scores(rows, seen)
            yield chunk, scores.reshape(*chunk.scored.shape[:3], chunk.seen)

    def describe(self) -> str:
        """Describes the scorer in a phrase, for the policy's one-line description."""
        parameters = ", ".join(f"{f.name} {getattr(self, f.name)}" for f in fields(self))
        return f"{self.name} scores" + (f" ({parameters})" if parameters else "")


def mean_key(keys: Tensor, block: int) -> Tensor:
    """The mean of every block's keys."""
    return per_block(keys, block, lambda b: b.sum(-2) / b.shape[-2])


# Distances from a mean that differ by less than this part of the larger count as equal: of two rows both are equally
# distant from their mean, and which of them is scored must not hang on how a backend rounds.
EQUALLY_DISTANT = 2.0**-12


def outlying_rows(rows: Tensor, count: int) -> Tensor:
    """int64 `[..., count]`, or fewer where there are fewer rows: those of `rows [..., rows, D]` that are most distant
    from the mean of all, of equally distant ones the earlier. A distance that is no number counts as none."""
    apart = (rows - rows.mean(-2, keepdim=True)).square().sum(-1).nan_to_num(nan=0.0, posinf=torch.inf)
    taken = []
    for _ in range(min(count, rows.shape[-2])):
        furthest = apart.amax(-1, keepdim=True)
        taken.append((apart >= furthest * (1 - EQUALLY_DISTANT)).int().argmax(-1, keepdim=True))
        apart = apart.scatter(-1, taken[-1], -1.0)
    return torch.cat(taken, -1)


def of_rows(values: Tensor, at: Tensor) -> Tensor:
    """`[..., n, X]` of `values [..., rows, X]`: those of the rows `at [..., n]`."""
    return values.gather(-2, at[..., None].expand(*at.shape, values.shape[-1]))


def run_means(rows: Tensor, pool: int) -> Tensor:
    """Means `[..., runs, D]` of consecutive runs of `pool` of the rows `[..., rows, D]`; the last may be shorter."""
    return mean_key(rows, pool)
