"""Sampling against integrals, V* against its sign, regret against enumeration."""

from __future__ import annotations

import itertools
import math

import exact
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from closecall_lab.theory.gaps import Tiles
from closecall_lab.theory.monte_carlo import Estimate, estimate, oracle, regret
from engines import FUZZ

SIGMAS = 6.0  # one failure in 10^9 draws


@st.composite
def tiles(draw: st.DrawFn, most: int = 9) -> Tiles:
    """A few tiles with cuts of their own; spacings from ties to far apart, some rows ending early."""
    n, width = draw(st.integers(1, 4)), draw(st.integers(2, most))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    spacings = rng.choice([0.0, 0.1, 1.0, 5.0], (n, width)) * rng.random((n, width))
    scores = torch.from_numpy(-np.cumsum(spacings, 1))
    keep = torch.from_numpy(rng.integers(1, width, n))
    blocks = torch.from_numpy(rng.integers(keep.numpy() + 1, width + 1))
    expanded = torch.from_numpy(rng.integers(keep.numpy(), width + 1))
    return Tiles(scores.masked_fill(torch.arange(width) >= blocks[:, None], -math.inf), keep, expanded)


def exactly(t: Tiles, tau: float) -> np.ndarray:
    """[n, 2]: both errors of every tile."""
    rows = [[s for s in row if s > -math.inf] for row in t.scores.tolist()]
    return np.array(
        [exact.errors(r, k, e, tau) for r, k, e in zip(rows, t.keep.tolist(), t.expanded.tolist(), strict=True)]
    )


def within(found: torch.Tensor, truth: np.ndarray, samples: int) -> None:
    # The spread of a mean of zeros and ones, and one draw more for chances that are themselves about one draw.
    error = np.sqrt(truth * (1 - truth) / samples) * SIGMAS + SIGMAS**2 / samples
    assert (np.abs(found.double().numpy() - truth) <= error).all()


@settings(max_examples=1000 if FUZZ else 40)
@given(tiles(), st.sampled_from([0.05, 0.5, 1.0, 4.0]), st.integers(0, 2**31))
def test_errors_and_value_are_those_of_the_integrals(t: Tiles, tau: float, seed: int) -> None:
    samples = 2000
    found, truth = estimate(t, tau, samples=samples, seed=seed), exactly(t, tau).clip(0, 1)
    within(found.error, truth[:, 0], samples)
    within(found.error_expanded, truth[:, 1], samples)
    within(found.value, (truth[:, 0] - truth[:, 1]).clip(0), samples)
    assert bool((found.value >= 0).all())
    assert torch.allclose(found.value, found.error - found.error_expanded, atol=1e-6)
    assert (truth[:, 0] - truth[:, 1] > -1e-9).all()


@given(st.floats(0, 6), st.floats(0.1, 3))
def test_two_blocks_are_one_normal_tail(gap: float, tau: float) -> None:
    truth = 0.5 * math.erfc(gap / (2 * tau))
    assert exact.missed([gap, 0.0], 1, 1, tau) == pytest.approx(truth, abs=1e-12)
    found = estimate(Tiles.of(torch.tensor([[gap, 0.0]]), 1, 2), tau, samples=4000)
    within(found.error, np.array([truth]), 4000)
    assert float(found.error_expanded) == 0.0  # the expanded set is everything
    assert float(found.value) == pytest.approx(float(found.error))


def test_the_same_seed_gives_the_same_numbers_and_another_does_not() -> None:
    t = Tiles.of(torch.randn(50, 12).sort(1, descending=True).values, 4, 8)
    one, two, other = (estimate(t, 0.5, samples=16, seed=s) for s in (3, 3, 4))
    assert torch.equal(one.halves, two.halves)
    assert not torch.equal(one.halves, other.halves)


def test_more_tiles_than_are_drawn_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("closecall_lab.theory.monte_carlo._AT_ONCE", 64)
    t = Tiles(-torch.arange(8.0).repeat(30, 1), torch.arange(30) % 3 + 1, torch.full((30,), 5))
    truth = exactly(t, 1.0)
    found = estimate(t, 1.0, samples=400)
    within(found.error, truth[:, 0], 400)
    within(found.error_expanded, truth[:, 1], 400)


