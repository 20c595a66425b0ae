"""Rules and triggers on rankings made by hand, and the triggers against plain Python."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import strategies as st

import closecall
import oracle
from closecall.ranking import Ranked, margins
from drawing import over


def ranked(scores: list[float], visible: int, forced: int) -> Ranked:
    """One head, one tile."""
    return Ranked(
        order=torch.arange(len(scores), dtype=torch.int32).view(1, 1, 1, -1),
        scores=torch.tensor(scores).view(1, 1, 1, -1),
        visible=torch.tensor([[visible]]),
        forced=torch.tensor([[forced]]),
        sequence=torch.zeros(1, 1, dtype=torch.int64),
    )


@pytest.mark.parametrize(
    ("scores", "visible", "forced", "tile_budget", "margin"),
    [
        ([8.0, 6.0, 5.0, 1.0, 0.0], 7, 2, 4, (6 - 5) / (8 - 5)),
        ([8.0, 6.0, 5.0, 1.0, 0.0], 7, 2, 5, (5 - 1) / (8 - 1)),
        ([8.0, 6.0, 5.0, 1.0, 0.0], 7, 2, 3, 1.0),  # c = 1
        ([8.0, 6.0, 6.0, 1.0, 0.0], 7, 2, 4, 0.0),  # a tie at the cut
        ([3.0, 3.0, 3.0, 3.0, 3.0], 7, 2, 4, 0.0),  # 0 / 0
        ([8.0, 6.0, 5.0, 1.0, 0.0], 7, 2, 7, math.nan),  # all fit
        ([8.0, 6.0, 5.0, 1.0, 0.0], 7, 2, 6, (1 - 0) / (8 - 0)),
        ([math.inf, 6.0, 5.0, 1.0, 0.0], 7, 2, 4, 0.0),
        ([math.inf, math.inf, 5.0, 1.0, 0.0], 7, 2, 4, 0.0),  # inf / inf
        ([8.0, 6.0, -math.inf, -math.inf, -math.inf], 7, 2, 4, 0.0),
        ([3e38, -1e38, -3e38, -3e38, -3e38], 7, 2, 4, 0.0),  # the difference overflows
    ],
)
def test_margin_by_hand(scores: list[float], visible: int, forced: int, tile_budget: int, margin: float) -> None:
    got = float(margins(ranked(scores, visible, forced), tile_budget))
    assert got == pytest.approx(margin, rel=1e-6, nan_ok=True)


MARGINS = st.sampled_from([0.0, 0.25, 0.5, 1.0, 2.0**-20, 1 / 3])


@st.composite
def batches(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Margins [B, H, T] full of ties, eligibility [B, T] and sequence ids [B, T], -1 for tiles that do not exist."""
    batch, heads, n_tiles = draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.integers(1, 12))
    margin = torch.tensor(draw(st.lists(MARGINS, min_size=batch * heads * n_tiles, max_size=batch * heads * n_tiles)))
    margin = margin.float().view(batch, heads, n_tiles)
    sequence = torch.full((batch, n_tiles), -1)
    eligible = torch.zeros(batch, n_tiles, dtype=torch.bool)
    number = 0
    for b in range(batch):
        cuts = sorted(draw(st.lists(st.integers(0, n_tiles), max_size=3)))
        for start, stop in zip([0, *cuts], cuts or [n_tiles], strict=False):
            sequence[b, start:stop] = number
            eligible[b, draw(st.integers(start, max(start, stop))) : stop] = True
            number += stop > start  # a sequence has at least one tile
    eligible &= sequence >= 0
    return margin.masked_fill(~eligible[:, None], torch.nan), eligible, sequence


QS = st.sampled_from([0, 1, 0.4, 0.07, 1 / 3, 0.5, 0.99, 1e-12])


@pytest.mark.parametrize("kind", ["quantile", "per-cell", "absolute", "last"])
@over(150, batch=batches(), q=QS)
def test_triggers_against_plain_python(kind: str, batch, q: float) -> None:
    margin, eligible, sequence = batch
    trigger = closecall.TRIGGERS[kind](**({"threshold": 0.25} if kind == "absolute" else {}))
    fired = trigger.fire(margin, eligible, sequence, q)
    assert fired.shape == margin.shape
    assert fired.dtype == torch.bool
    expected = torch.zeros_like(margin, dtype=torch.bool)
    for s in sequence.unique().tolist():
        b, tiles = (sequence == s).nonzero(as_tuple=True)
        if s < 0:
            continue
        mine = margin[b[0]][:, tiles].double().numpy()
        expected[b[0], :, tiles] = torch.from_numpy(oracle.triggered(kind, q, 0.25, mine))
    assert torch.equal(fired, expected)


