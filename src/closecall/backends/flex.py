"""torch FlexAttention from our indices: a cross-check, and the way to devices we have no kernel for.

`attend` runs FlexAttention uncompiled on a CPU (it materialises the scores: for checking, not for speed) and compiled
on other devices. `compiled` is what torch.compile makes of it for a CPU; the benchmark times that.

Limits, as of torch 2.13:

* FlexAttention masks scores, not values, and 0 * NaN is NaN: a NaN or an infinity in a value reaches all rows of its
  sequence that read that head (uncompiled), or those whose tile keeps its block (compiled). NaN in queries and keys
  stays in the rows that see them.
* Uncompiled it ignores block sparsity, so the mask itself must know which blocks are kept.
* Compiled for a CPU it needs a C++ compiler and AVX2, takes any shape and grid of ours in float32, bfloat16 and
  float16, has no log-sum-exp, and wants an index tensor as wide as there are blocks, however few are kept.
* Compiled code is made per shape, type and thread count, and torch stops at 8 variants unless told otherwise.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex

from ..geometry import Geometry
from ..selection import Selection
from . import empty_outputs
from .reference import gather_kept, rank

__all__ = ["attend", "compiled", "gather_kept", "rank", "why_not"]

DEVICES = ("cpu", "cuda", "xpu")  # where FlexAttention can return the log-sum-exp
GPU_STEP = 16  # generated GPU kernels walk tiles and blocks in steps of at least this, which must divide them


def why_not(q: Tensor) -> str | None:
    if q.device.type not in DEVICES:
        return f"FlexAttention does not run on {q.device.type} tensors: use backend='reference'"
    if q.dtype == torch.float64 and q.device.type != "cpu":
        return "compiled FlexAttention has no float64: convert to float32, or use backend='reference'"
    return None


def attend(
    q: Tensor, k: Tensor, v: Tensor, selection: Selection | None, geometry: Geometry, scale: float, softcap: float = 0.0
) -> tuple[Tensor, Tensor]:
    out, lse = empty_outputs(q, v)
    fused = q.device.type != "cpu" and geometry.tile % GPU_STEP == 0 and geometry.block % GPU_STEP == 0
    # Uncompiled, the weights are rounded to the inputs' type before they meet the values; ours are not.
    wide = q.dtype if fused else lse.dtype
    for b, tiles, rows, keys in geometry.spans():
        tensors = q[b : b + 1, :, rows].to(wide), k[b : b + 1, :, keys].to(wide), v[b : b + 1, :, keys].to(wide)
        kept = _kept(selection, geometry, b, tiles, q.device)
        causal = _causal(tensors[0], tensors[1])
        # Masked even where the kernel skips blocks: past its limit of variants torch.compile falls back to uncompiled.
        mask = causal if selection is None else _kept_and(causal, kept, geometry)
        block_mask = _block_mask(kept, geometry, tensors[0], tensors[1], mask)
        o, s = (_on_device if fused else _uncompiled)(*tensors, block_mask, scale, softcap)
        out[b, :, rows], lse[b, :, rows] = o[0].to(q.dtype), s[0]
    return out, lse


def compiled(
    q: Tensor, k: Tensor, v: Tensor, selection: Selection | None, geometry: Geometry, scale: float
) -> Callable[[], Tensor]:
    """FlexAttention compiled for these tensors and kept blocks, as a function that runs it and returns the output.

    The block mask is built and the kernel compiled (seconds) here, so that timing the function times the kernel alone.
    Its mask holds causality only, which is FlexAttention at its best: whole blocks are not masked at all.
    """
    if not geometry.whole or geometry.batch != 1:
        raise ValueError(f"compiled takes one unpadded sequence, got a batch of {geometry.batch} rows: use attend")
    kept = _kept(selection, geometry, 0, slice(0, geometry.n_tiles), q.device)
    block_mask = _block_mask(kept, geometry, q, k, _causal(q, k))
    kernel = _compile(fullgraph=True)

    def run() -> Tensor:
        with torch.no_grad():
            out: Tensor = kernel(q, k, v, block_mask=block_mask, scale=scale, enable_gqa=True)
        return out

    run()
    return run


class _Kept(NamedTuple):
    """The kept blocks of one sequence, heads first; one head stands for all where they keep the same."""

    blocks: Tensor  # int32 [H, T, n_blocks], ascending up to counts, then any valid index
    counts: Tensor  # int32 [H, T]
    start: Tensor  # int64 [T], the position of each tile's first row

    @property
    def used(self) -> Tensor:
        return torch.arange(self.blocks.shape[-1], device=self.blocks.device) < self.counts[..., None]


def _kept(selection: Selection | None, geometry: Geometry, b: int, tiles: slice, device: torch.device) -> _Kept:
    start = geometry.pos[b, tiles].to(device)
    if selection is None:
        counts = geometry.visible[b, tiles].to(device, torch.int32)[None]
        blocks = torch.arange(geometry.n_blocks, dtype=torch.int32, device=device)
        return _Kept(blocks.repeat(1, len(start), 1), counts, start)
    counts = selection.counts[b, :, tiles].to(torch.int32)
    blocks = selection.lists.new_zeros(*counts.shape, geometry.n_blocks)
    width = min(selection.lists.shape[-1], geometry.n_blocks)
    blocks[..., :width] = selection.lists[b, :, tiles, :width]
    every = torch.arange(geometry.n_blocks, dtype=torch.int32, device=device)
    blocks = torch.where(selection.unlisted[b, :, tiles, None], every, blocks)
    kept = _Kept(blocks, counts, start)
    return kept._replace(blocks=blocks.masked_fill(~kept.used, 0))


Mask = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # (batch, head, row, key) -> whether the row sees the key


def _causal(q: Tensor, k: Tensor) -> Mask:
    offset = k.shape[2] - q.shape[2]
    return lambda b, h, row, key: key <= row + offset


def _kept_and(causal: Mask, kept: _Kept, geometry: Geometry) -> Mask:
    table = torch.zeros_like(kept.blocks, dtype=torch.bool)
    head, at, slot = kept.used.nonzero(as_tuple=True)
    table[head, at, kept.blocks[head, at, slot].long()] = True
    return lambda b, h, row, key: causal(b, h, row, key) & table[h, row // geometry.tile, key // geometry.block]


def _block_mask(kept: _Kept, geometry: Geometry, q: Tensor, k: Tensor, mask: Mask) -> flex.BlockMask:
    """Blocks that a tile's first row already sees to their end go as full ones, which kernels do not mask."""
    full = (kept.used & ((kept.blocks + 1) * geometry.block <= kept.start[:, None] + 1)).sum(-1, dtype=torch.int32)
    width = kept.blocks.shape[-1]
    shifted = (torch.arange(width, device=q.device) + full[..., None]) % width  # indices ascend: full ones come first
    rest = kept.blocks.gather(-1, shifted)
    return flex.BlockMask.from_kv_blocks(
        (kept.counts - full)[None], rest[None], full[None], kept.blocks[None],
        BLOCK_SIZE=(geometry.tile, geometry.block), mask_mod=mask, seq_lengths=(q.shape[2], k.shape[2]),
        compute_q_blocks=False,
    )  # fmt: skip


