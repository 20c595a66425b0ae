"""Launching the score kernels: on a tile's rows, or on the means of runs of them where a policy pools; over all
blocks, or over a list of candidates."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...geometry import Geometry
from ...policy import Policy
from ...scorers.reductions import Of
from . import launch, tables
from .tables import Tables


@dataclass(frozen=True, eq=False)
class Scored:
    """Rows by which some tiles are scored, and what the kernels must know about them and about the blocks.

    A tile's rows are `runs` places in `q`. Tiles with few of them, a power of two, share a program.
    """

    q: Tensor  # [B, H, R, D]
    forced: Tensor | None  # [B, H, R]: log-sum-exp over the forced blocks, where masses are wanted
    sums: Tensor | None  # [B, H, R, 1 or 2], written by `add_up`: what rows are normalised by
    chosen: Tensor | None  # bool [B, T], on the host: the tiles; None means all
    pool: int
    outlying: int  # rows of a tile that stand behind its means
    runs: int
    planes: Tensor  # summaries [Hkv, planes, slots, width]
    geometry: Geometry
    told: dict[str, Any]  # constants of the kernels that do not depend on the launch
    arch: str
    listed: Tensor | None = None  # int32 [B, who decides, T, n]: each tile's candidates, ascending; None means all

    @property
    def plan(self) -> Tensor:
        return tables.scored(self.geometry, self.q.device, self.pool, self.outlying, self.runs)

    @property
    def columns(self) -> int:
        """How many blocks a tile's scores are of."""
        return self.geometry.n_blocks if self.listed is None else self.listed.shape[3]

    def again(self, q: Tensor, forced: Tensor | None, listed: Tensor) -> Scored:
        """The same tiles by all their rows, `q [B, H, M, D]`, over those blocks alone."""
        sums = None if self.sums is None else torch.empty(*q.shape[:3], self.sums.shape[3], device=q.device)
        return dataclasses.replace(
            self, q=q, forced=forced, sums=sums, pool=1, outlying=0, runs=self.geometry.tile, listed=listed
        )

    def _sizes(self, chosen: launch.Launch, of_scores: bool) -> dict[str, Any]:
        keys = launch.fit(min(chosen.keys, launch.MOST_KEYS), self.columns)
        rows = chosen.rows if self.pool > 1 else launch.fit(chosen.rows, self.runs)
        there = dataclasses.replace(chosen, rows=rows, keys=keys)
        room = launch.score_sizes if of_scores else launch.sums_sizes
        dtype = launch.DTYPES[self.q.dtype]
        sizes = room(self.arch, self.q.shape[3], dtype, self.told, there, self.listed is not None)
        warps = {"num_warps": chosen.num_warps, "num_stages": sizes["STAGES"]}
        return self.told | sizes | warps | launch.score_rows(self.pool, self.runs, sizes["ROWS"])

    def tiles(self, chosen: launch.Launch) -> int:
        """How many tiles see the blocks together in one program of the score kernel."""
        return int(self._sizes(chosen, of_scores=True)["TILES"])

    def add_up(self, kernel: Any, chosen: launch.Launch, sinks: int, scale: float) -> None:
        """Writes `sums`."""
        assert self.sums is not None
        sizes = self._sizes(chosen, of_scores=False)
        packs = tables.packs(self.geometry, self.q.device, sizes["TILES"], self.chosen)
        heads, parts = self.q.shape[1], -(-sizes["TILES"] * self.runs // sizes["ROWS"])
        forced = self.sums if self.forced is None else self.forced  # not read
        listed = self.plan if self.listed is None else self.listed  # not read
        together = 1 if self.listed is None else heads // self.listed.shape[1]
        if len(packs.listed):
            kernel.sums_kernel[(len(packs.listed) * parts, heads)](
                self.q, self.planes, self.plan, packs.listed, forced, self.sums, listed, *self.q.stride(),
                self.geometry.n_tiles, self.q.shape[2], heads // self.planes.shape[0], self.planes.shape[2], sinks,
                together, self.columns, scale, LISTED=self.listed is not None, **sizes,
            )  # fmt: skip

    def score(
        self, kernel: Any, chosen: launch.Launch, policy: Policy, scale: float, found: Tensor, heads: slice,
        tiles: slice,
    ) -> None:  # fmt: skip
        """Writes the scores of its tiles among these into `found [B, heads, tiles, columns]`."""
        sizes = self._sizes(chosen, of_scores=True)
        packs = tables.packs(self.geometry, self.q.device, sizes["TILES"], self.chosen)
        some = packs.of(tiles)
        if not some:
            return
        sums = self.q if self.sums is None else self.sums  # not read
        n_heads, n_tiles, rows = self.q.shape[1], self.geometry.n_tiles, self.q.shape[2]
        before = (self.q, self.planes, self.plan, packs.listed, sums)
        where = (*self.q.stride(), n_tiles, some.start, tiles.start, heads.start, n_heads, tiles.stop - tiles.start)
        where += (rows, n_heads // self.planes.shape[0])
        after = (self.planes.shape[2], policy.sinks, scale)
        sizes |= {"MASS": policy.reduction.of is Of.MASS, "MEAN": policy.reduction.mean}
        grid = (len(some), heads.stop - heads.start)
        if self.listed is None:
            kernel.scores_kernel[grid](*before, found, *where, self.columns, *after, **sizes)
        else:
            together = n_heads // self.listed.shape[1]
            kernel.again_kernel[grid](*before, self.listed, found, *where, together, self.columns, *after, **sizes)


def scored(
    kernel: Any, q: Tensor, forced: Tensor | None, policy: Policy, every_row: Tensor | None, planes: Tensor,
    geometry: Geometry, here: Tables, told: dict[str, Any], arch: str,
) -> list[Scored]:  # fmt: skip
    """What tiles are scored by: their rows; or means of these, but for the tiles of `every_row [B, T]`."""
    told = told | {
        "BLOCK": geometry.block, "SOFTMAX": policy.reduction.of is Of.SOFTMAX,
        "PRECISION": launch.precision(arch, launch.DTYPES[q.dtype]),
        "SLICE": launch.score_slice(q.shape[3], launch.DTYPES[q.dtype]),
    }  # fmt: skip
    common = (planes, geometry, told, arch)

    def of(x: Tensor, forced: Tensor | None, tiles: Tensor | None, pool: int, runs: int) -> Scored:
        outlying = policy.outlying if pool > 1 else 0
        columns = {Of.SCORES: 0, Of.SOFTMAX: 1, Of.MASS: 2}[policy.reduction.of]
        sums = torch.empty(*x.shape[:3], columns, device=x.device) if columns else None
        return Scored(x, forced, sums, tiles, pool, outlying, runs, *common)

    if policy.pool == 1:
        return [of(q, forced, None, 1, geometry.tile)]
    runs = launch.power_above(policy.scored)
    means, forced_means = _pooled(kernel, q, forced, policy, runs, geometry, here)
    if every_row is None:
        return [of(means, forced_means, None, policy.pool, runs)]
    return [
        of(means, forced_means, ~every_row, policy.pool, runs),
        of(q, forced, every_row, 1, geometry.tile),
    ]


def _pooled(
    kernel: Any, q: Tensor, forced: Tensor | None, policy: Policy, runs: int, geometry: Geometry, here: Tables
) -> tuple[Tensor, Tensor | None]:
    """What tiles are scored by instead of their rows, `[B, H, T * runs, D]`: means of runs of rows, then outlying rows;
    and the same of the rows' forced masses."""
    batch, heads, rows, dim = q.shape
    # The interpreter cuts float32 off where it should round: there torch rounds.
    shape = (batch, heads, geometry.n_tiles * runs)
    means = torch.empty(*shape, dim, dtype=torch.float32 if q.device.type == "cpu" else q.dtype, device=q.device)
    masses = None if forced is None else torch.empty(shape, device=q.device)
    some = min(runs, 16)
    tensors = (q, here.plan, means if forced is None else forced, means, means if masses is None else masses)
    common = {
        "POOL": policy.pool, "RUNS": runs, "DIM": dim, "WIDTH": launch.padded(dim), "FORCED": forced is not None
    }  # fmt: skip
    kernel.pool_kernel[(geometry.n_tiles * -(-runs // some), heads, batch)](
        *tensors, *q.stride(), geometry.n_tiles, rows, ROWS=some, **common
    )
    if policy.outlying:
        kernel.outlying_kernel[(geometry.n_tiles, heads, batch)](
            *tensors, *q.stride(), geometry.n_tiles, rows, ROWS=launch.power_above(geometry.tile),
            OUTLYING=policy.outlying, **common,
        )  # fmt: skip
    return means.to(q.dtype), masses
