"""The trigger `calibrated`: thresholds found once, layer by layer, so that each tile decides by itself.

The quantile compares a tile with all others of its sequence, so what a tile gets depends on how much of the sequence
the call holds. A threshold needs no neighbours; one for all layers fails (the paper's Appendix C), one for each layer
need not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..checks import check_layers, is_number
from .base import TRIGGERS, Trigger, fixed_point, share

Threshold = float | tuple[float, ...]


def mean_margin(margin: Tensor) -> Tensor:
    """float64 `[B, T]`: margins `[B, H, T]` averaged over heads, in whatever order these come, NaN as 0."""
    return fixed_point(margin).sum(1).double() / (margin.shape[1] * 2.0**50)


def threshold_at(values: Tensor, q: float) -> float:
    """A threshold that ceil(q n) of n margins, and ties of the largest of them, do not exceed.

    Halfway to the next margin, so that no margin lies so close that another order of additions changes sides.
    """
    total = values.numel()
    n = int(share(q, torch.tensor(total)))
    if n < 1:
        raise ValueError(f"a threshold needs values, and q above 0, got {total} values and q = {q!r}")
    if n == total:
        return 1.0
    last, following = map(float, values.double().flatten().sort().values[n - 1 : n + 1])
    return last if last == following else (last + following) / 2


def _read(layer: int, value: Any) -> Threshold:
    if isinstance(value, (list, tuple)) and value and all(is_number(x) and 0 <= x <= 1 for x in value):
        return tuple(float(x) for x in value)
    if is_number(value) and 0 <= value <= 1:
        return float(value)
    raise ValueError(
        f"the threshold of layer {layer} must be a number in [0, 1] like the margin it is compared with, or one for "
        f"each head, got {value!r}"
    )


@TRIGGERS.register("calibrated")
@dataclass(frozen=True)
class Calibrated(Trigger):
    """Every tile whose margin, averaged over all heads, is at most its layer's threshold. Ignores q.

    thresholds: one for each layer; or for each layer one a head, and then every (head, tile) cell decides by its own
                margin.
    layers:     the model's layers they belong to; 0, 1, ... if not given.

    Attached to a model, each layer takes its own threshold. On tensors, say which layer they come from:
    `policy.for_layer(3)`.
    """

    thresholds: tuple[Threshold, ...] = ()
    layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.thresholds, (list, tuple)) or not self.thresholds:
            raise ValueError(
                f"trigger 'calibrated' needs thresholds, one for each layer, got {self.thresholds!r}: "
                "`closecall calibrate` finds them and writes a policy for Policy.load"
            )
        layers = check_layers(self.layers, self.thresholds, "thresholds")
        read = tuple(_read(i, x) for i, x in zip(layers, self.thresholds, strict=True))
        if len({isinstance(x, tuple) for x in read}) > 1:
            raise ValueError("thresholds are one number a layer, or one a head in all layers: not both")
        object.__setattr__(self, "layers", layers)
        object.__setattr__(self, "thresholds", read)

    @property
    def per_head(self) -> bool:
        return isinstance(self.thresholds[0], tuple)

    def for_layer(self, index: int) -> Calibrated:
        if index not in self.layers:
            raise ValueError(
                f"calibrated for {layer_numbers(self.layers)}, and this is layer {index}: calibrate this model"
            )
        return Calibrated((self.thresholds[self.layers.index(index)],), (index,))

    def made_for(self) -> tuple[int, ...]:
        return self.layers

    def fire(self, margin: Tensor, eligible: Tensor, sequence: Tensor, q: float) -> Tensor:
        if len(self.layers) > 1:
            raise ValueError(
                f"calibrated for {layer_numbers(self.layers)}: say of which layer these tensors are, with "
                "policy.for_layer(layer)"
            )
        (threshold,) = self.thresholds
        if isinstance(threshold, float):
            return ((mean_margin(margin) <= threshold) & eligible)[:, None].expand_as(margin)
        if len(threshold) != margin.shape[1]:
            raise ValueError(
                f"layer {self.layers[0]} was calibrated for {len(threshold)} heads, and there are {margin.shape[1]}: "
                "calibrate this model"
            )
        limit = torch.tensor(threshold, dtype=torch.float64, device=margin.device)[:, None]
        return (margin.double() <= limit) & eligible[:, None]

    def describe(self, q: float) -> str:
        what = (
            "cells with a margin under their head's"
            if self.per_head
            else "tiles with a mean margin under their layer's"
        )
        return f"{what} threshold, calibrated for {layer_numbers(self.layers)} to be {q:.0%}"


def layer_numbers(layers: tuple[int, ...]) -> str:
    if len(layers) == 1:
        return f"layer {layers[0]}"
    run = layers == tuple(range(layers[0], layers[-1] + 1))
    which = f"{layers[0]} to {layers[-1]}" if run else ", ".join(map(str, layers))
    return f"{len(layers)} layers ({which})"
