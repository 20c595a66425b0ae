"""From error curves to budgets: where the next block saves most, there it goes."""

from __future__ import annotations

import heapq
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def hull(curve: Array, costs: Array | None = None) -> Array:
    """The lower convex hull of an error curve over costs, at every budget: on it, what a block saves for what it costs
    never rises.

    Giving blocks one by one to whoever saves most is optimal on convex curves only. Where a curve has a plateau before
    a drop, the hull spreads the drop over the plateau, so that the blocks up to the drop are given together.
    """
    x = np.arange(len(curve)) if costs is None else costs
    points: list[int] = []
    for at in range(len(curve)):
        while len(points) >= 2:
            a, b = points[-2], points[-1]
            if (curve[b] - curve[a]) * (x[at] - x[a]) >= (curve[at] - curve[a]) * (x[b] - x[a]):
                points.pop()
            else:
                break
        points.append(at)
    lower: Array = np.interp(x, x[points], curve[points])
    return lower


def costs_of(visible: Array, most: int) -> Array:
    """What budgets of 0 to `most` blocks cost: what tiles that see so many `visible` blocks keep, in all.

    Tiles at the start of a text see few blocks, so a large budget costs less than its number says.
    """
    costs: Array = np.minimum(np.arange(most + 1)[:, None], visible).sum(1).astype(float)
    return costs


def allocate(curves: Array, mean: float, floor: int, costs: Array | None = None) -> Array:
    """Budgets `[layers, heads]` of at least `floor` that minimise the summed error, at a mean cost of at most `mean`.

    curves: `[layers, heads, blocks + 1]`, the error when a head keeps 0, 1, ... blocks; never rising.
    costs: what 0, 1, ... blocks cost a head; if not given, their number.
    """
    layers, heads, width = curves.shape
    most = width - 1
    price = np.arange(width, dtype=float) if costs is None else costs
    if not 1 <= floor <= most:
        raise ValueError(f"the floor must be between 1 and the {most} blocks of the context, got {floor}")
    if not price[floor] <= mean <= price[most]:
        raise ValueError(f"the mean budget must cost between {price[floor]:g} and {price[most]:g}, got {mean:g}")
    falling = np.minimum.accumulate(curves, axis=2)
    smooth = np.stack([[hull(falling[cell, head], price) for head in range(heads)] for cell in range(layers)])
    # A budget that no tile can use up costs nothing more, and saves nothing.
    steps = np.diff(price)
    slopes = np.divide(np.diff(smooth, axis=2), steps, out=np.zeros_like(smooth[..., 1:]), where=steps > 0)
    budgets = np.full((layers, heads), floor, dtype=np.int64)
    left = (mean - price[floor]) * layers * heads + 1e-6
    gains = [(float(slopes[cell][floor]), cell) for cell in np.ndindex(layers, heads) if floor < most]
    heapq.heapify(gains)
    while gains:
        _, cell = heapq.heappop(gains)
        b = int(budgets[cell])
        if price[b + 1] - price[b] > left:
            break
        left -= price[b + 1] - price[b]
        budgets[cell] = b + 1
        if b + 1 < most:
            heapq.heappush(gains, (float(slopes[cell][b + 1]), cell))
    return budgets
