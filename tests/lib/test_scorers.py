"""Block summaries and row scores."""

from __future__ import annotations

import pytest
import torch

import closecall
from closecall.scorers.reductions import REDUCTIONS

MEAN, QUEST = closecall.SCORERS["mean"](), closecall.SCORERS["quest"]()


@pytest.mark.parametrize("n", [1, 15, 16, 17, 40])
def test_a_short_block_is_pooled_over_its_own_keys(n: int) -> None:
    keys = torch.randn(2, 3, n, 8, dtype=torch.float64) + 5  # far from 0, so that a padded zero would show
    (mean,) = MEAN.summarise(keys, 16)
    high, low = QUEST.summarise(keys, 16)
    assert mean.shape == high.shape == low.shape == (2, 3, -(-n // 16), 8)
    for b in range(-(-n // 16)):
        mine = keys[:, :, b * 16 : (b + 1) * 16]
        assert torch.allclose(mean[:, :, b], mine.mean(2))
        assert torch.equal(high[:, :, b], mine.max(2).values)
        assert torch.equal(low[:, :, b], mine.min(2).values)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_summaries_and_scores_are_float32(dtype: torch.dtype) -> None:
    """64 keys of 1 + 2^-7 sum to a number bfloat16 cannot hold, and float16 overflows where float32 does not."""
    keys = torch.full((1, 64, 4), 1 + 2**-7, dtype=dtype)
    (mean,) = MEAN.summarise(keys, 64)
    assert mean.dtype == torch.float32
    assert bool((mean == 1 + 2**-7).all())
    rows = torch.full((1, 1, 4), 200.0, dtype=dtype)
    scores = QUEST.row_scores(rows, QUEST.summarise(torch.full((1, 64, 4), 200.0, dtype=dtype), 64))
    assert scores.dtype == torch.float32
    assert bool((scores == 160_000).all())


def test_quest_bounds_every_key_of_the_block() -> None:
    generator = torch.Generator().manual_seed(0)
    keys, rows = (torch.randn(3, n, 16, dtype=torch.float64, generator=generator) for n in (100, 20))
    scores = QUEST.row_scores(rows, QUEST.summarise(keys, 32))
    best = torch.stack([(rows @ b.transpose(1, 2)).amax(-1) for b in keys.split(32, 1)], -1)
    assert bool((scores >= best - 1e-12).all())
    one_key = QUEST.row_scores(rows, QUEST.summarise(keys, 1))
    assert torch.allclose(one_key, rows @ keys.transpose(1, 2))  # a block of one key is its own box


def test_quest_scores_with_infinite_keys_stay_numbers() -> None:
    """The matrix form would make 0 * inf of the half of the box a row does not look at."""
    keys = torch.randn(1, 8, 4)
    keys[0, 2, 1] = -torch.inf
    rows = torch.tensor([[[1.0, 2.0, 3.0, 4.0], [1.0, -2.0, 3.0, 4.0]]])
    scores = QUEST.row_scores(rows, QUEST.summarise(keys, 4))
    assert bool(scores[0, 0].isfinite().all())
    assert float(scores[0, 1, 0]) == torch.inf


def test_a_row_of_nan_has_no_say_in_a_maximum() -> None:
    rows = torch.tensor([[1.0, 5.0], [torch.nan, torch.nan], [2.0, -torch.inf]])
    assert REDUCTIONS["max"](rows).tolist() == [2.0, 5.0]
    assert REDUCTIONS["mean"](rows[::2]).tolist() == [1.5, -torch.inf]


def test_names() -> None:
    assert set(closecall.SCORERS.names()) >= {"mean", "quest"}
    assert set(REDUCTIONS) == {"max", "mean", "mass", "mass-max", "softmax"}
