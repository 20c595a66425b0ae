"""The paper's router: top-k, and more blocks for the tiles whose cut was least decided."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Any

import torch

from ..checks import MOST, exact, is_number
from ..ranking import Decision, Ranked, margins
from ..registry import Setting
from ..triggers.base import TRIGGERS, Trigger
from ..triggers.quantile import Quantile
from .base import RULES, Rule
from .topk import TopK

QUANTILE = Quantile()


@RULES.register("router")
@dataclass(frozen=True)
class Router(TopK):
    """Steps 3-5: top-k, and `rho` times as many blocks for the tiles the trigger picks."""

    q: float = 0.40
    rho: float = 2
    trigger: Trigger = QUANTILE

    @classmethod
    def from_overrides(cls, overrides: dict[str, Any]) -> Rule:
        params = dict(overrides)
        trigger = params.get("trigger")
        if isinstance(trigger, str):
            params["trigger"] = TRIGGERS.make(trigger, overrides)
        elif isinstance(trigger, Trigger):
            params["trigger"] = trigger.with_overrides(overrides)
        return RULES.make(cls.name, params)

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.trigger, dict):  # from JSON
            object.__setattr__(self, "trigger", TRIGGERS.from_dict(self.trigger))
        if not isinstance(self.trigger, Trigger):
            raise TypeError(f"trigger must be a Trigger or one of {', '.join(TRIGGERS.names())}, got {self.trigger!r}")
        if not is_number(self.q) or not 0 <= self.q <= 1:
            raise ValueError(f"q must be in [0, 1], the fraction of tiles to expand, got {self.q!r}")
        if not is_number(self.rho) or not 1 <= self.rho < math.inf:
            raise ValueError(f"rho must be at least 1, the factor of a triggered tile's budget, got {self.rho!r}")

    def parameters(self) -> set[str]:
        return super().parameters() - (set() if self.trigger.takes_share else {"q"})

    def check(self, policy: Setting) -> None:
        if policy.share == "group" and self.trigger.per_head:
            raise ValueError(
                f"trigger {self.trigger.name!r} has a threshold for each query head, and under share='group' the heads "
                "of a KV head decide together: calibrate one threshold a layer, or use share='head'"
            )
        if self.tile_budget - policy.most_forced <= 1:
            warnings.warn(
                f"tile budget {self.tile_budget} can leave one free block beside {policy.most_forced} forced ones: "
                "the margin is then 1 for every tile and decides nothing; use a larger budget",
                stacklevel=5,
            )

    @property
    def expanded_budget(self) -> int:
        """Blocks a triggered tile keeps; rounded down where rho is not whole, so that no tile exceeds rho times k."""
        return min(math.floor(exact(self.rho) * self.tile_budget), MOST)

    @property
    def at_ranks(self) -> bool:
        return type(self) is Router

    def limit(self, n_blocks: int) -> int:
        nobody = self.q == 0 and self.trigger.takes_share  # is top-k, in the shape of its selection too
        return min(self.tile_budget if nobody else self.expanded_budget, n_blocks)

    def decide(self, ranked: Ranked) -> Decision:
        margin = margins(ranked, self.tile_budget)
        eligible = ranked.visible > self.tile_budget
        everyone, own = ranked.all_heads(margin)
        triggered = self.trigger.fire(everyone, eligible, ranked.sequence, self.q)[:, own]
        plain = ranked.visible.clamp(max=self.tile_budget)[:, None]
        expanded = ranked.visible.clamp(max=self.expanded_budget)[:, None]
        return Decision(torch.where(triggered, expanded, plain), margin, triggered)

    def describe(self) -> str:
        return f"{super().describe()}, {self.expanded_budget} for {self.trigger.describe(self.q)}"
