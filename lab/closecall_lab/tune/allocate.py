"""From error curves to budgets: where the next block saves most, there it goes."""

from __future__ import annotations

import heapq
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def hull(curve: Array) -> Array:
    """The lower convex hull of an error curve, at every budget: on it, a block never saves more than the one before.

    Giving blocks one by one to whoever saves most is optimal on convex curves only. Where a curve has a plateau before
    a drop, the hull spreads the drop over the plateau, so that the blocks up to the drop are given together.
    """
    points: list[int] = []
    for x in range(len(curve)):
        while len(points) >= 2:
            a, b = points[-2], points[-1]
            if (curve[b] - curve[a]) * (x - a) >= (curve[x] - curve[a]) * (b - a):
                points.pop()
            else:
                break
        points.append(x)
    at: Array = np.interp(np.arange(len(curve)), points, curve[points])
    return at


def allocate(curves: Array, mean: float, floor: int) -> Array:
    """Budgets `[layers, heads]` of at least `floor` with the given mean that minimise the summed error.

    curves: `[layers, heads, blocks + 1]`, the error when a head keeps 0, 1, ... blocks; never rising.
    """
    layers, heads, width = curves.shape
    most = width - 1
    if not 1 <= floor <= most:
        raise ValueError(f"the floor must be between 1 and the {most} blocks of the context, got {floor}")
    if not floor <= mean <= most:
        raise ValueError(f"the mean budget must be between the floor {floor} and the {most} blocks, got {mean:g}")
    smooth = np.apply_along_axis(hull, 2, np.minimum.accumulate(curves, axis=2))
    budgets = np.full((layers, heads), floor, dtype=np.int64)
    left = int(mean * layers * heads + 1e-9) - int(budgets.sum())
    gains = [
        (float(smooth[cell][floor + 1] - smooth[cell][floor]), cell)
        for cell in np.ndindex(layers, heads)
        if floor < most
    ]
    heapq.heapify(gains)
    while left > 0 and gains:
        _, cell = heapq.heappop(gains)
        budgets[cell] += 1
        left -= 1
        b = int(budgets[cell])
        if b < most:
            heapq.heappush(gains, (float(smooth[cell][b + 1] - smooth[cell][b]), cell))
    return budgets
