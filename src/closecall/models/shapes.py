"""The dimensions of models that the model on paper knows. Heads and layers are the panel's; the rest is here."""

from __future__ import annotations

from dataclasses import dataclass

from ..registry import unknown
from . import catalogue as panel
from .entry import Entry

CONFIG = "config.json of the hub id"

# hidden size, MLP width
DENSE = {
    "qwen2.5-7b-1m": (3584, 18_944),
    "qwen2.5-14b": (5120, 13_824),
    "mistral-nemo": (5120, 14_336),
    "llama-3.1-8b": (4096, 14_336),
}
# hidden size, weights that a token passes
MIXED = {"qwen3.6-35b": (2048, 3.0e9)}


@dataclass(frozen=True)
class Shape:
    """`weights` counts what one token is multiplied with in all layers; embeddings and the last product are left out.

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


def _shape(entry: Entry) -> Shape:
    mixed = entry.name in MIXED
    if mixed:
        hidden, weights = MIXED[entry.name]
        intermediate = 0
    else:
        hidden, intermediate = DENSE[entry.name]
        projections = hidden * entry.head_dim * (2 * entry.q_heads + 2 * entry.kv_heads)
        weights = float(entry.layers * (projections + 3 * hidden * intermediate))
    own = ("the paper, section Setup: 3B active parameters", CONFIG) if mixed else (CONFIG,)
    return Shape(
        name=entry.name,
        hub_id=entry.hub_id,
        layers=entry.layers,
        full_layers=entry.full_layers,
        hidden=hidden,
        intermediate=intermediate,
        q_heads=entry.q_heads,
        kv_heads=entry.kv_heads,
        head_dim=entry.head_dim,
        weights=weights,
        mixed=mixed,
        sources=own,
    )


SHAPES: dict[str, Shape] = {entry.name: _shape(entry) for entry in panel.PANEL if entry.name in {**DENSE, **MIXED}}


def shape(name: str) -> Shape:
    """By the panel's name, the hub id, or the hub id's last part; case does not matter."""
    wanted = name.lower()
    for found in SHAPES.values():
        if wanted in (found.name, found.hub_id.lower(), found.hub_id.lower().split("/")[-1]):
            return found
    raise unknown("model shape", name, SHAPES)
