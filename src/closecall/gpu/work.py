"""How much there is to do: blocks that a policy keeps, on average over what cannot be known without the scores."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..policy import Policy
from ..rules import Absolute, Dense, Router, TopK


@dataclass(frozen=True)
class Work:
    """Of one head over a whole prompt, counted in (tile, block) pairs."""

    context: int
    tiles: int
    blocks: int
    visible: int
    kept: float
    eligible: int

    @property
    def selects(self) -> bool:
        """Whether there is anything to choose: a budget that covers every tile needs no scores."""
        return self.eligible > 0


def count(policy: Policy, context: int) -> Work:
    """The router's triggered tiles are taken as spread evenly over the eligible ones."""
    if isinstance(context, bool) or not isinstance(context, int) or context < 1:
        raise ValueError(f"context must be a whole number of tokens, at least 1, got {context!r}")
    rule = policy.rule
    tiles, blocks = -(-context // policy.tile), -(-context // policy.block)
    visible = [-(-min((t + 1) * policy.tile, context) // policy.block) for t in range(tiles)]
    if isinstance(rule, Dense):
        return Work(context, tiles, blocks, sum(visible), float(sum(visible)), 0)
    if not isinstance(rule, TopK):
        raise ValueError(f"the model on paper knows the rules dense, topk and router, not {rule.name!r}")
    eligible = sum(v > rule.tile_budget for v in visible)
    share, wide = 0.0, rule.tile_budget
    if isinstance(rule, Router):
        if isinstance(rule.trigger, Absolute):
            raise ValueError("how many tiles an absolute threshold triggers depends on the scores: use another trigger")
        share = math.ceil(round(rule.q * eligible, 9)) / eligible if eligible else 0.0
        wide = rule.expanded_budget
    kept = sum(v if v <= rule.tile_budget else (1 - share) * rule.tile_budget + share * min(v, wide) for v in visible)
    return Work(context, tiles, blocks, sum(visible), float(kept), eligible)
