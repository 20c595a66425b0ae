"""How much of the residual stream a layer's attention is: what an error of its output is worth.

A tenth off in a layer whose attention is two thirds of the stream harms all that comes after; in one that adds a
fiftieth it is lost in the sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from closecall.hf.layers import Layer

# By layer: the squared size of what attention adds over that of the stream after it, the mean over rows.
Shares = dict[int, float]


def weights(shares: Shares, *, own: bool) -> Shares:
    """By layer: what an error of attention's output does, to be multiplied with its share of that output.

    An error makes the row's own stream wrong, by attention's share of the stream. If the row itself is asked for a
    prediction (`own`), that counts in full. And every later layer's attention reads the row: that makes other rows
    wrong, a question's too, by that attention's share of their stream.
    """
    return {
        layer: share * ((1.0 if own else 0.0) + sum(later for at, later in shares.items() if at > layer))
        for layer, share in shares.items()
    }


@contextmanager
def watched(model: Any, layers: Sequence[Layer]) -> Iterator[Shares]:
    """Measures the shares of a forward pass: read them when it is over."""
    found: Shares = {}
    hooks: list[Any] = []
    try:
        for layer in (one for one in layers if one.kind == "full"):
            hooks += _hooks(model, layer, found)
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def _hooks(model: Any, layer: Layer, found: Shares) -> list[Any]:
    before: list[Tensor] = []  # the stream that enters the block, while the block runs
    block = model.get_submodule(layer.name.rpartition(".")[0])

    def enter(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        before[:] = [args[0] if args else kwargs["hidden_states"]]

    def add(_: Any, __: Any, out: Any) -> None:
        x = before.pop()
        found[layer.index] = _share(x, x + (out[0] if isinstance(out, tuple) else out))

    def arrive(_: Any, args: tuple[Any, ...]) -> None:
        found[layer.index] = _share(before.pop(), args[0])

    entered = block.register_forward_pre_hook(enter, with_kwargs=True)
    # Gemma normalises what attention adds: there the stream is seen where the MLP takes it.
    later = getattr(block, "pre_feedforward_layernorm", None)
    seen = layer.module.register_forward_hook(add) if later is None else later.register_forward_pre_hook(arrive)
    return [entered, seen]


def _share(before: Tensor, after: Tensor) -> float:
    added, size = (x.float().square().sum(-1) for x in (after - before, after))
    return float((added / size.clamp(min=1e-30)).mean())
