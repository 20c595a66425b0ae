"""Order statistics by hand, what bfloat16 does to them, and inputs that have none."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import closecall
from closecall import backends
from closecall.geometry import plan
from closecall.ranking import margins
from closecall_lab.theory.gaps import Tiles, check_tau, floors, gaps, noise

INF = math.inf


def test_by_hand() -> None:
    scores = torch.tensor([[9.0, 7.0, 6.0, 2.0, 1.0, 0.5], [5.0, 5.0, 5.0, 5.0, -INF, -INF]])
    found = gaps(Tiles(scores, torch.tensor([2, 3]), torch.tensor([4, 4])))
    assert found.cutoff.tolist() == [1.0, 0.0]
    assert found.expansion.tolist() == [6.0, INF]  # the second tile has nothing beyond its expanded set
    assert found.spread.tolist() == [3.0, 0.0]
    assert found.margin.tolist() == pytest.approx([1 / 3, 0.0])
    assert found.ties == 0.5


def test_each_tile_has_its_own_cut() -> None:
    scores = torch.tensor([[4.0, 3.0, 1.0, 0.0]]).repeat(3, 1)
    tiles = Tiles(scores, torch.tensor([1, 2, 3]), torch.tensor([2, 3, 4]))
    assert gaps(tiles).cutoff.tolist() == [1.0, 2.0, 1.0]
    assert tiles.extra.tolist() == [1, 1, 1]
    assert floors(tiles).tolist() == [1.0, 1.0, 1.0]


def test_the_floor_leaves_out_the_cut_and_what_is_past_the_end() -> None:
    tiles = Tiles.of(torch.tensor([[9.0, 8.9, 5.0, 1.0, -INF], [9.0, 8.0, 7.5, 7.4, 2.0]]), 1, 2)
    assert floors(tiles).tolist() == pytest.approx([3.9, 0.1])
    assert floors(Tiles.of(torch.tensor([[1.0, 0.0]]), 1, 2)).tolist() == [INF]  # there is no other spacing


def test_bfloat16_makes_ties() -> None:
    tiles = Tiles.of(torch.tensor([[300.0, 200.3, 200.1, 100.0]]), 2, 3)
    assert gaps(tiles).cutoff > 0
    assert gaps(tiles.as_bfloat16()).cutoff == 0
    assert gaps(tiles.as_bfloat16()).ties == 1.0


def test_from_a_ranking_equals_the_margins_of_the_rules() -> None:
    generator = torch.Generator().manual_seed(1)
    q, k = (torch.randn(2, h, 300, 16, generator=generator) for h in (4, 2))
    policy = closecall.Policy(closecall.SCORERS["quest"](), closecall.policy("dense").rule, block=16, tile=16)
    ranked = backends.load("reference").rank(q, k, policy, plan(2, 300, 300, 16, 16), 0.25)
    tiles, cells = Tiles.from_ranked(ranked, 6, 12)
    assert cells.shape == (2, 4, 19)
    assert cells.sum() == 2 * 4 * 7  # tiles 12 to 18 see more than 12 blocks
    assert torch.equal(gaps(tiles).margin, margins(ranked, 6)[cells])
    assert bool((gaps(tiles).expansion >= gaps(tiles).cutoff).all())


def test_no_valid_tile_says_which_context_would_do() -> None:
    q = torch.randn(1, 1, 64, 8)
    policy = closecall.Policy(closecall.SCORERS["mean"](), closecall.policy("dense").rule, block=16, tile=16)
    ranked = backends.load("reference").rank(q, q, policy, plan(1, 64, 64, 16, 16), 1.0)
    with pytest.raises(ValueError, match=r"no tile sees more than 12 blocks \(the most is 4\).* at least 13 blocks"):
        Tiles.from_ranked(ranked, 6, 12)
    with pytest.raises(ValueError, match="1 <= tile budget <= expanded budget, got 6 and 5"):
        Tiles.from_ranked(ranked, 6, 5)


@pytest.mark.parametrize(
    ("scores", "keep", "expanded", "message"),
    [
        ([[3.0, math.nan, 1.0]], 1, 2, r"scores\[0, 1\] is nan"),
        ([[INF, 2.0, 1.0]], 1, 2, r"scores\[0, 0\] is inf"),
        ([[1.0, 2.0, 3.0]], 1, 2, r"scores\[0\] rise"),
        ([[3.0, 2.0, 1.0]], 3, 3, "has 3 blocks, keep 3, expanded 3"),
        ([[3.0, 2.0, -INF]], 2, 3, "has 2 blocks, keep 2"),
        ([[3.0, 2.0, 1.0]], 2, 1, "keep 2, expanded 1"),
        ([[3.0, 2.0, 1.0]], 0, 1, "keep 0"),
        ([], 1, 2, "at least one tile"),
    ],
)
def test_scores_that_are_none(scores: list[list[float]], keep: int, expanded: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Tiles.of(torch.tensor(scores).view(len(scores), -1 if scores else 0), keep, expanded)


def test_cuts_of_the_wrong_shape() -> None:
    with pytest.raises(ValueError, match=r"keep must be int64 \[2\]"):
        Tiles(torch.tensor([[2.0, 1.0], [2.0, 1.0]]), torch.tensor([1]), torch.tensor([1, 1]))


@given(st.floats(0.01, 100), st.integers(0, 2**31))
def test_noise_finds_the_scale_of_what_was_added_to_a_constant(tau: float, seed: int) -> None:
    rows = torch.randn(400, 30, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    still = torch.arange(30.0, dtype=torch.float64)
    # 399 x 30 differences, each pair of neighbours sharing a row: the variance of the mean square is below 3 / 11970,
    # so that of its root is below 3 / 4 / 11970. Six standard errors.
    assert noise(still + tau * rows) == pytest.approx(tau, rel=6 * math.sqrt(0.75 / 11970))


def test_noise_needs_two_rows_of_numbers() -> None:
    assert noise(torch.ones(5, 3)) == 0.0
    with pytest.raises(ValueError, match="two adjacent rows"):
        noise(torch.ones(1, 3))
    with pytest.raises(ValueError, match="NaN or an infinity"):
        noise(torch.tensor([[1.0], [-INF]]))


@pytest.mark.parametrize("tau", [0.0, -1.0, math.nan, INF])
def test_tau_must_be_positive(tau: float) -> None:
    with pytest.raises(ValueError, match="tau must be a positive number"):
        check_tau(tau)
