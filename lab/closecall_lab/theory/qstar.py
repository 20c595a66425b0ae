"""q*: which share of tiles is worth expanding when every extra block has its price."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .monte_carlo import Estimate


@dataclass(frozen=True, eq=False)
class Allocation:
    """Which tiles to expand, and what that buys.

    `avoided` (identification errors, summed over tiles) is judged by draws that did not choose, so that it is not
    flattered by noise; `error` is its standard error.
    """

    fired: Tensor  # bool [n], chosen by all draws
    price: float  # of one block, in identification errors: the tiles worth more than that are expanded
    cost: int  # extra blocks
    avoided: float
    error: float

    @property
    def q(self) -> float:
        """q*: the share of tiles expanded."""
        return float(self.fired.double().mean())

    def by(self, group: Tensor) -> dict[int, float]:
        """q* of each group of tiles, a layer say; int64 `[n]`."""
        return {
            int(i): float(self.fired[group == i].double().mean())
            for i in range(int(group.max()) + 1)
            if bool((group == i).any())
        }


def _check_extra(estimates: Estimate, extra: Tensor) -> None:
    n = len(estimates.error)
    if extra.dtype != torch.int64 or tuple(extra.shape) != (n,):
        raise ValueError(f"extra must be int64 [{n}], the blocks that expanding a tile adds, got {[*extra.shape]}")
    if bool((extra < 0).any()):
        raise ValueError(f"extra must be at least 0, got {int(extra.min())}")


def _judged(estimates: Estimate, sets: list[Tensor]) -> tuple[float, float]:
    """What each half's choice is worth to the other half, averaged, with its standard error."""
    avoided = sum(float(estimates.halves[1 - i][chosen].double().sum()) for i, chosen in enumerate(sets)) / 2
    spread = estimates.half_variances
    errors = [math.sqrt(float(spread[1 - i][chosen].sum())) for i, chosen in enumerate(sets)]
    return avoided, sum(errors) / 2


def at_price(estimates: Estimate, extra: Tensor, price: float) -> Allocation:
    """The Bayes-optimal trigger where one more block costs `price` identification errors: V* > price * extra."""
    _check_extra(estimates, extra)
    if not 0 <= price < math.inf:
        raise ValueError(f"price must be a number of at least 0, identification errors per block, got {price!r}")
    fired, *halves = (v > price * extra for v in (estimates.value, *estimates.halves))
    return Allocation(fired, price, int(extra[fired].sum()), *_judged(estimates, halves))


def at_cost(estimates: Estimate, extra: Tensor, cost: int) -> Allocation:
    """The best use of `cost` extra blocks: tiles by V* per block until the next no longer fits. `price` is what the
    last block bought."""
    _check_extra(estimates, extra)
    if cost < 0:
        raise ValueError(f"cost must be at least 0 blocks, got {cost!r}")

    def greedy(value: Tensor) -> tuple[Tensor, float]:
        rate = value.double() / extra.clamp(min=1)
        order = rate.argsort(descending=True, stable=True)
        fits = (extra[order].cumsum(0) <= cost) & (rate[order] > 0)
        chosen = torch.zeros_like(fits)
        chosen[order] = fits
        return chosen, float(rate[order][fits][-1]) if bool(fits.any()) else math.inf

    fired, price = greedy(estimates.value)
    halves = [greedy(v)[0] for v in estimates.halves]
    return Allocation(fired, price, int(extra[fired].sum()), *_judged(estimates, halves))


@dataclass(frozen=True)
class Gain:
    """What the best allocation buys over a trigger that spends the same."""

    avoided: float  # identification errors the trigger avoids, summed over tiles
    best: float  # and the best allocation of as many blocks
    error: float  # standard error of their difference, an upper bound: their common tiles are counted in both
    q: float  # the trigger's share of tiles
    q_star: float


def gain(estimates: Estimate, extra: Tensor, fired: Tensor) -> Gain:
    """Compares a trigger's tiles, bool `[n]`, with the best allocation of the extra blocks they cost."""
    best = at_cost(estimates, extra, int(extra[fired].sum()))
    avoided = float(estimates.value[fired].double().sum())
    error = math.sqrt(float(estimates.variance[fired].sum())) + best.error
    return Gain(avoided, best.avoided, error, float(fired.double().mean()), best.q)
