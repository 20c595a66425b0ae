"""Rejected by the paper: every (head, tile) cell on its own."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .base import TRIGGERS, Trigger, fixed_point, lowest


@TRIGGERS.register("per-cell")
@dataclass(frozen=True)
class PerCell(Trigger):
    """Rejected by the paper: the smallest margins among all (head, tile) cells; ties go to the later cell."""

    def fire(self, margin: Tensor, eligible: Tensor, sequence: Tensor, q: float) -> Tensor:
        cells = [x[:, None].expand_as(margin).flatten() for x in (eligible, sequence)]
        return lowest(fixed_point(margin).flatten(), cells[0], cells[1], q).view_as(margin)

    def describe(self, q: float) -> str:
        return f"the least decided {q:.0%} of (head, tile) cells"
