"""Triggers: which of a router's eligible tiles get more blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..checks import exact
from ..registry import Component, Registry, must_define


def fixed_point(margin: Tensor) -> Tensor:
    """Margins as int64 in units of 2^-50, NaN as 0. Integer sums do not depend on the order of the heads, on the batch
    or on how heads are spread over ranks, so neither does the choice of tiles."""
    return (margin.double().nan_to_num(nan=0.0) * 2.0**50).round().to(torch.int64)


def share(q: float, totals: Tensor) -> Tensor:
    """ceil(q * totals), exactly, for the decimal the user typed (0.07 * 100 is 7, not 8)."""
    above, below = exact(q).as_integer_ratio()
    count = (above * totals + below - 1) // below
    return count.maximum(totals.clamp(max=1)) if q > 0 else count


def lowest(key: Tensor, eligible: Tensor, group: Tensor, q: float) -> Tensor:
    """Marks, in each group, the ceil(q * eligible) eligible entries of smallest key; ties go to the later entry.

    All arguments are flat. Written with sorts and counts only, so that it needs no host synchronisation on a device.
    """
    n = key.numel()
    group = group.clamp(min=-1) + 1  # entries of no sequence share group 0, where nothing is eligible
    by_key = torch.arange(n - 1, -1, -1, device=key.device)
    by_key = by_key[torch.sort(key[by_key], stable=True).indices]
    by_key = by_key[torch.sort((~eligible[by_key]).to(torch.int8), stable=True).indices]
    by_key = by_key[torch.sort(group[by_key], stable=True).indices]
    n_groups = n + 1
    size = torch.zeros(n_groups, dtype=torch.int64, device=key.device).index_add_(0, group, torch.ones_like(group))
    total = torch.zeros_like(size).index_add_(0, group, eligible.to(torch.int64))
    place = torch.arange(n, device=key.device) - (size.cumsum(0) - size)[group[by_key]]
    chosen = torch.empty(n, dtype=torch.bool, device=key.device)
    chosen[by_key] = place < share(q, total)[group[by_key]]
    return chosen & eligible


TRIGGERS: Registry[Trigger] = Registry("trigger")


@dataclass(frozen=True)
class Trigger(Component):
    """Says which eligible tiles the router expands. A subclass defines `fire` and `describe`."""

    takes_share: ClassVar[bool] = True  # whether the router's q says how many tiles it fires for

    @property
    def per_head(self) -> bool:
        """Whether it was fitted head by head."""
        return False

    def fire(self, margin: Tensor, eligible: Tensor, sequence: Tensor, q: float) -> Tensor:
        """bool `[B, H, T]` from margins `[B, H, T]`, eligibility `[B, T]` and sequence ids `[B, T]`."""
        raise must_define(self, "fire(self, margin, eligible, sequence, q)", "bool [B, H, T], the tiles to expand")

    def for_layer(self, index: int) -> Trigger:
        """The trigger of one layer of a model: itself, unless it was fitted layer by layer."""
        return self

    def made_for(self) -> tuple[int, ...] | None:
        """The layers it was fitted to; None where it suits every layer of every model."""
        return None

    def describe(self, q: float) -> str:
        """Describes which tiles it picks in a phrase, for the policy's one-line description."""
        return f"the tiles of trigger {self.name!r} at q = {q:g}"


@dataclass(frozen=True)
class TileShare(Trigger):
    """Expands ceil(q T) of a sequence's T eligible tiles, for all heads alike: those with the smallest key."""

    def tile_key(self, margin: Tensor, sequence: Tensor) -> Tensor:
        """int64 `[B, T]`: the smallest ones fire."""
        raise must_define(self, "tile_key(self, margin, sequence)", "int64 [B, T], of which the smallest fire")

    def fire(self, margin: Tensor, eligible: Tensor, sequence: Tensor, q: float) -> Tensor:
        key = self.tile_key(margin, sequence)
        chosen = lowest(key.flatten(), eligible.flatten(), sequence.flatten(), q).view_as(eligible)
        return chosen[:, None].expand_as(margin)
