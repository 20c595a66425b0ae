"""`closecall.attach`: an existing Hugging Face model prefills sparsely, and nothing else about it changes.

How: the modules of full-attention layers, and the models that build masks for them, get copies of their configs that
name another attention implementation, `closecall_<the one before>`. transformers then calls our function and our mask
function for those layers. `detach` puts the original config objects back; no object of the model's is modified, and
what an attached layer does lives in its handle.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from numbers import Integral
from typing import Any, Literal

from ..checks import is_whole
from ..policy import Policy, as_policy
from ..rules.base import Heads
from ..triggers.calibrated import layer_numbers
from .forward import PREFIX, STATE
from .handle import Handle
from .layers import Layer, find_layers

__all__ = ["Handle", "attach"]

OLDEST = (5, 22)  # as in pyproject.toml
# Below this multiple of the tile budget, the blocks that a policy leaves out do not pay for choosing them: see
# docs/benchmarks.md for the measurement.
BREAK_EVEN = 2


def _check_model(model: Any) -> None:
    try:
        import transformers
    except ImportError as error:
        raise ImportError("attach needs transformers: pip install 'closecall[hf]'") from error
    release = re.match(r"(\d+)\.(\d+)", transformers.__version__)
    if release is None or tuple(map(int, release.groups())) < OLDEST:
        raise ValueError(
            f"attach needs transformers {OLDEST[0]}.{OLDEST[1]} or newer, not {transformers.__version__}: upgrade it"
        )
    if not isinstance(model, transformers.PreTrainedModel):
        raise TypeError(f"model must be a transformers PreTrainedModel, got {type(model).__name__}")
    if getattr(model.config, "is_encoder_decoder", False):
        raise ValueError(f"{type(model).__name__} is an encoder-decoder model: attach works on causal decoders")
    if (getattr(model.config, "_attn_implementation", None) or "").startswith(PREFIX) or any(
        STATE in module.__dict__ for module in model.modules()
    ):
        raise ValueError(
            f"this {type(model).__name__} is attached already: call detach() on its handle first (a copy of an "
            "attached model has none: copy it before you attach it)"
        )


def _choose_layers(layers: list[Layer], wanted: Sequence[int] | None, model: Any) -> list[Layer]:
    full = [layer for layer in layers if layer.kind == "full"]
    if not full:
        kinds = Counter(layer.kind for layer in layers)
        others = ", ".join(f"{n} {kind}" for kind, n in kinds.items()) or "none that closecall knows"
        raise ValueError(f"{type(model).__name__} has no full causal attention layer to make sparse; it has {others}")
    shared = {id(layer.module.config) for layer in full}
    for layer in layers:
        if layer.kind in ("other", "cross", "bidirectional") and id(layer.module.config) in shared:
            # It would be handed the masks made for its neighbours, and cannot read them.
            raise ValueError(f"{type(model).__name__}: {layer.name} cannot run beside attached layers: {layer.note}")
    if wanted is None:
        return full
    known = {layer.index: layer for layer in full}
    given: Any = wanted
    if not isinstance(given, Iterable) or isinstance(given, str):
        raise TypeError(f"layers must be a list of layer numbers, such as [0, 1], got {given!r}")
    numbers: list[Any] = list(given)
    if not numbers:
        raise ValueError(f"layers is empty: full-attention layers are {sorted(known)}")
    for index in numbers:
        if isinstance(index, bool) or not isinstance(index, Integral):  # NumPy's whole numbers will do
            raise TypeError(f"layers must hold whole numbers, got {index!r}: full-attention layers are {sorted(known)}")
        if index not in known:
            kind = next((layer.kind for layer in layers if layer.index == index), None)
            what = f"is {kind}" if kind else "does not exist"
            raise ValueError(f"layers: layer {index} {what}; full-attention layers are {sorted(known)}")
    return [known[index] for index in dict.fromkeys(numbers)]


def _check_budget(policy: Policy) -> None:
    """Now rather than in the middle of a long prefill, when a chunk happens to start off the block grid."""
    tile_budget = policy.rule.tile_budget
    if tile_budget is not None and tile_budget <= policy.most_forced:
        raise policy.no_room(policy.most_forced, f"blocks that a tile of {policy.tile} rows can be forced to keep")


def _check_layers(policy: Policy, layers: tuple[int, ...], model: str) -> None:
    """A policy fitted to a model's full-attention layers belongs to models that have the same ones."""
    made_for = policy.rule.made_for()
    if made_for is not None and made_for != layers:
        raise ValueError(
            f"the policy was fitted to {layer_numbers(made_for)}, and the full attention of {model} is in "
            f"{layer_numbers(layers)}: run `closecall calibrate` or `closecall tune` on this model"
        )


def _check_heads(policy: Policy, layers: list[Layer], model: str) -> None:
    """Now rather than in the first layer of a long prefill. (A layer's own config says how many heads it has.)"""
    fitted = policy.rule.heads()
    number = next((getattr(layer.module.config, "num_attention_heads", None) for layer in layers), None)
    if fitted is None or number is None:
        return
    there = Heads(number, getattr(layers[0].module, "head_dim", None) or 0)
    if fitted.differs(there):
        raise ValueError(
            f"the policy was fitted to layers of {fitted}, and those of {model} have {there}: run `closecall tune` on "
            "this model"
        )


def attach(
    model: Any,
    policy: Policy | str | os.PathLike[str],
    *,
    layers: Sequence[int] | None = None,
    min_context: int | None = None,
    decode: Literal["dense", "sparse"] = "dense",
) -> Handle:
    """Makes a Hugging Face causal language model prefill by `policy`. Returns a handle, also a context manager.

    policy:      a `Policy`, a preset's name, text like `auto:budget=8`, or the path of a saved policy (`policy.json`).
    layers:      indices of the full-attention layers to attach to; None means all of them.
    min_context: a layer with fewer keys than this runs dense, on our kernel. None means 0, and for `auto` the context
                 where it breaks even.
    decode:      what decoding steps do, that is calls of fewer rows than a tile: `"dense"`, or `"sparse"` to select
                 blocks for them too.
    """
    if decode not in ("dense", "sparse"):
        raise ValueError(f"decode must be 'dense' or 'sparse', got {decode!r}")
    if min_context is not None and (not is_whole(min_context) or min_context < 0):
        raise ValueError(f"min_context must be a whole number of keys, got {min_context!r}")
    chosen_policy = as_policy(policy)
    _check_model(model)
    there = find_layers(model)
    chosen = _choose_layers(there, layers, model)
    if chosen_policy.name == "auto" and min_context is None:
        min_context = BREAK_EVEN * (chosen_policy.rule.tile_budget or 0) * chosen_policy.block
    _check_budget(chosen_policy)
    _check_layers(chosen_policy, tuple(sorted(x.index for x in there if x.kind == "full")), type(model).__name__)
    _check_heads(chosen_policy, chosen, type(model).__name__)
    handle = Handle(model, chosen_policy, there, chosen, min_context or 0, decode)
    try:
        handle.attach()
    except BaseException:
        handle.detach()
        raise
    return handle
