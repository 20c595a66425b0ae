"""From which context on sparse is faster: interpolated between measured contexts, with an interval over rounds."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...spine.numbers import size

RESAMPLES = 2000
CONFIDENCE = 0.95
Ratios = Mapping[int, Sequence[float]]  # by context: our wall over theirs, one for each round


@dataclass(frozen=True)
class Crossover:
    """`context` is -inf where sparse is faster at every measured context, inf where it is not at the longest.

    `low` and `high` are None where a single round tells nothing about the spread.
    """

    context: float
    low: float | None
    high: float | None
    shortest: int
    longest: int

    def _show(self, context: float) -> str:
        if context == -math.inf:
            return f"below {size(self.shortest)}"
        if context == math.inf:
            return f"beyond {size(self.longest)}"
        return f"{context / 1024:.1f}K"

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return f"{self._show(self.context)} (one round, no interval)"
        return f"{self._show(self.context)} [{self._show(self.low)}, {self._show(self.high)}]"


def cross(ratios: Mapping[int, float]) -> float:
    """Finds the context beyond which the ratio stays below 1, by straight lines between logarithms."""
    points = [(math.log(n), math.log(r)) for n, r in sorted(ratios.items())]
    if points[-1][1] > 0:
        return math.inf
    for (x0, y0), (x1, y1) in reversed(list(itertools.pairwise(points))):
        if y0 > 0:
            return math.exp(x0 + (x1 - x0) * y0 / (y0 - y1))
    return -math.inf


def crossover(ratios: Ratios) -> Crossover:
    """Bootstrap over the rounds of each context; the point is that of the medians."""
    if not ratios or not all(ratios.values()):
        raise ValueError(f"a crossover needs a ratio for every context, got {dict(ratios)!r}")
    point = cross({n: statistics.median(values) for n, values in ratios.items()})
    low: float | None = None
    high: float | None = None
    if min(map(len, ratios.values())) > 1:
        draw = random.Random(0)
        resampled = sorted(
            cross({n: statistics.median(draw.choices(values, k=len(values))) for n, values in ratios.items()})
            for _ in range(RESAMPLES)
        )
        outside = int(RESAMPLES * (1 - CONFIDENCE) / 2)
        low, high = resampled[outside], resampled[-1 - outside]
    return Crossover(point, low, high, min(ratios), max(ratios))
