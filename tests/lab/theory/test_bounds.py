"""Lemma 1 and Proposition 1 against exact integrals, where their assumptions hold; and where the paper's text fails."""

from __future__ import annotations

import math
from fractions import Fraction

import exact
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from closecall_lab.theory.bounds import chi, eps_bar, localise, regret_bound, spread_variation, tail, triggered
from closecall_lab.theory.gaps import Tiles, floors, gaps
from closecall_lab.theory.monte_carlo import estimate
from engines import FUZZ

TINY = 1e-10  # of the integrals


@st.composite
def spaced(draw: st.DrawFn, most_tiles: int = 8) -> tuple[Tiles, float]:
    """Tiles whose spacings away from the cut are at least a floor, and tau; the cutoff gap is anything."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    n, width = draw(st.integers(1, most_tiles)), draw(st.integers(2, 8))
    keep = int(rng.integers(1, width))
    expanded = int(rng.integers(keep, width + 1))
    floor = draw(st.sampled_from([0.0, 0.3, 1.0, 2.5, 4.0, 8.0]))
    spacings = floor + rng.random((n, width - 1)) * draw(st.sampled_from([0.01, 0.5, 3.0]))
    spacings[:, keep - 1] = rng.random(n) * draw(st.sampled_from([0.01, 1.0, 6.0]))
    scores = 10 - np.concatenate([np.zeros((n, 1)), np.cumsum(spacings, 1)], 1)
    return Tiles.of(torch.from_numpy(scores), keep, expanded), draw(st.sampled_from([0.2, 1.0, 3.0]))


def exactly(t: Tiles, tau: float) -> tuple[np.ndarray, np.ndarray]:
    rows = zip(t.scores.tolist(), t.keep.tolist(), t.expanded.tolist(), strict=True)
    both = np.array([exact.errors(r, k, e, tau) for r, k, e in rows])
    return both[:, 0], both[:, 1]


@settings(max_examples=2000 if FUZZ else 60)
@given(spaced())
def test_the_lemma_holds_on_both_sides(case: tuple[Tiles, float]) -> None:
    t, tau = case
    delta2 = float(floors(t).amin().clamp(max=100.0))
    found = localise(t, tau, delta2)
    assert bool(found.holds.all())
    error, error_expanded = exactly(t, tau)
    sides = ((found.error, error), (found.error_expanded, error_expanded), (found.value, error - error_expanded))
    for (low, high), truth in sides:
        assert (low.numpy() <= truth + TINY).all()
        assert (truth <= high.numpy() + TINY).all()


@settings(max_examples=300 if FUZZ else 15)
@given(spaced())
def test_the_lemma_holds_for_monte_carlo_within_its_error(case: tuple[Tiles, float]) -> None:
    t, tau = case
    bounds = localise(t, tau, float(floors(t).amin().clamp(max=100.0)))
    sampled = estimate(t, tau, samples=2000)
    for (low, high), got in (
        (bounds.error, sampled.error),
        (bounds.error_expanded, sampled.error_expanded),
        (bounds.value, sampled.value),
    ):
        for bound, sign in ((low, 1), (high, -1)):
            # Six standard errors of a share whose true value is at the bound.
            slack = 6 * (bound * (1 - bound) / 2000).clamp(min=0).sqrt() + 36 / 2000
            assert bool((sign * (bound - got) <= slack).all())


def test_a_floor_that_some_tiles_break_is_marked() -> None:
    t = Tiles.of(torch.tensor([[5.0, 3.0, 2.0, 0.0], [5.0, 4.9, 2.0, 0.0]]), 2, 3)
    assert localise(t, 1.0, 1.0).holds.tolist() == [True, False]


@settings(max_examples=3000 if FUZZ else 100)
@given(spaced(most_tiles=12), st.sampled_from([0, 0.1, 0.25, 0.4, 0.5, 0.9, 1]), st.data())
def test_the_regret_bound_dominates_the_exact_regret(case: tuple[Tiles, float], q: float, data: st.DataObject) -> None:
    t, tau = case
    g = gaps(t)
    floor, away = floors(t), (g.spread / g.spread.mean() - 1).abs()
    # The extremes, or quantiles that some tiles break.
    share = data.draw(st.sampled_from([None, 0.3, 0.6]))
    given_ = {} if share is None else {
        "delta2": float(floor.clamp(max=100.0).quantile(share)), "beta": float(away.quantile(1 - share))
    }  # fmt: skip
    proved = regret_bound(t, tau, q, **given_)
    error, error_expanded = exactly(t, tau)
    value = error - error_expanded
    n = triggered(q, len(value))
    by_margin = np.argsort(g.margin.numpy(), kind="stable")[:n]
    regret = (np.sort(value)[::-1][:n].sum() - value[by_margin].sum()) / len(value)
    assert regret <= proved.bound + TINY
    assert proved.bound <= proved.share + TINY
    if share is None:
        assert proved.violating == 0
    assert proved.c_q == (min(proved.branches.values()) if proved.share else 0)
    assert proved.branch == "none" or proved.branches[proved.branch] == proved.c_q


def test_the_published_share_fails_with_few_tiles() -> None:
    """min(q, 1 - q) undercounts: at q = 0.1 of three tiles one is expanded, a third of them."""
    # Gaps 1, 3, 9 over spreads 7, 23, 15: the margin picks the second tile, the first is worth most.
    t = Tiles.of(torch.tensor([[7.0, 1.0, 0.0], [23.0, 3.0, 0.0], [15.0, 9.0, 0.0]], dtype=torch.float64), 2, 3)
    proved = regret_bound(t, 1.0, 0.1)
    value = exactly(t, 1.0)[0]
    assert (int(gaps(t).margin.argmin()), int(value.argmax())) == (1, 0)
    regret = (value[0] - value[1]) / 3
    as_published = min(0.1, 1 - 0.1) * proved.c_q
    assert as_published < regret <= proved.bound
    assert proved.share == pytest.approx(1 / 3)


def test_the_band_is_sharper_where_spacings_dominate() -> None:
    rng = np.random.default_rng(0)
    n = 400
    cut = rng.random(n) * 4
    scores = np.stack([20 + 0.05 * rng.random(n) + cut, cut, np.zeros(n), np.full(n, -20.0)], 1)
    t = Tiles.of(torch.from_numpy(scores), 2, 3)
    proved = regret_bound(t, 0.5, 0.4)
    assert proved.regime == "spacing-dominated"
    assert proved.branch == "slope"
    assert proved.band_mass < 0.8
    assert proved.bound == proved.band < proved.share * proved.c_q
    error, error_expanded = exactly(t, 0.5)
    value = error - error_expanded
    chosen = gaps(t).margin.argsort(stable=True)[: triggered(0.4, n)].numpy()
    assert (np.sort(value)[::-1][: len(chosen)].sum() - value[chosen].sum()) / n <= proved.bound


def test_noise_leaves_the_caps_only() -> None:
    t = Tiles.of(torch.zeros(10, 8), 2, 4)
    proved = regret_bound(t, 1.0, 0.4)
    assert (proved.chi, proved.eps_bar, proved.branch) == (math.inf, math.inf, "cap")
    assert proved.bound == proved.share == 0.4
    assert proved.regime == "noise-dominated"
    assert math.isnan(proved.active_band_mass)  # every cut is a tie
    assert math.isnan(spread_variation(gaps(t).spread))


@pytest.mark.parametrize("ratio", [0.05, 0.3, 1.0, 2.0, 5.0, 30.0])
def test_chi_is_its_series(ratio: float) -> None:
    terms = [(m + 1) * math.exp(-((m * ratio) ** 2) / 4) for m in range(1, 4000)]
    assert chi(ratio * 0.7, 0.7) == pytest.approx(math.fsum(terms), rel=1e-12)
    if ratio >= 2:
        assert chi(ratio, 1.0) <= 2.2 * math.exp(-(ratio**2) / 4)


def test_chi_where_the_series_is_long_or_nothing() -> None:
    a = 0.9e-6
    m = np.arange(1, 40000, dtype=np.float64)
    series = float(((m + 1) * np.exp(-a * m * m)).sum())
    assert series <= chi(2 * math.sqrt(a), 1.0) <= 1.01 * series
    assert chi(0.0, 1.0) == math.inf
    assert chi(1e300, 1.0) == 0.0
    assert eps_bar(1e300, 1.0, 5) == 0.0
    assert eps_bar(0.0, 1.0, 5) == math.inf
    assert eps_bar(3.0, 1.0, 0) == pytest.approx(2 * chi(3.0, 1.0) + 1)


def test_the_tail_is_two_blocks_in_the_wrong_order() -> None:
    assert float(tail(torch.tensor(0.0), 2.0)) == 0.5
    assert float(tail(torch.tensor(3.0), 2.0)) == pytest.approx(0.5 * math.erfc(3 / 4))


def test_spread_variation_is_deviation_over_mean() -> None:
    assert spread_variation(torch.tensor([1.0, 3.0])) == pytest.approx(0.5)


@given(st.sampled_from([0, 0.07, 0.1, 0.4, 1]), st.integers(1, 500))
def test_triggered_counts_as_the_router_does(q: float, total: int) -> None:
    assert triggered(q, total) == math.ceil(Fraction(str(q)) * total)


def test_what_has_no_bound() -> None:
    t = Tiles.of(torch.tensor([[2.0, 1.0, 0.0]]), 1, 2)
    with pytest.raises(ValueError, match="tau must be a positive"):
        regret_bound(t, 0.0, 0.4)
    with pytest.raises(ValueError, match=r"q must be in \[0, 1\]"):
        regret_bound(t, 1.0, 1.4)
    for wrong in (-1.0, math.nan):
        with pytest.raises(ValueError, match="delta2 must be at least 0"):
            regret_bound(t, 1.0, 0.4, delta2=wrong)
        with pytest.raises(ValueError, match="beta must be at least 0"):
            regret_bound(t, 1.0, 0.4, beta=wrong)
    with pytest.raises(ValueError, match="tau must be a positive"):
        localise(t, 0.0, 1.0)
