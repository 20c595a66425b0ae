"""Order statistics by hand, what bfloat16 does to them, and inputs that have none."""

from __future__ import annotations

import math

import pytest
import torch

from closecall_lab.theory.gaps import Tiles, check_tau, floors, gaps

INF = math.inf


def test_by_hand() -> None:
    scores = torch.tensor([[9.0, 7.0, 6.0, 2.0, 1.0, 0.5], [5.0, 5.0, 5.0, 5.0, -INF, -INF]])
    found = gaps(Tiles(scores, torch.tensor([2, 3]), torch.tensor([4, 4])))
    assert found.cutoff.tolist() == [1.0, 0.0]
    assert found.expansion.tolist() == [6.0, INF]  # the second tile has nothing beyond its expanded set
    assert found.spread.tolist() == [3.0, 0.0]
    assert found.margin.tolist() == pytest.approx([1 / 3, 0.0])


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


@pytest.mark.parametrize("tau", [0.0, -1.0, math.nan, INF])
def test_tau_must_be_positive(tau: float) -> None:
    with pytest.raises(ValueError, match="tau must be a positive number"):
        check_tau(tau)
