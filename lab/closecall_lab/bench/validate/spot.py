"""Looks at some cells of an output that was timed: a kernel that is right only on small cases is not fast."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from closecall.selection import Selection

from ...spine.results import Facts
from . import exact
from .check import worst
from .device import Device

CELLS = 50


def cells(heads: int, tiles: int, count: int = CELLS, seed: int = 0) -> list[tuple[int, int]]:
    """(head, tile) pairs drawn without repetition, the last tile of the last head among them."""
    every = heads * tiles
    drawn = [*random.Random(seed).sample(range(every - 1), min(count, every) - 1), every - 1]
    return [divmod(i, tiles) for i in drawn]


def check(q: Tensor, k: Tensor, v: Tensor, kept: Selection | None, out: Tensor, grid: tuple[int, int], scale: float,
          device: Device, what: str) -> Facts:  # fmt: skip
    """Holds cells of `out`, attention of whole sequences over `kept`, against float64; raises where one is wrong.

    `grid` is (block, tile). Every tile is a call of its own: its rows, and the keys up to its last row.
    """
    block, tile = grid
    group = q.shape[1] // k.shape[1]
    tiles = -(-q.shape[2] // tile)
    share = 0.0
    drawn = cells(q.shape[1], tiles)
    for h, t in drawn:
        first, end = t * tile, min((t + 1) * tile, q.shape[2])
        mine, keys, values = q[:, h : h + 1, first:end], *(x[:, h // group : h // group + 1, :end] for x in (k, v))
        there = Selection.from_blocks(
            *_of_cell(kept, h, t, end, block), q_len=end - first, k_len=end, block=block, tile=tile
        )
        right = exact.attend(mine.cpu(), keys.cpu(), values.cpu(), there, scale, 0.0, device.roundoff)
        name = f"{what} at head {h}, tile {t}"
        share = max(share, worst(out[:, h : h + 1, first:end].cpu(), right.out, right.out_error, name).share)
    return {"cells": len(drawn), "used": share}


def _of_cell(kept: Selection | None, h: int, t: int, end: int, block: int) -> tuple[Tensor, Tensor]:
    """kv_idx and counts of one cell, with the sentinel of a sequence that ends with the tile."""
    seen = -(-end // block)
    if kept is None or bool(kept.unlisted[0, h, t]):
        return torch.arange(seen, dtype=torch.int32)[None, None, None], torch.full((1, 1, 1), seen, dtype=torch.int32)
    index = kept.lists[:, h : h + 1, t : t + 1].cpu()
    return index.clamp(max=seen), kept.counts[:, h : h + 1, t : t + 1].cpu()
