"""What we know of a model: its shape, what is special about it, where to get it, and the policy recommended.

A fact is listed under `unverified` when we could not check it against a published configuration, model card, or
transformers' own source.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

from ..policy import Policy, policy
from ..registry import unknown
from .source import Source

# Where these come from: docs/results.md.
EVIDENCE = (
    "on SmolLM2 and our probes auto answered most at equal budget, and no router did better than the same blocks "
    "spread evenly over all tiles"
)
KINDS = ("full", "sliding", "linear", "softcap", "sinks")
Options = tuple[tuple[str, Any], ...]  # keyword arguments, hashable

PAPER = "the paper, section Setup (Models)"
MODELING = "transformers 5.22, modeling source: QK-Norm, layer kinds"


CONFIG = "config.json of the hub id"

# What the paper recommends (its section "Quality at 32K context"): Quest's K-max without QK-Norm, the K-mean with it.
PAPER_WITHOUT_QK_NORM = "router-on-quest"
PAPER_WITH_QK_NORM = "router"

LEAST_BUDGET, MOST_BUDGET = 4, 33  # what we measured at 4K, and the paper's at every context


def budget_for(context: int) -> int:
    """The budget to begin with for prompts of so many tokens.

    A tile then keeps an eighth of the blocks up to 33K tokens, the share that our results are about, and beyond that
    the paper's 66 blocks.

    >>> [budget_for(n) for n in (4096, 8192, 16384, 32768, 131072)]
    [4, 8, 16, 32, 33]
    """
    return min(max(context // 1024, LEAST_BUDGET), MOST_BUDGET)


@dataclass(frozen=True)
class Shape:
    """The dimensions that a layer's cost follows from.

    `weights` counts what one token is multiplied with in all layers; embeddings and the last product are left out.
    `mixed` marks models of linear attention and experts, where nearly all time outside softmax attention is spent in
    code whose cost does not follow from these dimensions.
    """

    name: str
    hub_id: str
    layers: int
    full_layers: int
    hidden: int
    intermediate: int
    q_heads: int
    kv_heads: int
    head_dim: int
    weights: float
    mixed: bool
    sources: tuple[str, ...]


@dataclass(frozen=True)
class Entry:
    """One model. Heads and head dim are those of its full-attention layers, the ones that go sparse.

    `hidden` and `intermediate` are its width and its MLP's, where we know them; `active_weights` is given instead of
    the latter for a mixture of experts. `measured` says what we measured on this model that bears on its policy.
    """

    name: str
    hub_id: str
    model_type: str
    layers: int
    full_layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    qk_norm: bool
    trained_context: int
    hidden: int | None = None
    intermediate: int | None = None
    active_weights: float | None = None
    kinds: tuple[str, ...] = ("full",)
    window: int | None = None
    in_paper: bool = False
    tokenizer_options: Options = ()
    template_options: Options = ()
    choice_prefill: str = ""
    measured: str = ""
    quirks: tuple[str, ...] = ()
    source: Source | None = None
    sources: tuple[str, ...] = ()
    unverified: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for kind in self.kinds:
            if kind not in KINDS:
                raise unknown("attention kind", kind, KINDS)
        if self.q_heads % self.kv_heads:
            raise ValueError(f"{self.name}: {self.q_heads} query heads do not share {self.kv_heads} kv heads evenly")
        if not 0 < self.full_layers <= self.layers:
            raise ValueError(f"{self.name}: {self.full_layers} of {self.layers} layers cannot be full attention")

    @property
    def shape(self) -> Shape | None:
        """Its dimensions; None where we do not know them, or where windowed layers make up most of the cost."""
        if self.hidden is None or "sliding" in self.kinds:
            return None
        sources: tuple[str, ...] = (CONFIG,)
        if self.active_weights is not None:
            weights, sources = self.active_weights, (f"{PAPER}: active parameters", CONFIG)
        elif self.intermediate is not None:
            projections = self.hidden * self.head_dim * (2 * self.q_heads + 2 * self.kv_heads)
            weights = float(self.layers * (projections + 3 * self.hidden * self.intermediate))
        else:
            return None
        return Shape(
            name=self.name,
            hub_id=self.hub_id,
            layers=self.layers,
            full_layers=self.full_layers,
            hidden=self.hidden,
            intermediate=self.intermediate or 0,
            q_heads=self.q_heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            weights=weights,
            mixed=self.active_weights is not None,
            sources=sources,
        )

    @property
    def recommended(self) -> str:
        """The policy to begin with for prompts as long as the model was trained on, as one types it."""
        return f"auto:budget={budget_for(self.trained_context)}"

    @property
    def evidence(self) -> str:
        """Why that policy, and how far it was measured."""
        own = f"measured on this model: {self.measured}" if self.measured else "not measured on this model"
        return f"{own}; {EVIDENCE}"

    @property
    def paper_recommends(self) -> str:
        preset = PAPER_WITH_QK_NORM if self.qk_norm else PAPER_WITHOUT_QK_NORM
        how = "measured there on this model" if self.in_paper else "inferred from its rule"
        return f"{preset} ({'with' if self.qk_norm else 'without'} QK-Norm; {how})"

    def policy(self, context: int | None = None) -> Policy:
        """The recommended policy for prompts of `context` tokens; of the trained context without it."""
        return policy("auto", budget=budget_for(self.trained_context if context is None else context))

    def to_dict(self) -> dict[str, Any]:
        options = ("tokenizer_options", "template_options")
        return (
            dataclasses.asdict(self)
            | {field: dict(getattr(self, field)) for field in options}
            | {
                "recommended": self.recommended,
                "evidence": self.evidence,
                "paper_recommends": self.paper_recommends,
                "policy": json.loads(self.policy().to_json()),
            }
        )
