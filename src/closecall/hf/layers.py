"""Finds a model's attention layers and says what is to be done with each."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

# Modules that mix tokens without softmax attention, by what their class names contain.
_LINEAR = ("DeltaNet", "LightningAttention", "Mamba", "LinearAttention", "ShortConv", "Rwkv", "RecurrentBlock")
# What the attention of some models depends on besides queries, keys, values and a causal mask.
_FOREIGN = ("position_bias", "indices", "block_indices", "prepare_dynamic_mask")
_QK_NORMS = ("q_norm", "k_norm", "q_layernorm", "k_layernorm", "query_layernorm", "key_layernorm", "qk_norm")


@dataclass(frozen=True)
class Layer:
    """One attention layer: where it is, what it is, and what is done with it."""

    index: int
    name: str
    kind: str  # full, sliding, chunked, linear, bidirectional, other
    module: Any
    qk_norm: bool
    note: str = ""


def _layer_type(module: Any) -> str | None:
    types = getattr(getattr(module, "config", None), "layer_types", None)
    index = getattr(module, "layer_idx", None)
    return types[index] if types and isinstance(index, int) and index < len(types) else None


def _window(module: Any) -> int | None:
    """The module's window; of models without layer types it is the whole model's (Mistral)."""
    own = getattr(module, "sliding_window", None)
    return own or getattr(getattr(module, "config", None), "sliding_window", None) or None


def _foreign(module: Any) -> str | None:
    """Why a module's forward cannot be given another attention function."""
    code = inspect.unwrap(type(module).forward).__code__
    if "ALL_ATTENTION_FUNCTIONS" not in code.co_names:
        return "its code does not let the attention function be replaced"
    names = {name for const in code.co_consts if isinstance(const, tuple) for name in const} | set(code.co_names)
    given = [name for name in _FOREIGN if name in names]
    return f"its attention needs {given[0]}, which closecall does not know" if given else None


def _kind(module: Any) -> tuple[str, str]:
    """(kind, why it cannot go sparse)."""
    declared = _layer_type(module) or ""
    window = _window(module)
    if "sliding" in declared or getattr(module, "is_sliding", False) is True or (window and not declared):
        return "sliding", f"keeps its window of {window}" if window else "keeps its window"
    if "chunked" in declared:
        return "chunked", "keeps its chunks"
    if getattr(module, "is_cross_attention", False):
        return "cross", "cross-attention is not causal"
    if getattr(module, "is_causal", True) is False:
        return "bidirectional", "not causal"
    problem = _foreign(module)
    return ("other", problem) if problem else ("full", "")


def _is_softmax_attention(module: Any) -> bool:
    return (
        type(module).__name__.endswith("Attention")
        and hasattr(module, "config")
        and not any(word in type(module).__name__ for word in _LINEAR)
        and hasattr(type(module), "forward")
        and not any(type(child).__name__.endswith("SelfAttention") for child in module.children())
    )


def find_layers(model: Any) -> list[Layer]:
    """Every attention layer of the model in order, token mixers of other kinds among them."""
    layers = []
    for name, module in model.named_modules():
        if _is_softmax_attention(module):
            kind, note = _kind(module)
        elif any(word in type(module).__name__ for word in _LINEAR) and hasattr(module, "layer_idx"):
            kind, note = "linear", "no softmax attention"
        else:
            continue
        index = getattr(module, "layer_idx", None)
        norm = any(getattr(module, attribute, None) is not None for attribute in _QK_NORMS)
        layers.append(Layer(index if isinstance(index, int) else -1, name, kind, module, norm, note))
    return layers
