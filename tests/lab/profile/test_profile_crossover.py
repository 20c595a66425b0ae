"""Crossovers and growth on made-up times whose answer is known."""

from __future__ import annotations

import math
import random
import re

import pytest

from closecall_lab.bench.profile.crossover import cross, crossover
from closecall_lab.bench.profile.growth_report import Growth, conclusions, exponent, local, matters

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


def test_exponents_of_power_laws() -> None:
    contexts = [8.0, 16.0, 64.0]
    assert exponent(contexts, [3 * n**1.5 for n in contexts]) == pytest.approx(1.5)
    assert local(contexts, [n**2 for n in contexts]) == [None, pytest.approx(2), pytest.approx(2)]


def test_the_quadratic_part_is_told_from_the_linear() -> None:
    contexts = [8.0 * K, 16.0 * K, 32.0 * K, 128.0 * K]
    found = Growth.fit(contexts, [2e-5 * n + 3e-10 * n * n for n in contexts])
    assert found.linear == pytest.approx(2e-5)
    assert found.quadratic == pytest.approx(3e-10)
    assert Growth.fit(contexts, [5e-5 * n for n in contexts]).quadratic == pytest.approx(0, abs=1e-18)
    square = Growth.fit(contexts, [2e-10 * n * n for n in contexts])
    assert square.quadratic == pytest.approx(2e-10)
    assert square.linear == pytest.approx(0, abs=1e-12)
    below = Growth.fit(contexts, [n**0.5 for n in contexts])  # grows less than linearly: no negative square
    assert below.quadratic == 0
    assert below.linear > 0


def test_where_selection_begins_to_matter() -> None:
    chosen, attended = Growth(1e-5, 2e-10), Growth(9e-5, 0.0)
    at = matters(chosen, attended, share=0.1)
    assert at is not None
    assert 2e-10 * at * at == pytest.approx(0.1 * (chosen.at(at) + attended.at(at)))
    assert matters(Growth(1e-5, 0.0), attended) is None  # no quadratic part
    assert matters(Growth(0.0, 1e-12), Growth(0.0, 1e-10)) is None  # attention is quadratic too, and larger


def test_what_is_concluded() -> None:
    contexts = [8.0 * K, 16.0 * K, 32.0 * K]
    one = {
        "context": [4.0 * K, *contexts],
        "selection": [0.0, *(1e-5 * n + 2e-10 * n * n for n in contexts)],
        "attention": [1.0, *(9e-5 * n for n in contexts)],
    }
    one["both"] = [a + b for a, b in zip(one["selection"], one["attention"], strict=True)]
    said = conclusions(("fp32", 1, "topk@33"), one)
    assert "fitted over 8K to 32K" in said[0]  # at 4K nothing was selected
    assert "attention n^1.00" in said[0]
    at = matters(Growth(1e-5, 2e-10), Growth(9e-5, 0.0))
    assert at is not None
    assert f"from {at / K:,.0f}K tokens on (beyond what was measured)" in said[1]
    assert re.search(r"fitted as 1e-05 n \+ 2e-10 n\^2 seconds", said[1])
    few = {key: values[:2] for key, values in one.items()}
    assert "nothing to fit" in conclusions(("fp32", 1, "topk@33"), few)[0]
