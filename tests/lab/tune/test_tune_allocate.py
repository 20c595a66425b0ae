"""Budgets from error curves, against brute force."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from closecall_lab.tune.allocate import allocate, costs_of, hull


def convex(draws: list[float]) -> np.ndarray:
    """A falling convex curve from drops, the largest first."""
    drops = sorted((abs(x) for x in draws), reverse=True)
    return np.concatenate([[sum(drops)], sum(drops) - np.cumsum(drops)])


@given(st.lists(st.lists(st.floats(0, 5), min_size=5, max_size=5), min_size=3, max_size=3), st.integers(3, 12))
def test_no_split_of_the_same_blocks_has_a_smaller_error(draws: list[list[float]], total: int) -> None:
    curves = np.array([[convex(x) for x in draws]])
    budgets = allocate(curves, total / 3, 1)
    assert budgets.sum() == total
    error = sum(curves[0, h, b] for h, b in enumerate(budgets[0]))
    best = min(
        sum(curves[0, h, b] for h, b in enumerate(split))
        for split in itertools.product(range(1, 6), repeat=3)
        if sum(split) == total
    )
    assert error == pytest.approx(best, abs=1e-9)


def test_blocks_go_where_they_save() -> None:
    curves = np.array([[np.linspace(1, 0, 9), np.linspace(0.1, 0, 9)]])
    assert allocate(curves, 5, 2).tolist() == [[8, 2]]


def test_a_drop_behind_a_plateau_is_worth_walking_to() -> None:
    """The first three blocks of head 0 save nothing, the fourth saves everything."""
    plateau = np.array([1.0, 1.0, 1.0, 1.0, 0.0, 0.0])
    slope = np.array([0.5, 0.45, 0.4, 0.35, 0.3, 0.25])
    assert allocate(np.array([[plateau, slope]]), 2.5, 1).tolist() == [[4, 1]]


@given(st.lists(st.lists(st.floats(0, 5), min_size=5, max_size=5), min_size=3, max_size=3), st.floats(5, 15))
def test_no_split_that_costs_no_more_has_a_smaller_error(draws: list[list[float]], mean: float) -> None:
    """Where early tiles see few blocks, a large budget costs less than its number."""
    costs = costs_of(np.arange(1, 6), 5)
    assert costs.tolist() == [0, 5, 9, 12, 14, 15]
    drops = np.array([sorted(x, reverse=True) for x in draws]) * np.diff(costs)
    curves = np.concatenate([np.zeros((3, 1)), -drops.cumsum(1)], 1)[None] + 1000
    budgets = allocate(curves, mean, 1, costs)
    spent = costs[budgets].sum()
    assert spent <= 3 * mean + 1e-5
    splits = [np.array(split) for split in itertools.product(range(1, 6), repeat=3)]
    best = min(curves[0, range(3), split].sum() for split in splits if costs[split].sum() <= spent)
    assert curves[0, range(3), budgets[0]].sum() == pytest.approx(best, abs=1e-6)


@given(st.lists(st.floats(0, 1), min_size=2, max_size=12))
def test_the_hull_lies_below_and_is_convex(points: list[float]) -> None:
    curve = np.array(points)
    lower = hull(curve)
    assert (lower <= curve + 1e-12).all()
    assert (np.diff(lower, 2) >= -1e-9).all()
    assert lower[0] == curve[0]
    assert lower[-1] == curve[-1]


@pytest.mark.parametrize(
    ("mean", "floor", "message"), [(3, 4, "must cost between 4 and 8, got 3"), (9, 1, "got 9"), (3, 0, "floor")]
)
def test_what_cannot_be_had(mean: float, floor: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        allocate(np.zeros((1, 2, 9)), mean, floor)