@over(100, batch=batches(), q=QS, seed=st.integers(0, 2**31 - 1))
def test_random_fires_as_often_as_the_quantile_whatever_the_margins(batch, q: float, seed: int) -> None:
    margin, eligible, sequence = batch
    trigger = closecall.TRIGGERS["random"](seed=seed)
    fired = trigger.fire(margin, eligible, sequence, q)
    quantile = closecall.TRIGGERS["quantile"]().fire(margin, eligible, sequence, q)
    for s in sequence.unique().tolist():
        here = (sequence == s)[:, None] & torch.ones_like(fired)
        assert fired[here].sum() == quantile[here].sum()
    assert torch.equal(fired, trigger.fire(margin.roll(1, 2).nan_to_num(0.5), eligible, sequence, q))


def test_random_is_even_and_its_seeds_are_independent() -> None:
    """Over 4000 seeds each of 40 tiles fires 40% of the time, and any two of them together 16% (binomial, 6 sigma)."""
    n_tiles, n_seeds, q = 40, 4000, 0.4
    margin = torch.zeros(1, 1, n_tiles)
    eligible, sequence = torch.ones(1, n_tiles, dtype=torch.bool), torch.zeros(1, n_tiles, dtype=torch.int64)
    fire = closecall.TRIGGERS["random"]
    fired = torch.stack([fire(seed=s).fire(margin, eligible, sequence, q)[0, 0] for s in range(n_seeds)]).double()
    rate = fired.mean(0)
    assert bool(((rate - q).abs() < 6 * (q * (1 - q) / n_seeds) ** 0.5).all()), rate
    together = (fired.T @ fired / n_seeds)[~torch.eye(n_tiles, dtype=torch.bool)]
    chance = q * (16 - 1) / (n_tiles - 1)  # drawn without replacement
    assert bool(((together - chance).abs() < 6 * (chance * (1 - chance) / n_seeds) ** 0.5).all())


def test_random_draws_depend_on_the_tile_within_its_sequence_only() -> None:
    fire = closecall.TRIGGERS["random"](seed=3).fire
    one = fire(torch.zeros(1, 2, 20), torch.ones(1, 20, dtype=torch.bool), torch.zeros(1, 20, dtype=torch.int64), 0.4)
    sequence = torch.tensor([[4] * 7 + [5] * 20, [6] * 20 + [-1] * 7])
    many = fire(torch.rand(2, 2, 27), sequence >= 0, sequence, 0.4)
    assert torch.equal(many[0, :, 7:], one[0])
    assert torch.equal(many[1, :, :20], one[0])


@pytest.mark.parametrize(("q", "total", "count"), [(0.07, 100, 7), (0.4, 5, 2), (0.4, 6, 3), (1e-12, 3, 1), (0, 9, 0)])
def test_the_share_is_exact_for_the_decimal_that_was_typed(q: float, total: int, count: int) -> None:
    """In binary 0.07 * 100 is above 7."""
    margin, eligible = torch.rand(1, 3, total), torch.ones(1, total, dtype=torch.bool)
    fired = closecall.TRIGGERS["quantile"]().fire(margin, eligible, torch.zeros(1, total, dtype=torch.int64), q)
    assert int(fired[0, 0].sum()) == count
    assert oracle.how_many(q, total) == count


def test_the_mean_over_heads_does_not_depend_on_their_order() -> None:
    """Sums of floats would: among many tiles of nearly equal mean, some order always flips a pair."""
    generator = torch.Generator().manual_seed(0)
    margin = torch.rand(1, 40, 1, generator=generator).expand(1, 40, 64).clone()
    for t in range(64):  # the same 40 numbers in another order: exactly tied
        margin[0, :, t] = margin[0, torch.randperm(40, generator=generator), t]
    eligible, sequence = torch.ones(1, 64, dtype=torch.bool), torch.zeros(1, 64, dtype=torch.int64)
    fired = closecall.TRIGGERS["quantile"]().fire(margin, eligible, sequence, 0.25)
    assert fired[0, 0].nonzero()[:, 0].tolist() == list(range(48, 64))


