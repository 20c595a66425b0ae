"""torch FlexAttention from our indices: a cross-check, and the way to devices we have no kernel for.

`attend` runs FlexAttention uncompiled on a CPU (it materialises the scores: for checking, not for speed) and compiled on
other devices. `compiled` is what a CPU gets from torch.compile, for the benchmark.

What limits it, measured on torch 2.13:

* Uncompiled FlexAttention ignores block sparsity and masks scores, not values: 0 * NaN is NaN, so a NaN or an infinity in
  a value reaches every row of its own sequence and head. NaN in queries and keys stays in the rows that see it.
* Compiled for a CPU (needs a C++ compiler and AVX2) it has no log-sum-exp and no float64, and wants the index tensor as
  wide as there are blocks, whatever is kept.
* The compiled CPU kernel sizes its buffers for the thread count it was compiled under: `compiled` keeps the counts apart.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.flex_attention import BlockMask

from ..geometry import Geometry
from ..selection import Selection
from . import empty_outputs
from .reference import gather_kept, rank

__all__ = ["attend", "compiled", "gather_kept", "rank", "why_not"]

DEVICES = ("cpu", "cuda", "hpu", "xpu")  # FlexAttention's own list, less those without a log-sum-exp
# Generated GPU kernels step through blocks in powers of two of at least 16 that must divide ours.
GPU_STEP = 16


def why_not(q: Tensor) -> str | None:
    if q.device.type not in DEVICES:
        return f"FlexAttention does not run on {q.device.type} tensors: use backend='reference'"
    if q.dtype == torch.float64 and q.device.type != "cpu":
        return "compiled FlexAttention has no float64: convert to float32, or use backend='reference'"
    return None


class _Kept(NamedTuple):
    """One sequence's kept blocks, as a BlockMask wants them."""

    kv_idx: Tensor  # int32 [1, H or 1, T, n_blocks]; arbitrary valid indices past counts
    counts: Tensor  # int32 [1, H or 1, T]
    start: Tensor  # [T], position of each tile's first row


def attend(
    q: Tensor, k: Tensor, v: Tensor, selection: Selection | None, geometry: Geometry, scale: float
) -> tuple[Tensor, Tensor]:
    out, lse = empty_outputs(q, v)
    on_cpu = q.device.type == "cpu"
    fused = not on_cpu and geometry.tile % GPU_STEP == 0 and geometry.block % GPU_STEP == 0
    # Uncompiled FlexAttention rounds the weights to v's type before it multiplies; we accumulate in float32.
    wide = q.dtype if fused else lse.dtype
    for b, tiles, rows, keys in geometry.spans():
        queries, its_keys, values = q[b : b + 1, :, rows], k[b : b + 1, :, keys], v[b : b + 1, :, keys]
        kept = _kept(selection, geometry, b, tiles, q.device)
        mask = _block_mask(kept, geometry, queries.shape[2], its_keys.shape[2], selection is not None)
        call = _gpu() if fused else _eager
        o, s = call(queries.to(wide), its_keys.to(wide), values.to(wide), mask, scale)
        out[b, :, rows], lse[b, :, rows] = o[0].to(q.dtype), s[0]
    return out, lse


def compiled(
    q: Tensor, k: Tensor, v: Tensor, selection: Selection | None, geometry: Geometry, scale: float
) -> Callable[[], Tensor]:
    """FlexAttention compiled for these tensors and kept blocks, as a function that runs it; the output only.

    For one sequence per batch row that fills the buffers. Compiling (seconds) and the block mask happen here, so that
    what is timed is FlexAttention's kernel alone. Its mask covers causality only: compiled kernels honour the blocks.
    """
    if not geometry.whole or geometry.batch != 1:
        raise ValueError("compiled FlexAttention is for one unpadded sequence: use attend for batches and packed calls")
    kept = _kept(selection, geometry, 0, slice(0, geometry.n_tiles), q.device)
    mask = _block_mask(kept, geometry, q.shape[2], k.shape[2], membership=False)
    kernel = _cpu(torch.get_num_threads())
    run = functools.partial(kernel, q, k, v, block_mask=mask, scale=scale, enable_gqa=True)
    run()
    return run


def _kept(selection: Selection | None, geometry: Geometry, b: int, tiles: slice, device: torch.device) -> _Kept:
    start = geometry.pos[b, tiles].to(device)
    if selection is None:
        visible = geometry.visible[b, tiles].to(device, torch.int32)[None, None]
        blocks = torch.arange(geometry.n_blocks, dtype=torch.int32, device=device)
        return _Kept(blocks.expand(1, 1, len(start), -1).contiguous(), visible.contiguous(), start)
    index = selection.kv_idx[b : b + 1, :, tiles]
    counts = selection.counts[b : b + 1, :, tiles].to(torch.int32)
    full = index.new_zeros(*index.shape[:3], geometry.n_blocks)
    width = min(index.shape[3], geometry.n_blocks)
    unused = torch.arange(width, device=device) >= counts[..., None]
    full[..., :width] = index[..., :width].masked_fill(unused, 0)
    return _Kept(full, counts.contiguous(), start)


def _block_mask(kept: _Kept, geometry: Geometry, rows: int, keys: int, membership: bool) -> BlockMask:
    """Kept blocks that a tile's first row sees whole need no mask; the others, next to the diagonal, are masked."""
    tile, block = geometry.tile, geometry.block
    width = kept.kv_idx.shape[3]
    slot = torch.arange(width, device=kept.kv_idx.device)
    whole = ((kept.kv_idx + 1) * block <= kept.start[:, None] + 1) & (slot < kept.counts[..., None])
    n_whole = whole.sum(-1, dtype=torch.int32)  # indices ascend, so these come first
    rest = kept.kv_idx.gather(-1, (slot + n_whole[..., None]) % width)
    offset = keys - rows

    def causal(b: Tensor, h: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return key <= row + offset

    mask = causal
    if membership:
        table = torch.zeros(*kept.kv_idx.shape[1:], dtype=torch.bool, device=kept.kv_idx.device)
        used = slot < kept.counts[0, ..., None]
        table.scatter_(-1, kept.kv_idx[0].long(), used, reduce="add") if False else None
        at = used.nonzero(as_tuple=True)
        table[at[0], at[1], kept.kv_idx[0][at].long()] = True

        def mask(b: Tensor, h: Tensor, row: Tensor, key: Tensor) -> Tensor:
            return (key <= row + offset) & table[h, row // tile, key // block]

    return BlockMask.from_kv_blocks(
        kept.counts - n_whole, rest, n_whole, kept.kv_idx, BLOCK_SIZE=(tile, block), mask_mod=mask,
        seq_lengths=(rows, keys), compute_q_blocks=False,
    )  # fmt: skip


def _with_lse(run: Callable[..., object], q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, scale: float):
    ...