def test_parts_join() -> None:
    t = Tiles.of(torch.randn(6, 5).sort(1, descending=True).values, 2, 3)
    parts = [estimate(Tiles.of(t.scores[i : i + 3], 2, 3), 1.0, samples=8, seed=i) for i in (0, 3)]
    joined = Estimate.cat(parts)
    assert torch.equal(joined.value, torch.cat([p.value for p in parts]))
    with pytest.raises(ValueError, match=r"equally many samples, got \[8, 16\]"):
        Estimate.cat([parts[0], estimate(t, 1.0, samples=16)])


@pytest.mark.parametrize("samples", [0, 3, 2, 2.0, True])
def test_samples_must_halve(samples: object) -> None:
    with pytest.raises(ValueError, match="even number of at least 4"):
        estimate(Tiles.of(torch.tensor([[1.0, 0.0]]), 1, 2), 1.0, samples=samples)  # type: ignore[arg-type]


def made_up(value: torch.Tensor, other: torch.Tensor | None = None) -> Estimate:
    return Estimate(value, torch.zeros_like(value), torch.stack([value, value if other is None else other]), 100)


@given(st.data())
def test_the_oracle_is_the_best_of_all_choices_of_as_many(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 7))
    value = torch.tensor(data.draw(st.lists(st.sampled_from([0.0, 0.125, 0.5, 1.0]), min_size=n, max_size=n)))
    pool = torch.tensor(data.draw(st.lists(st.sampled_from([3, 8]), min_size=n, max_size=n)))
    fired = torch.tensor(data.draw(st.lists(st.booleans(), min_size=n, max_size=n)))
    best = oracle(value, fired, pool)
    for p in (3, 8):
        mine = pool == p
        assert best[mine].sum() == fired[mine].sum()
    choices = [torch.tensor(c) for c in itertools.product([False, True], repeat=n)]
    same = [c for c in choices if all(c[pool == p].sum() == fired[pool == p].sum() for p in (3, 8))]
    assert float(value[best].sum()) == max(float(value[c].sum()) for c in same)
    found = regret(made_up(value), fired, pool=pool)
    assert found.high == pytest.approx(float(value[best].sum() - value[fired].sum()) / n)
    assert found.low == pytest.approx(found.high)
    assert found.high >= 0
    assert found.fired == pytest.approx(float(fired.double().mean()))


def test_units_fire_together() -> None:
    value = torch.tensor([0.9, 0.0, 0.5, 0.5])
    unit = torch.tensor([7, 7, 2, 2])
    fired = torch.tensor([True, True, False, False])
    assert oracle(value, fired, unit=unit).tolist() == [False, False, True, True]
    assert oracle(value, fired).tolist() == [True, False, False, True]  # the tie goes to the later tile
    assert regret(made_up(value), fired, unit=unit).high == pytest.approx(0.1 / 4)
    with pytest.raises(ValueError, match="more than one pool"):
        oracle(value, fired, torch.tensor([0, 1, 0, 0]), unit)


def test_one_half_chooses_and_the_other_judges() -> None:
    found = regret(made_up(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])), torch.tensor([True, False]))
    # Either half takes the tile the other thinks worthless; the trigger's tile is worth a half.
    assert found.low == pytest.approx((0.0 - 1 + (0 - 0)) / 2 / 2)
    assert found.high == 0.0


@settings(max_examples=300 if FUZZ else 15)
@given(st.integers(0, 2**31))
def test_low_and_high_enclose_the_exact_regret(seed: int) -> None:
    rng = np.random.default_rng(seed)
    t = Tiles.of(torch.from_numpy(-np.cumsum(rng.random((30, 6)), 1)), 2, 4)
    truth = exactly(t, 0.7)
    value = truth[:, 0] - truth[:, 1]
    fired = torch.from_numpy(rng.random(30) < 0.4)
    exact_regret = (np.sort(value)[::-1][: int(fired.sum())].sum() - value[fired.numpy()].sum()) / 30
    found = regret(estimate(t, 0.7, samples=400, seed=seed), fired)
    assert found.low - SIGMAS * found.error <= exact_regret
    assert found.high + SIGMAS * found.error >= exact_regret
    assert abs(found.avoided - value[fired.numpy()].sum() / 30) <= SIGMAS * found.avoided_error + 1e-12


def test_marks_must_fit() -> None:
    with pytest.raises(ValueError, match=r"fired must be bool \[2\]"):
        regret(made_up(torch.tensor([1.0, 0.0])), torch.tensor([1, 0]))
