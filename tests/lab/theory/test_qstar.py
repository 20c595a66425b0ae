"""Costs by enumeration, and judged by draws that did not choose."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from closecall_lab.theory.gaps import Tiles
from closecall_lab.theory.monte_carlo import Estimate, estimate
from closecall_lab.theory.qstar import at_cost, gain


def made_up(value: list[float]) -> Estimate:
    v = torch.tensor(value)
    return Estimate(v, torch.zeros_like(v), torch.stack([v, v]), 100)


VALUES = st.lists(st.sampled_from([0.0, 0.125, 0.25, 0.5, 1.0]), min_size=1, max_size=7)


@given(VALUES, st.integers(0, 20))
def test_no_other_choice_of_equal_tiles_avoids_more(value: list[float], cost: int) -> None:
    extra = torch.full((len(value),), 3)
    found = at_cost(made_up(value), extra, cost)
    assert found.cost <= cost
    assert found.avoided == pytest.approx(sum(sorted(value, reverse=True)[: cost // 3]))
    if found.cost:
        assert found.price == pytest.approx(min(torch.tensor(value)[found.fired]).item() / 3)
    else:
        assert found.price == math.inf


def test_by_layer_and_against_a_trigger() -> None:
    found = made_up([0.5, 0.0, 1.0, 0.25])
    extra = torch.tensor([2, 2, 2, 2])
    best = at_cost(found, extra, 4)
    assert best.by(torch.tensor([0, 0, 3, 3])) == {0: 0.5, 3: 0.5}
    got = gain(found, extra, torch.tensor([True, True, False, False]))
    assert (got.avoided, got.best, got.q, got.q_star) == pytest.approx((0.5, 1.5, 0.5, 0.5))


def test_noise_does_not_flatter() -> None:
    """Tiles that are all alike: choosing the luckiest is worth no more than choosing any."""
    t = Tiles.of(torch.tensor([[1.0, 0.0]]).repeat(3000, 1), 1, 2)
    truth = 0.5 * math.erfc(1 / 2)
    sampled = estimate(t, 1.0, samples=8)
    found = at_cost(sampled, t.extra, 600)
    assert abs(found.avoided - 600 * truth) <= 6 * found.error
    assert float(sampled.value[found.fired].sum()) > 600 * truth + 6 * found.error  # what would have flattered


def test_costs_that_are_none() -> None:
    found = made_up([0.5, 0.5])
    with pytest.raises(ValueError, match="cost must be at least 0"):
        at_cost(found, torch.tensor([1, 1]), -1)
    with pytest.raises(ValueError, match=r"extra must be int64 \[2\]"):
        at_cost(found, torch.tensor([1]), 1)
    with pytest.raises(ValueError, match="extra must be at least 0, got -1"):
        at_cost(found, torch.tensor([1, -1]), 1)
