"""The Triton kernels over pages: the ones of `backend`, with each block's page looked up in the block table.

Scores know nothing of pages: they stream over block summaries, which lie in one piece. Those of complete blocks come
from the store where one is kept, `[Hkv, planes, blocks of all pages, width]`, and are made anew where none is.

Tiles that attend to everything and have few rows are decoded: their blocks are split over programs. How many share a
row's blocks depends on how many rows there are, and so does the last digit of what comes out.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...geometry import Geometry
from ...pages import Plan
from ...placed import placed
from ...policy import Policy
from ...ranking import Ranked
from ...scorers.base import Planes
from ...selection import Selection
from ..paged_reference import repeated as repeated  # a launch looks at its tensors each time
from . import attending, backend, device, launch
from .tables import Paging, Tables, tables


def has_kernel(policy: Policy, dim: int) -> bool:
    """Whether blocks can be ranked by kernels."""
    return backend.has_kernel(policy)


@dataclass(frozen=True, eq=False)
class _Blocks:
    """Some blocks of a step, on the device: where their keys lie, and where their summaries lie in a store."""

    listed: Tensor  # int32 [n, 3]: page, first key on it and number of keys, as the summary kernels read them
    place: Tensor  # int64 [n]: among the blocks of all pages


@dataclass(frozen=True, eq=False)
class _Step:
    """What a geometry of a plan comes to on a device."""

    every: _Blocks  # in the order of `Tables.blocks`
    fresh: Tensor  # int64: those of them that were not complete before the step
    new: _Blocks  # `fresh` ones
    done: Tensor  # int64: those of `new` that the step completes


# All are made once for a plan, which is one step of an engine and shared by its layers.


def _table(geometry: Geometry, plan: Plan, pages: Tensor) -> Tensor:
    def make() -> Tensor:
        if plan.table.numel() * plan.page >= 2**31:
            raise ValueError(
                f"a block table of {list(plan.table.shape)} pages of {plan.page} keys is more than 2^31 keys, which "
                "Triton kernels cannot count: pass a table that is no wider than its longest sequence"
            )
        table = plan.table.to(pages.device)
        if table.device.type == "cpu":  # elsewhere checking would wait for the device
            _check(table, plan, len(pages))
        return table

    return placed(geometry, pages.device, "table", make)


def _check(table: Tensor, plan: Plan, n_pages: int) -> None:
    for geometry in (plan.chosen, plan.dense):
        for _, _, _, keys, _ in geometry.tiles() if geometry is not None else ():
            used = table.flatten()[keys.start // plan.page : -(-keys.stop // plan.page)]
            if bool(((used < 0) | (used >= n_pages)).any()):
                raise ValueError(f"the block table names pages {used.tolist()}, but there are {n_pages}")


def _put(virtual: Tensor, g: Geometry, plan: Plan, pages: Tensor) -> _Blocks:
    """From blocks as `Tables.blocks` lists them. The table is on the device, and so this is computed there: a step
    belongs to one stream."""
    first, count = virtual.to(pages.device)[:, 1:].unbind(1)
    page, at = _table(g, plan, pages).flatten()[(first // plan.page).long()], first % plan.page
    place = page.long() * (plan.page // g.block) + at // g.block
    return _Blocks(torch.stack([page, at, count], -1).to(torch.int32), place)


def _step(g: Geometry, plan: Plan, pages: Tensor) -> _Step:
    def make() -> _Step:
        listed = tables(g, g.row.device).blocks
        room = plan.table.shape[1] * plan.page
        # The position of every sequence's first row: what was complete before.
        begins = torch.full((plan.table.shape[0],), room).scatter_reduce_(0, g.key[0] // room, g.pos[0], "amin")
        before = begins[listed[:, 1].long() // room]
        fresh = (listed[:, 1] % room // g.block >= before // g.block).nonzero().flatten()
        done = (listed[fresh, 2] == g.block).nonzero().flatten()
        device = pages.device
        return _Step(
            _put(listed, g, plan, pages), fresh.to(device), _put(listed[fresh], g, plan, pages), done.to(device)
        )

    return placed(g, pages.device, _Step, make)


def _completed(g: Geometry, plan: Plan, pages: Tensor) -> _Blocks:
    """What the geometry's rows complete."""

    def make() -> _Blocks:
        tiles = zip(*(x[0].tolist() for x in (g.key, g.pos, g.rows)), strict=True)
        spans = [(key, range(pos // g.block, (pos + rows) // g.block)) for key, pos, rows in tiles]
        listed = [(0, key + b * g.block, g.block) for key, span in spans for b in span]
        return _put(torch.tensor(listed, dtype=torch.int32).view(-1, 3), g, plan, pages)

    return placed(g, pages.device, "completed", make)


def _planes(policy: Policy) -> Planes:
    assert policy.scorer is not None
    assert policy.scorer.planes is not None  # else there is no kernel
    return policy.scorer.planes


def _summarise(k_pages: Tensor, policy: Policy, geometry: Geometry, blocks: _Blocks) -> tuple[Tensor, dict[str, Any]]:
    here = dataclasses.replace(tables(geometry, k_pages.device), blocks=blocks.listed)
    return backend._summarise(k_pages, _planes(policy), here, policy.block)


def store_kind() -> str:
    """Summaries lie the same way on every device."""
    return ""


def new_store(q: Tensor, k_pages: Tensor, policy: Policy, geometry: Geometry, plan: Plan) -> Tensor:
    """Room for the summaries of all blocks of all pages."""
    told = launch.layout(_planes(policy), launch.DTYPES[k_pages.dtype])
    blocks = k_pages.shape[0] * (plan.page // policy.block)
    planes = told["PLANES"] + told["VECTORS"] - 1
    return k_pages.new_zeros(k_pages.shape[1], planes, blocks, launch.padded(k_pages.shape[3]))


def update(q: Tensor, k_pages: Tensor, policy: Policy, geometry: Geometry, plan: Plan, store: Tensor) -> None:
    """Writes the summaries of the blocks that the geometry's rows complete."""
    blocks = _completed(geometry, plan, k_pages)
    if len(blocks.place):
        store[:, :, blocks.place] = _summarise(k_pages, policy, geometry, blocks)[0]


def _summaries(
    k_pages: Tensor, policy: Policy, geometry: Geometry, plan: Plan, store: Tensor | None
) -> tuple[Tensor, dict[str, Any]]:
    """Of all blocks of the step, and what the score kernels must know about them."""
    step = _step(geometry, plan, k_pages)
    if store is None:
        return _summarise(k_pages, policy, geometry, step.every)
    new, told = _summarise(k_pages, policy, geometry, step.new)
    store[:, :, step.new.place[step.done]] = new[:, :, step.done]
    shape = (*store.shape[:2], len(step.every.place), store.shape[3])
    everything = store.new_empty(math.prod(shape) + launch.MOST_KEYS * shape[3])  # as in `backend._summarise`
    planes = everything[: math.prod(shape)].view(shape)
    torch.index_select(store, 2, step.every.place, out=planes)
    planes[:, :, step.fresh] = new
    return planes, told


def rank(
    q: Tensor,
    k_pages: Tensor,
    policy: Policy,
    geometry: Geometry,
    plan: Plan,
    scale: float,
    told: Tensor,
    store: Tensor | None = None,
) -> Ranked:
    """The ranking of `backend.rank`. With a store, keys of blocks that were complete before the first row are not read
    for their summaries again."""
    made = _summaries(k_pages, policy, geometry, plan, store)
    paging = Paging(_table(geometry, plan, k_pages), plan.page // policy.block, made, told)
    return backend.rank(q, k_pages, policy, geometry, scale, paging=paging)


def _some(g: Geometry, which: Tensor) -> Geometry | None:
    """A geometry of some of its tiles."""
    if not bool(which.any()):
        return None
    names = ("row", "rows", "key", "pos", "sequence")
    picked = {name: getattr(g, name)[:, which[0]].contiguous() for name in names}
    return dataclasses.replace(g, n_blocks=int(g.visible[which].max()), after=None, **picked)


def _split(g: Geometry) -> tuple[Geometry | None, Geometry | None]:
    """(tiles of many rows, tiles of few rows)."""
    few = g.rows <= attending.FEW_ROWS
    return placed(g, few.device, "split", lambda: (_some(g, ~few), _some(g, few)))


def attend(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    selection: Selection | None,
    geometry: Geometry,
    plan: Plan,
    scale: float,
    softcap: float,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Writes the geometry's rows of `out [1, H, M, Dv]` and `lse [1, H, M]`."""
    problem = device.dim_problem("value", v_pages.shape[3])
    if problem is not None:
        raise ValueError(f"backend 'triton' cannot run here: {problem}")
    paging = Paging(_table(geometry, plan, k_pages), plan.page // geometry.block)
    factors = attending.factors_of(scale, softcap)
    many, few = (geometry, None) if selection is not None else _split(geometry)
    wide = device.wide(q) and out.dtype != torch.float32
    to = out.float() if wide else out  # the interpreter cuts float32 off where it should round
    if many is not None:
        here = tables(many, q.device)
        attending.many(q, k_pages, v_pages, selection, many, here, factors, to, lse, paging)
    if few is not None:
        _decode(q, k_pages, v_pages, few, tables(few, q.device), factors, to, lse, paging)
    if wide:
        out.copy_(to)


def _decode(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, geometry: Geometry, here: Tables, factors: tuple[float, float],
    out: Tensor, lse: Tensor, paging: Paging,
) -> None:  # fmt: skip
    """Tiles of few rows, which come out side by side and go to their rows afterwards."""
    most, (tile, at, row) = _rows(geometry, q.device)
    shape = (geometry.n_tiles, q.shape[1], most)
    some, sums = out.new_empty(*shape, v_pages.shape[3]), lse.new_empty(shape)
    attending.few(q, k_pages, v_pages, None, geometry, here, factors, some, sums, paging)
    out[0, :, row] = some[tile, :, at].transpose(0, 1)
    lse[0, :, row] = sums[tile, :, at].transpose(0, 1)


def _rows(g: Geometry, device: torch.device) -> tuple[int, Tensor]:
    """The most rows of a tile, and int64 `[3, n]`: tile, place in it, and row of every row of the geometry."""

    def make() -> tuple[int, Tensor]:
        listed = enumerate(zip(g.row[0].tolist(), g.rows[0].tolist(), strict=True))
        places = torch.tensor([(t, i, row + i) for t, (row, n) in listed for i in range(n)]).T
        return int(g.rows.max()), places.to(device)

    return placed(g, device, "rows", make)
