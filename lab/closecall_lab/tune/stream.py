"""How much of the residual stream a layer's attention is: what an error of its output is worth.

A tenth off in a layer whose attention is two thirds of the stream harms all that comes after; in one that adds a
fiftieth it is lost in the sum. What is wrong in the stream stays there: every later layer reads it too, as a share of a
stream that has grown since.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor

from closecall.hf.layers import Layer


class Stream(NamedTuple):
    """The stream behind a layer's attention: how much of it attention added (the mean over rows of squared sizes), and
    its own squared size (the median over rows: a first token may be a thousand times as large as the others)."""

    share: float
    size: float


Streams = dict[int, Stream]  # by layer


def weights(streams: Streams) -> dict[int, float]:
    """By layer: an error of attention's output as the later layers see it, its own included, each as a share of its
    stream. To be multiplied with the error's share of attention's output."""
    return {
        layer: one.share * sum(one.size / later.size for at, later in streams.items() if at >= layer)
        for layer, one in streams.items()
    }


@contextmanager
def watched(model: Any, layers: Sequence[Layer]) -> Iterator[Streams]:
    """Measures the streams of a forward pass: read them when it is over."""
    found: Streams = {}
    hooks: list[Any] = []
    try:
        for layer in (one for one in layers if one.kind == "full"):
            hooks += _hooks(model, layer, found)
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def _hooks(model: Any, layer: Layer, found: Streams) -> list[Any]:
    before: list[Tensor] = []  # the stream that enters the block, while the block runs
    block = model.get_submodule(layer.name.rpartition(".")[0])

    def enter(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        before[:] = [args[0] if args else kwargs["hidden_states"]]

    def add(_: Any, __: Any, out: Any) -> None:
        x = before.pop()
        found[layer.index] = _stream(x, x + (out[0] if isinstance(out, tuple) else out))

    def arrive(_: Any, args: tuple[Any, ...]) -> None:
        found[layer.index] = _stream(before.pop(), args[0])

    entered = block.register_forward_pre_hook(enter, with_kwargs=True)
    # Gemma normalises what attention adds: there the stream is seen where the MLP takes it.
    later = getattr(block, "pre_feedforward_layernorm", None)
    seen = layer.module.register_forward_hook(add) if later is None else later.register_forward_pre_hook(arrive)
    return [entered, seen]


def _stream(before: Tensor, after: Tensor) -> Stream:
    added, size = ((x.float().square().sum(-1)) for x in (after - before, after))
    return Stream(float((added / size.clamp(min=1e-30)).mean()), float(size.median()))
