"""Budgets that differ by layer and head: what `closecall tune` fits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..checks import check_layers, exact, is_number
from ..ranking import Decision, Ranked, margins_at
from ..registry import Setting
from .base import RULES, Heads, Rule

Budgets = tuple[int, ...]


def _budgets(layer: int, listed: Any) -> Budgets:
    if not isinstance(listed, (list, tuple)) or not listed or not all(_whole(x) for x in listed):
        raise ValueError(
            f"the budgets of layer {layer} must be whole numbers of blocks, one for each query head, got {listed!r}"
        )
    return tuple(listed)


def _whole(value: object) -> bool:
    return is_number(value) and isinstance(value, int) and value >= 1


@RULES.register("per-head")
@dataclass(frozen=True)
class PerHead(Rule):
    """Every tile keeps its head's best blocks, as many as the head's own tile budget says, forced ones included.

    budgets: for each layer, one tile budget for each query head of the whole model (all tensor-parallel ranks).
    layers:  the model's layers they belong to; 0, 1, ... if not given.
    head_dim: the size of the model's heads, to tell other models apart; 0 if it was not noted.

    Attached to a model, each layer takes its own budgets. On tensors, say which layer they come from:
    `policy.for_layer(3)`.
    """

    budgets: tuple[Budgets, ...] = ()
    layers: tuple[int, ...] = ()
    head_dim: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.budgets, (list, tuple)) or not self.budgets:
            raise ValueError(
                f"rule 'per-head' needs budgets, a list for each layer, got {self.budgets!r}: "
                "`closecall tune` finds them and writes a policy file"
            )
        layers = check_layers(self.layers, self.budgets, "lists of budgets")
        budgets = tuple(_budgets(layer, listed) for layer, listed in zip(layers, self.budgets, strict=True))
        heads = {len(listed) for listed in budgets}
        if len(heads) > 1:
            raise ValueError(f"every layer needs as many budgets as the others, got {sorted(heads)} by layer")
        if not is_number(self.head_dim) or not isinstance(self.head_dim, int) or self.head_dim < 0:
            raise ValueError(f"head_dim must be a whole number, or 0 for any, got {self.head_dim!r}")
        object.__setattr__(self, "layers", layers)
        object.__setattr__(self, "budgets", budgets)

    @property
    def tile_budget(self) -> int:
        """The smallest budget of any head: what every tile can count on."""
        return min(min(listed) for listed in self.budgets)

    @property
    def mean_budget(self) -> float:
        """The mean over layers and heads: what uniform top-k would keep for the same cost."""
        listed = [budget for layer in self.budgets for budget in layer]
        return sum(listed) / len(listed)

    def check(self, policy: Setting) -> None:
        if policy.share == "group":
            raise ValueError(
                "rule 'per-head' has a budget for each query head, and under share='group' the heads of a KV head "
                "share one: use share='head'"
            )

    def for_layer(self, index: int) -> PerHead:
        if index not in self.layers:
            raise ValueError(
                f"this policy was tuned for layers {', '.join(map(str, self.layers))}, and this is layer {index}: "
                "run `closecall tune` on this model"
            )
        return PerHead((self.budgets[self.layers.index(index)],), (index,), self.head_dim)

    def times(self, factor: float, least: int) -> PerHead:
        scaled = (tuple(max(round(b * exact(factor)), least) for b in listed) for listed in self.budgets)
        return PerHead(tuple(scaled), self.layers, self.head_dim)

    def made_for(self) -> tuple[int, ...]:
        return self.layers

    def heads(self) -> Heads:
        """The query heads of a layer of its model."""
        return Heads(len(self.budgets[0]), self.head_dim)

    def limit(self, n_blocks: int) -> int:
        return min(max(max(listed) for listed in self.budgets), n_blocks)

    def decide(self, ranked: Ranked) -> Decision:
        if len(self.layers) > 1:
            raise ValueError(
                f"this policy was tuned for {len(self.layers)} layers: say of which one these tensors are, with "
                "policy.for_layer(layer)"
            )
        budget = self._of_these_heads(ranked)
        counts = ranked.visible[:, None].minimum(budget[:, None])
        margin = margins_at(ranked, counts)
        return Decision(counts, margin, torch.zeros_like(margin, dtype=torch.bool))

    def _of_these_heads(self, ranked: Ranked) -> Tensor:
        """int64 `[H]`: the budgets of this process's heads, which may be a part of the layer's."""
        device = ranked.visible.device
        local = torch.empty(1, ranked.scores.shape[1], 1, device=device)
        everyone, own = ranked.all_heads(local)
        there = Heads(everyone.shape[1], ranked.source.q.shape[-1] if ranked.source else 0)
        if self.heads().differs(there):
            raise ValueError(
                f"this policy was tuned for {self.heads()}, and layer {self.layers[0]} has {there}: run "
                "`closecall tune` on this model"
            )
        return torch.tensor(self.budgets[0], dtype=torch.int64, device=device)[own]

    def describe(self) -> str:
        least, most = self.tile_budget, max(max(listed) for listed in self.budgets)
        layers = f"{len(self.layers)} layers" if len(self.layers) > 1 else f"layer {self.layers[0]}"
        return f"keep {self.mean_budget:.4g} blocks a tile on average, {least} to {most} by head, tuned for {layers}"
