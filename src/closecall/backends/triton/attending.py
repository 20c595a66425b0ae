"""Launching the attention kernels: tile by tile, or a few rows with their blocks split over programs."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ...geometry import Geometry
from ...selection import Selection
from . import boxes, device, launch, tuning
from .tables import Paging, Tables

FEW_ROWS = 16  # decode: calls of at most this many query rows


def factors_of(scale: float, softcap: float) -> tuple[float, float]:
    """What products are multiplied with before and after the softcap, so that logits come out in base 2."""
    log2_e = math.log2(math.e)
    return (2 * log2_e * scale / softcap, log2_e * softcap) if softcap else (log2_e * scale, 0.0)


def _constants(q: Tensor, v: Tensor, block: int, rows: int, outer: float) -> dict[str, Any]:
    arch, dtype = device.arch(q.device), launch.DTYPES[q.dtype]
    head, tail = launch.slices(q.shape[3])
    part, parts, rest = launch.value_slices(arch, v.shape[3], rows)
    return {
        "BLOCK": block, "DIM": q.shape[3], "HEAD": head, "TAIL": tail,
        "V_DIM": v.shape[3], "V_PART": part, "V_PARTS": parts, "V_TAIL": rest, "SOFTCAP": outer != 0,
        "WIDE": device.wide(q), "PRECISION": launch.precision(arch, dtype),
        "SLICE": launch.step(arch, q.shape[3], dtype),
    }  # fmt: skip


def many(
    q: Tensor, k: Tensor, v: Tensor, selection: Selection | None, geometry: Geometry, here: Tables,
    factors: tuple[float, float], out: Tensor, lse: Tensor, paging: Paging | None = None,
) -> None:  # fmt: skip
    """Tile by tile, into the tiles' rows of `out [B, H, M, Dv]` (of last stride 1) and of `lse [B, H, M]`."""
    batch, heads, rows, _ = q.shape
    if selection is None:
        kept = counts = here.plan  # not read
        strides: tuple[int, ...] = (0,) * 6
        width = 0
    else:
        kept = selection.lists if selection.lists.stride(3) == 1 else selection.lists.contiguous()
        # No further than there are blocks, should a rule of one's own count wrongly: nothing else checks on the device.
        listed = selection.counts.minimum((kept < geometry.n_blocks).sum(-1))
        counts = torch.where(selection.unlisted, here.visible[:, None], listed).to(torch.int32)
        width = kept.shape[3]
        strides = (*kept.stride()[:3], *counts.stride())
    group = heads // k.shape[1]
    sharing = group > 1 and selection is not None and selection.group % group == 0

    def run(chosen: launch.Launch) -> None:
        span = launch.fit(chosen.rows, geometry.tile)
        packed = min(chosen.rows // span, launch.power_above(group)) if sharing else 1
        part = span * packed
        grid = (geometry.n_tiles * -(-geometry.tile // span), k.shape[1] * -(-group // packed), batch)
        keys = launch.fit(chosen.keys, geometry.block)
        constants = _constants(q, v, geometry.block, part, factors[1])
        boxed = boxes.of(k, v, keys, constants) if chosen.tma and paging is None else None
        with device.running(q.device) as kernel:
            kernel.attend_kernel[grid](
                q, k, v, *(boxed or (k, v)), out, lse, kept, counts, here.ordinals, here.plan,
                here.plan if paging is None else paging.table,
                *q.stride(), *k.stride(), *v.stride(), *out.stride()[1:3], *strides,
                geometry.n_tiles, rows, group, width, *factors, PAGED=0 if paging is None else paging.blocks,
                TILE=geometry.tile, ROWS=part, HEADS=packed, KEYS=keys, LISTED=selection is not None,
                STAGES=chosen.num_stages, TMA=boxed is not None, **constants,
                num_warps=chosen.num_warps, num_stages=chosen.num_stages,
            )  # fmt: skip

    paged = None if paging is None else geometry
    tuning.run(device.call("packed" if sharing else "attend", q, k, v, selection, paged), run)


def few(
    q: Tensor, k: Tensor, v: Tensor, selection: Selection | None, geometry: Geometry, here: Tables,
    factors: tuple[float, float], out: Tensor, lse: Tensor, paging: Paging | None = None,
) -> None:  # fmt: skip
    """The blocks split over programs, into contiguous `out [B, H, M, Dv]` and `lse [B, H, M]`: of the one tile of each
    batch row or, on pages and without a selection, of a plan's B tiles of at most M rows."""
    batch, heads, rows, _ = out.shape
    kv_heads, v_dim = k.shape[1], v.shape[3]
    group, n_blocks = heads // kv_heads, geometry.n_blocks
    blocks = counts = members = here.plan  # not read where there is no selection
    most = n_blocks
    if selection is not None:
        blocks, counts, members = _union(selection, kv_heads)
        most = min(n_blocks, group * selection.lists.shape[3])

    def run(chosen: launch.Launch) -> None:
        piles = kv_heads * -(-group * rows // chosen.rows)
        splits = _splits(batch * piles, most, q.device)
        parts = torch.empty(batch, heads, rows, splits, v_dim, device=q.device)
        sums = torch.empty(batch, heads, rows, splits, device=q.device)
        merge = tuning.choose(device.call("merge", q, k, v, selection))
        with device.running(q.device) as kernel:
            kernel.few_kernel[(splits, piles, batch)](
                q, k, v, parts, sums, blocks, counts, members, here.plan, here.plan if paging is None else paging.table,
                *q.stride(), *k.stride(), *v.stride(), rows, group, n_blocks, *factors,
                PAGED=0 if paging is None else paging.blocks, ROWS=chosen.rows,
                KEYS=launch.fit(chosen.keys, geometry.block),
                SPLITS=splits, LISTED=selection is not None, STAGES=chosen.num_stages,
                **_constants(q, v, geometry.block, chosen.rows, factors[1]),
                num_warps=chosen.num_warps, num_stages=chosen.num_stages,
            )  # fmt: skip
            kernel.merge_kernel[(batch * heads * rows,)](
                parts, sums, out, lse, SPLITS=splits, WAYS=splits, V_DIM=v_dim,
                WIDTH=launch.padded(v_dim), num_warps=merge.num_warps, num_stages=merge.num_stages,
            )  # fmt: skip

    tuning.run(device.call("few", q, k, v, selection, None if paging is None else geometry), run)


def _union(selection: Selection, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of the only tile: the blocks that any head of a group keeps, ascending, how many, and which head keeps which."""
    members = selection.kept_mask((slice(None), slice(None), 0)).to(torch.int8).contiguous()
    any_head = torch.unflatten(members, 1, (kv_heads, -1)).amax(2)
    # A stable sort by "not kept" leaves the kept blocks first, ascending.
    blocks = (1 - any_head).sort(dim=-1, stable=True).indices.to(torch.int32)
    return blocks.contiguous(), any_head.sum(-1, dtype=torch.int32), members


def _splits(programs: int, blocks: int, place: torch.device) -> int:
    """How many programs share one row's blocks: enough to fill the device twice, at least two blocks each."""
    units = torch.cuda.get_device_properties(place).multi_processor_count if place.type == "cuda" else 4
    wanted = max(1, min(2 * units // programs, blocks // 2, 64))
    return 1 << (wanted.bit_length() - 1)