@functools.cache
def _compile(fullgraph: bool) -> Callable[..., Any]:
    kernel: Callable[..., Any] = torch.compile(flex.flex_attention, dynamic=False, fullgraph=fullgraph)
    return kernel


def _with_lse(
    attention: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, mask: flex.BlockMask, scale: float, softcap: float
) -> tuple[Tensor, Tensor]:
    options: dict[str, Any] = {"block_mask": mask, "scale": scale, "enable_gqa": True}
    if softcap:
        options["score_mod"] = lambda score, b, h, row, key: softcap * torch.tanh(score / softcap)
    if hasattr(flex, "AuxRequest"):
        out, aux = attention(q, k, v, **options, return_aux=flex.AuxRequest(lse=True))
        return out, aux.lse
    out, lse = attention(q, k, v, **options, return_lse=True)  # torch before 2.9
    return out, lse


def _on_device(
    q: Tensor, k: Tensor, v: Tensor, mask: flex.BlockMask, scale: float, softcap: float
) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        return _with_lse(_compile(fullgraph=False), q, k, v, mask, scale, softcap)


def _uncompiled(
    q: Tensor, k: Tensor, v: Tensor, mask: flex.BlockMask, scale: float, softcap: float
) -> tuple[Tensor, Tensor]:
    # Left alone, FlexAttention traces even its uncompiled form, again for every shape, and warns that it is slow.
    with torch.no_grad(), torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _with_lse(flex.flex_attention, q, k, v, mask, scale, softcap)
