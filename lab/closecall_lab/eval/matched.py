"""The budget-matched control: uniform top-k that keeps, on an example, as many blocks as a router did."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from closecall.geometry import plan
from closecall.policy import Policy
from closecall.rules.even import Even
from closecall.rules.router import Router

ASKED = "asked"  # in stored JSON: what the questions keep where it is not what the policy says
TOLERANCE = 0.005  # of the router's effective budget: how far the control's may be off before it is no control


def matched(policy: Policy, effective_budget: float, tokens: int) -> Policy:
    """The control of a router `policy` that kept `effective_budget` blocks a tile of a prompt of `tokens` tokens.

    Early tiles see fewer blocks than the budget, so the mean over all tiles is below what a tile that can choose keeps:
    the level is found from how many blocks each tile of the prompt sees. What the control then keeps is measured too.
    """
    if not isinstance(policy.rule, Router):
        raise ValueError(f"only a router has a budget-matched control, not {policy.name}")
    visible = sorted(plan(1, tokens, tokens, policy.block, policy.tile).visible[0].tolist())
    total = round(effective_budget * len(visible))
    if not 0 < total <= sum(visible):
        raise ValueError(
            f"no policy keeps {effective_budget:g} blocks a tile of {tokens} tokens: its {len(visible)} tiles see "
            f"{sum(visible) / len(visible):g} on average"
        )

    def kept(level: int) -> int:
        """Blocks over all tiles, if each keeps the best `level` it sees."""
        below = bisect_right(visible, level)
        return int(sum(visible[:below])) + level * (len(visible) - below)

    level = max(n for n in range(1, visible[-1] + 1) if kept(n) <= total) if kept(1) <= total else 1
    choosing = sum(v > level for v in visible)
    more = (total - kept(level)) / choosing if choosing else 0.0
    return policy.replace(rule=Even(keep=level + more))


@dataclass(frozen=True)
class Applied:
    """A policy as it is run on one example.

    `asked` are the blocks that each question's tiles keep, evenly: of the matched control, as many as the router kept
    there. Empty: the policy says so itself.
    """

    policy: Policy
    asked: tuple[float, ...] = ()

    def for_question(self, number: int) -> Policy:
        return self.policy.replace(rule=Even(keep=self.asked[number])) if self.asked else self.policy

    def to_json(self) -> str:
        plain = self.policy.to_json()
        return json.dumps({"policy": json.loads(plain), ASKED: self.asked}) if self.asked else plain

    @classmethod
    def from_json(cls, text: str) -> Applied:
        content = json.loads(text)
        if ASKED not in content:
            return cls(Policy.from_json(text))
        return cls(Policy.from_json(json.dumps(content["policy"])), tuple(content[ASKED]))


def applied_control(policy: Policy, effective_budget: float, tokens: int, asked: Sequence[float]) -> Applied:
    """The matched control of a router that kept so much in a prompt, and so much in each question that continued it."""
    return Applied(matched(policy, effective_budget, tokens), tuple(asked))
