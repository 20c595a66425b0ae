"""A call's geometry as the kernels read it, kept on the device.

Plans are made on the host, and each goes to a device once (`placed`), so later calls copy nothing and can be captured
in a CUDA graph.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...geometry import Geometry
from ...placed import placed


@dataclass(frozen=True, eq=False)
class Tables:
    """One plan on one device."""

    plan: Tensor  # int32 [B, T, 5]: row, rows, key, pos of the geometry, and the tile's first block among `blocks`
    blocks: Tensor  # int32 [slots, 3]: batch row, first key and number of keys of every block of every sequence
    ordinals: Tensor  # int32 [n_blocks]: 0, 1, ..., the list of a tile that keeps every block
    geometry: Geometry  # the same geometry with its tensors on the device
    visible: Tensor  # int64 [B, T], as in the geometry
    own: Tensor  # of the host, int64 [B, T]: the first block that overlaps the tile's rows
    seen: Tensor  # of the host: `visible`

    def forced(self, sinks: int) -> Tensor:
        """int64 `[B, T]`: how many blocks are forced. Counted on the host, once: counted on the device, it would be
        ready for the stream that asked first and for no other."""
        if sinks not in self.geometry._forced:
            counts = self.seen - self.own + self.own.clamp(max=sinks)
            self.geometry._forced[sinks] = counts.to(self.visible.device)
        return self.geometry._forced[sinks]


@dataclass(frozen=True, eq=False)
class Paging:
    """Keys on pages of so many `blocks`: block i of a sequence whose keys begin at place x of the flattened table lies
    on page `table[x + i // blocks]`."""

    table: Tensor  # int32 [S, W], on the device
    blocks: int
    summaries: Any = None  # of a ranked call's blocks: what `backend._summarise` returns
    told: Any = None  # of a ranked call: the sequences `[1, T]` that rules are told of


def tables(geometry: Geometry, device: torch.device) -> Tables:
    return placed(geometry, device, Tables, lambda: _build(geometry, device))


def _slots(g: Geometry) -> tuple[Tensor, list[Tensor]]:
    """The columns that say where a tile's blocks begin, and the blocks of each sequence, `[blocks, 3]`."""
    slot = torch.zeros_like(g.row)
    blocks: list[Tensor] = []
    used = 0
    for b, tiles, _, keys in g.spans():
        slot[b, tiles] = used
        first = torch.arange(keys.start, keys.stop, g.block)
        blocks.append(torch.stack([torch.full_like(first, b), first, (keys.stop - first).clamp(max=g.block)], -1))
        used += len(first)
    return slot, blocks


def _build(g: Geometry, device: torch.device) -> Tables:
    slot, blocks = _slots(g)
    plan = torch.stack([g.row, g.rows, g.key, g.pos, slot], -1).to(torch.int32)
    listed = torch.cat(blocks) if blocks else torch.zeros(0, 3)
    # Not `non_blocking`: the host goes on when the tables are there.
    row, rows, key, pos, sequence, visible = torch.stack(
        [g.row, g.rows, g.key, g.pos, g.sequence, g.visible]
    ).to(device)  # fmt: skip
    there = dataclasses.replace(g, row=row, rows=rows, key=key, pos=pos, sequence=sequence)
    there.__dict__["visible"] = visible  # in place of what the device would compute, on one stream, when first asked
    ordinals = torch.arange(g.n_blocks, dtype=torch.int32).to(device)
    listed = listed.to(torch.int32).to(device)
    return Tables(plan.to(device), listed, ordinals, there, visible, g.first_own(), g.visible)


def scored(g: Geometry, device: torch.device, pool: int, outlying: int, runs: int) -> Tensor:
    """int32 `[B, T, 5]`: each tile's first scored row, how many there are, blocks before its own, blocks that it sees,
    and its first block among `Tables.blocks`. Where rows are pooled, each tile has room for `runs`: means, and then
    outlying rows."""

    def make() -> Tensor:
        row, rows = g.row, g.rows
        if pool > 1:
            row, rows = (torch.arange(g.n_tiles) * runs).expand_as(row), -(-rows // pool) + rows.clamp(max=outlying)
        return torch.stack([row, rows, g.first_own(), g.visible, _slots(g)[0]], -1).to(torch.int32).to(device)

    return placed(g, device, ("scored", pool, outlying, runs), make)


@dataclass(frozen=True, eq=False)
class Packs:
    """Runs of tiles of one sequence, none of which crosses a multiple of `most` tiles."""

    listed: Tensor  # int32 [n, 3]: batch row, first tile, tiles
    starts: list[int]  # where those of each `most` tiles begin; one more for the end
    most: int

    def of(self, tiles: slice) -> range:
        """Those of tiles from a multiple of `most` to another, or to the end."""
        return range(self.starts[tiles.start // self.most], self.starts[-(-tiles.stop // self.most)])


def packs(g: Geometry, device: torch.device, most: int, chosen: Tensor | None = None) -> Packs:
    """The tiles, or those that were `chosen` (bool `[B, T]`, on the host), as runs of at most `most`."""

    def make() -> Packs:
        wanted = torch.ones_like(g.sequence, dtype=torch.bool) if chosen is None else chosen
        begins = (torch.arange(g.n_tiles) % most == 0).repeat(g.batch, 1)
        for x in (g.sequence, wanted):
            begins[:, 1:] |= x[:, 1:] != x[:, :-1]
        batch, first = begins.nonzero(as_tuple=True)
        end = torch.cat([first[1:], first.new_zeros(1)])
        end = end.where(end > 0, g.n_tiles)  # the next one begins a batch row
        listed = torch.stack([batch, first, end - first], -1)[wanted[batch, first]]
        order = (listed[:, 1] // most).sort(stable=True)
        starts = torch.searchsorted(order.values, torch.arange(-(-g.n_tiles // most) + 1))
        return Packs(listed[order.indices].to(torch.int32).to(device), starts.tolist(), most)

    told = None if chosen is None else chosen.numpy().tobytes()
    return placed(g, device, ("packs", most, told), make)
