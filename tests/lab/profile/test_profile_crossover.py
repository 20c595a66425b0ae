"""Crossovers on made-up times whose answer is known."""

from __future__ import annotations

import math
import random

import pytest

from closecall_lab.bench.profile.crossover import cross, crossover

K = 1024


def test_a_power_law_is_found_exactly() -> None:
    """ratio = (n / 20000) ** -0.7 is a straight line in logarithms, so interpolation makes no error."""
    ratios = {n * K: (n * K / 20_000) ** -0.7 for n in (8, 16, 32, 64)}
    assert cross(ratios) == pytest.approx(20_000, rel=1e-12)


def test_outside_what_was_measured() -> None:
    assert cross({8 * K: 0.9, 16 * K: 0.5}) == -math.inf
    assert cross({8 * K: 1.9, 16 * K: 1.01}) == math.inf
    assert cross({8 * K: 1.9, 16 * K: 1.0}) == pytest.approx(16 * K)
    assert str(crossover({8 * K: [0.9, 0.8], 16 * K: [0.5, 0.5]})) == "below 8K [below 8K, below 8K]"
    assert str(crossover({8 * K: [1.9], 16 * K: [1.5]})) == "beyond 16K (one round, no interval)"


def test_it_is_the_last_crossing_that_counts() -> None:
    assert cross({1 * K: 0.9, 2 * K: 1.1, 4 * K: 1 / 1.1}) == pytest.approx(2 * K * math.sqrt(2))


def test_the_interval_widens_with_the_spread_and_holds_the_point() -> None:
    def drawn(spread: float) -> dict[int, list[float]]:
        draw = random.Random(1)
        return {n * K: [(n * K / 20_000) ** -0.7 * math.exp(draw.gauss(0, spread)) for _ in range(9)]
                for n in (8, 16, 32, 64)}  # fmt: skip

    exact, little, much = (crossover(drawn(s)) for s in (0.0, 0.01, 0.1))
    assert exact.low == exact.high == pytest.approx(20_000)
    for found in (little, much):
        assert found.low is not None
        assert found.high is not None
        assert found.low <= found.context <= found.high
    assert much.high - much.low > little.high - little.low > 0  # type: ignore[operator]


def test_a_context_without_rounds() -> None:
    with pytest.raises(ValueError, match="needs a ratio for every context"):
        crossover({8 * K: []})
