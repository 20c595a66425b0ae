"""Where the tiles of a batch over paged keys lie: any mix of whole prompts, chunks of prompts and decoding steps.

An engine keeps keys and values in pages of a fixed size and tells by a block table which pages hold which sequence. The
rows of all sequences of a step follow each other in one tensor. Tiles are cut at multiples of the tile size **counted
from the sequence's first key**, not from the first row of the call, so where a chunk begins on that grid no tile knows
how the prompt was cut.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .geometry import Geometry

Repeated = Callable[[Tensor, Tensor, Tensor, Tensor], None]  # q, k_pages, v_pages, out


@dataclass(frozen=True, eq=False)
class Plan:
    """The tiles of one step over pages of one size.

    Key x of a geometry lies on page `table.flatten()[x // page]`, at place `x % page` of it: as if every sequence had a
    run of `table.shape[1] * page` keys of its own in one long buffer.
    """

    table: Tensor  # int32 [S, W], contiguous
    page: int
    rows: int  # of the step, all sequences together
    chosen: Geometry | None  # tiles for which blocks are selected; None if there are none
    dense: Geometry | None  # tiles that attend to all they see


@dataclass(frozen=True, eq=False)
class Pages:
    """What a step's rows are and where their keys lie. One for all layers: plans are made once and kept.

    block_table:  int32 `[S, W]`, the pages of each sequence in order; entries past its end may hold anything.
    cu_seqlens_q: int `[S + 1]`, where each sequence's rows begin and end.
    seq_lens:     int `[S]`, its keys, those of this step's rows (the last ones) included.
    prompt_lens:  int `[S]` or None: how many of its tokens are the prompt. Rows behind the prompt were or will be
                  generated, and attend to everything. None: every row belongs to a prompt that ends with the step.
    min_context:  prompts shorter than this attend to everything.
    """

    block_table: Tensor
    cu_seqlens_q: Tensor
    seq_lens: Tensor
    prompt_lens: Tensor | None = None
    min_context: int = 0
    _plans: dict[tuple[int, int, int], Plan] = field(default_factory=dict, init=False, repr=False)
    _repeated: dict[tuple[Any, ...], list[Repeated]] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("block_table", "cu_seqlens_q", "seq_lens", "prompt_lens"):
            x = getattr(self, name)
            if x is None and name == "prompt_lens":
                continue
            if not isinstance(x, Tensor) or x.dtype not in (torch.int32, torch.int64):
                what = x.dtype if isinstance(x, Tensor) else type(x).__name__
                raise TypeError(f"{name} must be an int32 or int64 tensor, got {what}")
        n = len(self.seq_lens)
        shapes = {"block_table": (n, self.block_table.shape[-1]), "cu_seqlens_q": (n + 1,), "seq_lens": (n,)}
        for name, shape in shapes.items():
            x = getattr(self, name)
            if tuple(x.shape) != shape:
                raise ValueError(f"{name} must have shape {list(shape)} for {n} sequences, got {list(x.shape)}")
        if self.prompt_lens is not None and tuple(self.prompt_lens.shape) != (n,):
            raise ValueError(f"prompt_lens must have shape [{n}], got {list(self.prompt_lens.shape)}")
        bounds = self.bounds
        if not n or bounds[0] != 0 or any(a > b for a, b in itertools.pairwise(bounds)):
            raise ValueError(f"cu_seqlens_q must rise from 0, with at least one sequence, got {bounds}")
        for i, (keys, (a, b)) in enumerate(zip(self.keys, itertools.pairwise(bounds), strict=True)):
            if keys < b - a:
                raise ValueError(f"sequence {i} has {b - a} rows but only {keys} keys: seq_lens counts those rows too")

    @functools.cached_property
    def bounds(self) -> list[int]:
        return [int(x) for x in self.cu_seqlens_q.tolist()]

    @functools.cached_property
    def keys(self) -> list[int]:
        return [int(x) for x in self.seq_lens.tolist()]

    @functools.cached_property
    def prompts(self) -> list[int]:
        return self.keys if self.prompt_lens is None else [int(x) for x in self.prompt_lens.tolist()]

    def plan(self, page: int, block: int, tile: int) -> Plan:
        """The tiles, for pages of `page` keys."""
        found = self._plans.get((page, block, tile))
        if found is None:
            found = self._plans[page, block, tile] = self._make(page, block, tile)
        return found

    def _make(self, page: int, block: int, tile: int) -> Plan:
        if page % block:
            raise ValueError(f"a page of {page} keys does not hold whole blocks of {block}: use a page of k * {block}")
        if tile % block:
            raise ValueError(
                f"a tile of {tile} rows is no whole number of blocks of {block} keys, so what its own blocks hold "
                f"would depend on how prompts are cut: use tile={block * -(-tile // block)}"
            )
        room = self.block_table.shape[1] * page
        chosen: list[tuple[int, ...]] = []
        dense: list[tuple[int, ...]] = []
        for i, (keys, prompt) in enumerate(zip(self.keys, self.prompts, strict=True)):
            row, end = self.bounds[i], self.bounds[i + 1]
            if keys > room:
                raise ValueError(f"sequence {i} has {keys} keys but its {room // page} pages hold {room}")
            at = keys - (end - row)  # position of the sequence's next row
            last_tile = (prompt - 1) // tile
            while at < keys:
                within = at < prompt
                stop = min(keys, (at // tile + 1) * tile, prompt if within else keys)
                entry = (row, stop - at, i * room, at, i, last_tile - at // tile)
                (chosen if within and prompt >= self.min_context else dense).append(entry)
                row, at = row + stop - at, stop
        longest = -(-max(self.keys) // block)
        size = (self.bounds[-1], len(self.keys) * room, block, tile, longest)
        table = self.block_table.to(torch.int32).contiguous()
        return Plan(table, page, self.bounds[-1], _geometry(size, chosen), _geometry(size, dense))


def _geometry(size: tuple[int, int, int, int, int], tiles: list[tuple[int, ...]]) -> Geometry | None:
    if not tiles:
        return None
    columns = torch.tensor([tiles], dtype=torch.int64).unbind(-1)
    row, rows, key, pos, sequence, after = (c.contiguous() for c in columns)
    return Geometry(*size, row, rows, key, pos, sequence, whole=False, after=after)
