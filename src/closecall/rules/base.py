"""Rules: from a tile's ranked blocks to how many it keeps.

Every rule keeps the forced blocks and a prefix of the ranking, so a rule only has to say how long the prefix is.
That is why any rule runs on any scorer and any backend: backends rank, rules count, kernels read the kept blocks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..geometry import Geometry
from ..registry import Component, Registry, Setting
from ..triggers.base import Trigger

RULES: Registry[Rule] = Registry("rule")


# From this process's margins [B, H, T] (or how much a pooled rule wants each block, [B, H, T, W]) to those of all heads
# of the layer, and which of them are its own: where heads are spread over tensor-parallel ranks, rules see them all.
AllHeads = Callable[[Tensor], tuple[Tensor, slice]]


def alone(margin: Tensor) -> tuple[Tensor, slice]:
    """One process has all heads."""
    return margin, slice(None)


@dataclass(frozen=True, eq=False)
class Source:
    """What was ranked, for rules that judge rows and not only tile scores."""

    q: Tensor
    k: Tensor
    geometry: Geometry
    scale: float
    sinks: int


@dataclass(frozen=True, eq=False)
class Ranked:
    """The visible, unforced blocks of every tile, best first; ties go to the lower block index."""

    order: Tensor  # int32 [B, H, T, W]: block indices, the sentinel past the end
    scores: Tensor  # float32 [B, H, T, W]: their scores, -inf past the end; a NaN score counts as -inf
    visible: Tensor  # int64 [B, T]: number of visible blocks
    forced: Tensor  # int64 [B, T]: number of forced blocks
    sequence: Tensor  # int64 [B, T]: the tile's sequence
    all_heads: AllHeads = alone
    source: Source | None = None  # always there when `select` asks a rule


@dataclass(frozen=True, eq=False)
class Decision:
    """What a rule made of a ranking. `counts` includes the forced blocks. All `[B, H, T]`."""

    counts: Tensor
    margin: Tensor
    triggered: Tensor


def margins(ranked: Ranked, tile_budget: int) -> Tensor:
    """Eq. 4 per (sequence, head, tile): how decisive the cut at `tile_budget` was, NaN where nothing was cut.

    `(s[c-1] - s[c]) / (s[0] - s[c])` over the unforced scores, c = tile_budget - forced. Zero, the least decided value,
    where the denominator is zero or infinities leave the quotient undefined.
    """
    width = ranked.scores.shape[-1]
    cut = (tile_budget - ranked.forced).clamp(1, width - 1) if width > 1 else torch.ones_like(ranked.forced)
    if width == 1:  # one slot: no tile can have more visible blocks than the budget
        return torch.full(ranked.scores.shape[:-1], torch.nan, device=ranked.scores.device)
    at = cut[:, None, :, None].expand(*ranked.scores.shape[:-1], 1)
    first_out = ranked.scores.gather(-1, at).squeeze(-1)
    last_in = ranked.scores.gather(-1, at - 1).squeeze(-1)
    margin = ((last_in - first_out) / (ranked.scores[..., 0] - first_out)).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    eligible = (ranked.visible > tile_budget)[:, None]
    return margin.masked_fill(~eligible, torch.nan)


def margins_at(ranked: Ranked, counts: Tensor) -> Tensor:
    """Eq. 4 at the cut each cell came to, NaN where nothing was cut; 1 where it kept no ranked block at all."""
    free = counts - ranked.forced[:, None]
    at = free.clamp(0, ranked.scores.shape[-1] - 1)[..., None]
    first_out, last_in = (ranked.scores.gather(-1, i).squeeze(-1) for i in (at, (at - 1).clamp(min=0)))
    margin = ((last_in - first_out) / (ranked.scores[..., 0] - first_out)).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    margin = margin.masked_fill(free == 0, 1.0)
    return margin.masked_fill(counts >= ranked.visible[:, None], torch.nan)


@dataclass(frozen=True)
class Rule(Component):
    """Turns rankings into kept counts."""

    needs_scores = True

    @classmethod
    def from_overrides(cls, overrides: dict[str, Any]) -> Rule:
        return RULES.make(cls.name, overrides)

    def check(self, policy: Setting) -> None:
        """Called when a policy is made with this rule; warns or raises if the two cannot work together."""

    def limit(self, n_blocks: int) -> int:
        """The most blocks any tile may keep, forced ones included: how far backends must rank."""
        raise NotImplementedError

    def every_row(self, sequence: Tensor) -> Tensor | None:
        """bool `[B, T]`: tiles whose rows are scored one by one, however many the policy pools; None means none."""
        return None

    def limits(self, sequence: Tensor, n_blocks: int) -> Tensor | None:
        """`[B, T]`: how far each tile must be ranked, where that differs; a backend may rank further, up to `limit`."""
        return None

    def decide(self, ranked: Ranked) -> Decision:
        raise NotImplementedError

    def _parts(self) -> dict[str, Rule | Trigger]:
        """The triggers and rules it is made of, by field."""
        fields = ((f.name, getattr(self, f.name)) for f in dataclasses.fields(self))
        return {name: part for name, part in fields if isinstance(part, (Rule, Trigger))}

    def for_layer(self, index: int) -> Rule:
        """The rule of one layer of a model: itself, unless a part of it was fitted layer by layer."""
        parts = self._parts()
        there = {name: part.for_layer(index) for name, part in parts.items()}
        return dataclasses.replace(self, **there) if any(there[name] is not parts[name] for name in parts) else self

    def made_for(self) -> tuple[int, ...] | None:
        """The layers that a part of it was fitted to; None where it suits every layer of every model."""
        return next((layers for part in self._parts().values() if (layers := part.made_for()) is not None), None)

    def describe(self) -> str:
        raise NotImplementedError