def test_sequences_do_not_share_a_quota() -> None:
    """A batch of a decided and an undecided sequence: each expands its own share."""
    margin = torch.stack([torch.full((2, 10), 0.9), torch.full((2, 10), 0.1)])
    eligible, sequence = torch.ones(2, 10, dtype=torch.bool), torch.arange(2)[:, None].expand(2, 10)
    for kind in ("quantile", "per-cell", "random", "last"):
        fired = closecall.TRIGGERS[kind]().fire(margin, eligible, sequence, 0.3)
        assert fired.sum((1, 2)).tolist() == [6, 6]
    fired = closecall.TRIGGERS["absolute"](threshold=0.1).fire(margin, eligible, sequence, 0.3)
    assert fired.sum((1, 2)).tolist() == [0, 20]


def test_topk_counts() -> None:
    rule = closecall.policy("topk", budget=2, tile_factor=2).rule
    scores = [5.0, 4.0, 3.0, 2.0]
    assert int(rule.decide(ranked(scores, 6, 2)).counts) == 4
    assert int(rule.decide(ranked(scores, 3, 2)).counts) == 3
    assert rule.limit(100) == 4
    assert rule.limit(3) == 3


def test_router_counts() -> None:
    rule = closecall.policy("router", budget=5, tile_factor=1, q=1, rho=1.5).rule
    scores = np.arange(7, 0, -1).astype(float).tolist()
    assert int(rule.decide(ranked(scores, 9, 2)).counts) == 7
    assert int(rule.decide(ranked(scores, 6, 2)).counts) == 6
    assert int(rule.decide(ranked(scores, 4, 2)).counts) == 4  # not eligible
    assert rule.limit(100) == 7
    assert Counter(rule.decide(ranked(scores, 4, 2)).triggered.flatten().tolist()) == {False: 1}


@pytest.mark.parametrize(
    ("budget", "tile_factor", "blocks"),
    [(110, 1.1, 121), (100, 1.15, 115), (50, 2.3, 115), (100, 0.07, 7), (30, 1.1, 33), (33, 1 / 3, 11), (33, 2, 66)],
)
def test_the_tile_budget_is_exact_for_the_decimal_that_was_typed(budget: int, tile_factor: float, blocks: int) -> None:
    assert closecall.policy("topk", budget=budget, tile_factor=tile_factor).rule.tile_budget == blocks


@pytest.mark.parametrize("tile_factor", [1.05, float("nan"), float("inf"), 1e-12, True, "2"])
def test_only_whole_tile_budgets(tile_factor: object) -> None:
    with pytest.raises(ValueError, match=r"tile_factor \* budget must be a whole number of blocks, at least 1, got"):
        closecall.policy("topk", budget=30, tile_factor=tile_factor)


@pytest.mark.parametrize("trigger", ["quantile", "random", "last"])
def test_a_router_that_expands_nothing_is_top_k_to_the_last_number(trigger: str) -> None:
    q, k = torch.randn(1, 2, 300, 8), torch.randn(1, 1, 300, 8)
    grid = {"budget": 3, "block": 16, "tile": 16}
    router = closecall.select(q, k, closecall.policy("router", q=0, trigger=trigger, **grid))
    plain = closecall.select(q, k, closecall.policy("topk", **grid))
    assert torch.equal(router.kv_idx, plain.kv_idx)
    assert torch.equal(router.counts, plain.counts)


@pytest.mark.parametrize("text", ["router:budget=3,q=1,rho=1e300", "fill-on-mean:budget=3,cap=1e300,aggregate=mass"])
def test_a_factor_without_bounds_keeps_all_it_may(text: str) -> None:
    q, k = torch.randn(1, 2, 300, 8), torch.randn(1, 1, 300, 8)
    found = closecall.select(q, k, f"{text},block=16,tile=16")
    assert int(found.counts.max()) <= found.n_blocks
    if text.startswith("router"):
        assert torch.equal(found.counts, closecall.select(q, k, closecall.policy("dense", block=16, tile=16)).counts)


def test_a_margin_equal_to_the_threshold_fires() -> None:
    """1/20 and 0.05 are the same number, although float32 rounds it up."""
    margin = torch.tensor([[[1.0 / 20.0, 1.0 / 19.0]]])
    fired = closecall.TRIGGERS["absolute"](threshold=0.05).fire(margin, torch.tensor([[True, True]]), None, 0)
    assert fired.flatten().tolist() == [True, False]
