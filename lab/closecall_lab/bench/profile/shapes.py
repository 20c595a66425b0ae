"""Shapes of models by name, how much of a layer is measured, and what that needs in memory."""

from __future__ import annotations

from dataclasses import dataclass

from closecall.info import DTYPES
from closecall.models import catalogue
from closecall.models.catalogue import SHAPES
from closecall.models.catalogue import shape as known_shape
from closecall.models.entry import Entry, Shape
from closecall.registry import unknown

from ..base import check_memory
from ..validate.device import Device

# Llama 3 and 3.1 have the same dimensions.
ALIASES = {"llama-3-8b": "llama-3.1-8b", "qwen3.6-35b-a3b": "qwen3.6-35b"}
NAMES = (*SHAPES, *ALIASES)
LESS = "use a shorter context, bf16, or measure less of a layer with --head-groups, --query-heads and --rows"


def shape(name: str) -> Shape:
    """The shape by its catalogue name, its hub id, or an alias."""
    try:
        return known_shape(ALIASES.get(name.lower(), name))
    except ValueError:
        raise unknown("shape", name, NAMES) from None


def entry(found: Shape) -> Entry:
    return catalogue.get(found.name)


@dataclass(frozen=True)
class LayerPart:
    """How much of a layer is measured: the rest is multiplied.

    Policies run on `q_heads` query heads over `kv_heads` key heads, dense baselines on `dense_heads` query heads over
    one key head (all heads where the whole layer is measured), everything outside attention on `rows` rows; no rows
    means that attention alone is measured.
    """

    q_heads: int
    kv_heads: int
    dense_heads: int
    rows: int

    def whole(self, found: Shape, context: int) -> bool:
        return self.kv_heads == found.kv_heads and self.q_heads == found.q_heads and self.rows >= context


def measured(
    model: Shape,
    *,
    groups: int | None,
    query_heads: int | None,
    dense_heads: int | None,
    rows: int | None,
    context: int,
) -> LayerPart:
    """Decides how much of a layer is measured. None means all groups, the whole context, or a whole group of heads."""
    group = model.q_heads // model.kv_heads
    kv_heads = model.kv_heads if groups is None else groups
    if kv_heads > model.kv_heads:
        raise ValueError(f"--head-groups {kv_heads}: {model.name} has {model.kv_heads} key heads; use at most that")
    if query_heads is not None and kv_heads != 1:
        raise ValueError("--query-heads measures a part of one group: use it with --head-groups 1")
    for option, heads in (("--query-heads", query_heads), ("--dense-heads", dense_heads)):
        if heads is not None and heads > group:
            raise ValueError(
                f"{option} {heads}: {group} query heads of {model.name} share a key head; use at most that"
            )
    q_heads = kv_heads * group if query_heads is None else query_heads
    whole = kv_heads == model.kv_heads and query_heads is None and (rows is None or rows >= context)
    if whole and dense_heads is not None:
        raise ValueError("--dense-heads measures a part of a layer: leave it out where the whole layer is measured")
    if dense_heads is None:
        dense_heads = q_heads
    return LayerPart(q_heads, kv_heads, dense_heads, min(rows or context, context))


def layer_weights(model: Shape) -> int:
    """Numbers in one layer of full attention, experts included."""
    attention = model.hidden * model.head_dim * (2 * model.q_heads + 2 * model.kv_heads)
    if not model.mixed:
        return attention + 3 * model.hidden * model.intermediate
    from .layer import mixed_widths

    experts, width, _ = mixed_widths(model)
    return attention + model.hidden * model.head_dim * model.q_heads + experts * 3 * model.hidden * width


def bytes_needed(model: Shape, context: int, dtype: str, part: LayerPart) -> int:
    """About what measuring a layer allocates at its peak: weights, and the largest tensors that live together."""
    size = DTYPES[dtype].itemsize
    if model.mixed:
        from .layer import mixed_widths

        _, width, active = mixed_widths(model)
        wide = 4 * active * (width + model.hidden) + 8 * model.hidden
    else:
        wide = 3 * model.intermediate
    rest = part.rows * (wide + 4 * model.hidden + 2 * model.q_heads * model.head_dim) * size
    # Queries before and after rotation, the output twice, keys and values with the cache's copies of them.
    heads = context * model.head_dim * (4 * part.q_heads + 6 * part.kv_heads) * size
    layers = 0 if not part.rows else 2 if model.full_layers < model.layers else 1
    activations = rest + heads if part.whole(model, context) else max(rest, heads)
    return layers * layer_weights(model) * size + activations


def check_room(found: Shape, context: int, dtype: str, part: LayerPart, device: Device) -> None:
    needed = bytes_needed(found, context, dtype, part)
    check_memory(f"{found.name} at {context} tokens in {dtype}", needed, device, LESS)
