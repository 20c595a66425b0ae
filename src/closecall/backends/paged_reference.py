"""The specification of the paged operator: gather the pages into one buffer, then call the contiguous reference."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from ..geometry import Geometry
from ..pages import Plan
from ..policy import Policy
from ..ranking import Ranked
from ..selection import Selection
from . import reference


def gathered(pages: Tensor, plan: Plan) -> Tensor:
    """`[1, Hkv, S * W * page, D]` from pages `[P, Hkv, page, D]`: every sequence in its own run, as the plan counts."""
    for geometry in (plan.chosen, plan.dense):
        for _, _, _, keys, _ in geometry.tiles() if geometry is not None else ():
            used = plan.table.flatten()[keys.start // plan.page : -(-keys.stop // plan.page)]
            if bool(((used < 0) | (used >= len(pages))).any()):
                raise ValueError(f"the block table names pages {used.tolist()}, but there are {len(pages)}")
    # Entries that no row looks at may hold anything.
    listed = plan.table.flatten().long().clamp(0, len(pages) - 1).to(pages.device)
    return pages[listed].transpose(0, 1).flatten(1, 2)[None]


def has_kernel(policy: Policy, dim: int) -> bool:
    """It keeps no summaries, and ranks for every backend that cannot."""
    return False


def rank(
    q: Tensor, k_pages: Tensor, policy: Policy, geometry: Geometry, plan: Plan, scale: float, told: Tensor
) -> Ranked:
    """As `reference.rank`, for a rule that is told of the sequences `told`.

    It cuts tiles from a sequence's first row, so a short first tile is given to it as a sequence of its own.
    """
    new = torch.ones_like(geometry.sequence, dtype=torch.bool)
    same = geometry.sequence[:, 1:] == geometry.sequence[:, :-1]
    new[:, 1:] = ~same | (geometry.rows[:, :-1] != geometry.tile)
    cut = dataclasses.replace(geometry, sequence=new.cumsum(1) - 1)
    every_row = policy.every_row(geometry, told)
    return reference.rank(q, gathered(k_pages, plan), policy, cut, scale, every_row=every_row)


def attend(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, selection: Selection | None, geometry: Geometry, plan: Plan,
    scale: float, softcap: float, out: Tensor, lse: Tensor,
) -> None:  # fmt: skip
    """Writes the geometry's rows of `out [1, H, M, Dv]` and `lse [1, H, M]`."""
    k, v = gathered(k_pages, plan), gathered(v_pages, plan)
    some, some_lse = reference.attend(q, k, v, selection, geometry, scale, softcap)
    for b, _, rows, _, _ in geometry.tiles():
        out[b, :, rows], lse[b, :, rows] = some[b, :, rows], some_lse[b, :, rows]


def repeated(*step: Any) -> None:
    """No function for the next layers: nothing would be saved by one."""
