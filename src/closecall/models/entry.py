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

KINDS = ("full", "sliding", "linear", "softcap", "sinks")
Options = tuple[tuple[str, Any], ...]  # keyword arguments, hashable

# The paper's reversal (its section "Quality at 32K context"): Quest's K-max wins without QK-Norm, the K-mean with it.
WITHOUT_QK_NORM = "router-on-quest"
WITH_QK_NORM = "router"

PAPER = "the paper, section Setup (Models)"
MODELING = "transformers 5.22, modeling source: QK-Norm, layer kinds"


@dataclass(frozen=True)
class Entry:
    """One model. Heads and head dim are those of its full-attention layers, the ones that go sparse."""

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
    kinds: tuple[str, ...] = ("full",)
    window: int | None = None
    in_paper: bool = False
    tokenizer_options: Options = ()
    template_options: Options = ()
    choice_prefill: str = ""
    overrides: Options = ()
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
    def preset(self) -> str:
        return WITH_QK_NORM if self.qk_norm else WITHOUT_QK_NORM

    @property
    def evidence(self) -> str:
        """How we come to the recommendation."""
        if self.in_paper:
            return "measured in the paper on this model"
        norm = "has QK-Norm" if self.qk_norm else "has no QK-Norm"
        return f"inferred: it {norm}, and the paper's reversal goes by that; not measured on this model"

    def policy(self) -> Policy:
        """The recommended policy."""
        return policy(self.preset, **dict(self.overrides))

    def to_dict(self) -> dict[str, Any]:
        options = ("tokenizer_options", "template_options", "overrides")
        return (
            dataclasses.asdict(self)
            | {field: dict(getattr(self, field)) for field in options}
            | {"recommended": self.preset, "evidence": self.evidence, "policy": json.loads(self.policy().to_json())}
        )
