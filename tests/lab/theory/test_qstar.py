"""Prices and costs by enumeration, and judged by draws that did not choose."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from closecall_lab.theory.gaps import Tiles
from closecall_lab.theory.monte_carlo import Estimate, estimate
from closecall_lab.theory.qstar import at_cost, at_price, gain


def made_up(value: list[float]) -> Estimate:
    v = torch.tensor(value)
    return Estimate(v, torch.zeros_like(v), torch.stack([v, v]), 100)


VALUES = st.lists(st.sampled_from([0.0, 0.125, 0.25, 0.5, 1.0]), min_size=1, max_size=7)


@given(VALUES, st.data(), st.sampled_from([0.0, 0.05, 0.125, 0.3, 2.0]))
def test_no_other_choice_is_worth_more_at_a_price(value: list[float], data: st.DataObject, price: float) -> None:
    extra = torch.tensor(data.draw(st.lists(st.integers(0, 4), min_size=len(value), max_size=len(value))))
    allocation = at_price(made_up(value), extra, price)
    v = torch.tensor(value)

    def worth(fired: torch.Tensor) -> float:
        return float(v[fired].sum()) - price * int(extra[fired].sum())

    choices = (torch.tensor(c) for c in itertools.product([False, True], repeat=len(value)))
    assert worth(allocation.fired) == pytest.approx(max(map(worth, choices)))
    assert allocation.cost == int(extra[allocation.fired].sum())
    assert allocation.avoided == pytest.approx(float(v[allocation.fired].sum()))
    assert allocation.q == pytest.approx(float(allocation.fired.double().mean()))


@given(VALUES, st.integers(0, 20))
def test_no_other_choice_of_equal_tiles_avoids_more(value: list[float], cost: int) -> None:
    extra = torch.full((len(value),), 3)
    allocation = at_cost(made_up(value), extra, cost)
    assert allocation.cost <= cost
    assert allocation.avoided == pytest.approx(sum(sorted(value, reverse=True)[: cost // 3]))
    if allocation.cost:
        assert allocation.price == pytest.approx(min(torch.tensor(value)[allocation.fired]).item() / 3)
    else:
        assert allocation.price == math.inf


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


def test_what_has_no_price() -> None:
    sampled = made_up([0.5, 0.5])
    with pytest.raises(ValueError, match="price must be a number of at least 0"):
        at_price(sampled, torch.tensor([1, 1]), math.nan)
    with pytest.raises(ValueError, match="cost must be at least 0"):
        at_cost(sampled, torch.tensor([1, 1]), -1)
    with pytest.raises(ValueError, match=r"extra must be int64 \[2\]"):
        at_price(sampled, torch.tensor([1]), 0.1)
    with pytest.raises(ValueError, match="extra must be at least 0, got -1"):
        at_price(sampled, torch.tensor([1, -1]), 0.1)
