"""Budgets from error curves, against brute force."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from closecall_lab.tune.allocate import allocate, hull


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


@given(st.lists(st.floats(0, 1), min_size=2, max_size=12))
def test_the_hull_lies_below_and_is_convex(points: list[float]) -> None:
    curve = np.array(points)
    lower = hull(curve)
    assert (lower <= curve + 1e-12).all()
    assert (np.diff(lower, 2) >= -1e-9).all()
    assert lower[0] == curve[0]
    assert lower[-1] == curve[-1]


@pytest.mark.parametrize(("mean", "floor", "message"), [(3, 4, "mean budget"), (9, 1, "mean budget"), (3, 0, "floor")])
def test_what_cannot_be_had(mean: float, floor: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        allocate(np.zeros((1, 2, 9)), mean, floor)
