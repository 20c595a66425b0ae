"""A call's geometry as the kernels read it, kept on the device.

Plans are made on the host. Each goes to a device once, so that calls after the first copy nothing and can be captured
in a CUDA graph.
"""

from __future__ import annotations

import dataclasses
import weakref
from dataclasses import dataclass

import torch
from torch import Tensor

from ...geometry import Geometry


@dataclass(frozen=True, eq=False)
class Tables:
    """One plan on one device."""

    plan: Tensor  # int32 [B, T, 5]: row, rows, key, pos of the geometry, and the tile's first block among `blocks`
    blocks: Tensor  # int32 [slots, 3]: batch row, first key and number of keys of every block of every sequence
    geometry: Geometry  # the same geometry with its tensors on the device
    visible: Tensor  # of that geometry


_made: weakref.WeakKeyDictionary[Geometry, dict[torch.device, Tables]] = weakref.WeakKeyDictionary()


def tables(geometry: Geometry, device: torch.device) -> Tables:
    here = _made.setdefault(geometry, {})
    if device not in here:
        here[device] = _build(geometry, device)
    return here[device]


def _send(x: Tensor, device: torch.device) -> Tensor:
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)


def _build(g: Geometry, device: torch.device) -> Tables:
    slot = torch.zeros_like(g.row)
    blocks = []
    used = 0
    for b, tiles, _, keys in g.spans():
        slot[b, tiles] = used
        first = torch.arange(keys.start, keys.stop, g.block)
        blocks.append(torch.stack([torch.full_like(first, b), first, (keys.stop - first).clamp(max=g.block)], -1))
        used += len(first)
    plan = torch.stack([g.row, g.rows, g.key, g.pos, slot], -1).to(torch.int32)
    listed = torch.cat(blocks) if blocks else torch.zeros(0, 3)
    row, rows, key, pos, sequence = (_send(x, device) for x in (g.row, g.rows, g.key, g.pos, g.sequence))
    there = dataclasses.replace(g, row=row, rows=rows, key=key, pos=pos, sequence=sequence)
    return Tables(_send(plan, device), _send(listed.to(torch.int32), device), there, there.visible)
