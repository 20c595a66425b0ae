"""The budget-matched control keeps what the router kept, on every engine, and spreads it evenly."""

from __future__ import annotations

import itertools
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import closecall
import oracle
from closecall import Policy
from closecall.rules.even import Even, spread
from closecall_lab.eval.matched import TOLERANCE, matched
from compare import assert_attention, kept_of
from engines import Engine, compiled


def qkv(tokens: int, *, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q, k = (torch.randint(-3, 4, (1, h, tokens, 32), generator=generator).float() for h in (4, 2))
    return q, k, torch.randn(1, 2, tokens, 32, generator=generator)


@pytest.mark.parametrize("trigger", ["quantile", "random", "last"])
@pytest.mark.parametrize(("tokens", "budget"), [(900, 6), (1024, 9), (333, 5), (2000, 40)])
def test_it_keeps_what_the_router_kept(tokens: int, budget: int, trigger: str) -> None:
    router = closecall.policy("router-on-quest", block=16, tile=16, budget=budget, tile_factor=1, trigger=trigger)
    q, k, _ = qkv(tokens)
    spent = closecall.select(q, k, router).effective_budget
    control = matched(router, spent, tokens)
    assert (control.scorer, control.block, control.tile) == (router.scorer, 16, 16)
    kept = closecall.select(q, k, control)
    tiles = kept.counts.shape[2]
    assert abs(kept.effective_budget - spent) * tiles <= 0.5 + 1e-6  # as near as whole blocks allow
    assert abs(kept.effective_budget / spent - 1) <= TOLERANCE
    assert not kept.triggered.any()
    levels = {int(c) for c, v in zip(kept.counts[0, 0], kept.geometry.visible[0], strict=True) if c < v}
    assert len(levels) == 0 or max(levels) - min(levels) <= 1


@compiled
def test_every_engine_takes_the_rule(engine: Engine) -> None:
    q, k, v = qkv(400)
    policy = Policy(scorer=closecall.SCORERS["quest"](), rule=Even(keep=6.3), block=16, tile=16)
    selection = engine.select(q, k, policy, scale=1.0)
    plan = oracle.tiles(1, 400, 400, 16, 16)
    counts = selection.counts[0, 0].tolist()
    assert [t.number for t in plan if len(t.visible) > 6] == list(range(6, 25))
    assert counts[:6] == [1, 2, 3, 4, 5, 6]
    assert sum(counts[6:]) == 6 * 19 + round(0.3 * 19)
    for t in plan:
        for h in range(4):
            scores = oracle.block_scores(oracle.exact(q), oracle.exact(k), t, h, "quest", "max", 1.0, 1, 0.0)
            best = oracle.ranking(scores)[: counts[t.number] - len(t.forced(1))]
            assert kept_of(selection)[0, h, t.number] == sorted(t.forced(1) | set(best))
    out, lse = engine.attention(q, k, v, policy, scale=1.0, return_lse=True)
    assert_attention(out, lse, oracle.attend(q, k, v, kept_of(selection), plan, 1.0))


@compiled
@pytest.mark.parametrize("scorer", ["mean", "quest"])
def test_whole_numbers_are_top_k(engine: Engine, scorer: str) -> None:
    q, k, _ = qkv(300)
    name = {"mean": "topk", "quest": "quest"}[scorer]
    plain = closecall.policy(name, block=16, tile=16, budget=7, tile_factor=1)
    even = plain.replace(rule=Even(keep=7))
    a, b = (engine.select(q, k, p) for p in (plain, even))
    for field in ("kv_idx", "counts", "triggered"):
        assert torch.equal(getattr(a, field), getattr(b, field))
    assert torch.equal(a.margin.nan_to_num(-1), b.margin.nan_to_num(-1))


@given(
    rows=st.lists(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=9, max_size=9), min_size=1, max_size=3),
    percent=st.integers(0, 100),
)
def test_the_spread_is_even_and_exact(rows: list[list[tuple[bool, bool]]], percent: int) -> None:
    """Rows of (eligible, first of its sequence): of any run of eligible tiles the share is met to within one."""
    eligible = torch.tensor([[e for e, _ in row] for row in rows])
    sequence = (
        torch.tensor([[new for _, new in row] for row in rows]).cumsum(1) + 100 * torch.arange(len(rows))[:, None]
    )
    marked = spread(eligible, sequence, percent / 100)
    share = Fraction(percent, 100)
    assert not (marked & ~eligible).any()
    for number in sequence.unique():
        inside = marked[(sequence == number) & eligible].tolist()
        total = sum(inside)
        assert total in (int(share * len(inside) + Fraction(1, 2)), round(share * len(inside)))
        for i, j in itertools.combinations(range(len(inside) + 1), 2):
            assert abs(sum(inside[i:j]) - share * (j - i)) <= 1


def test_it_travels_as_json_and_prints() -> None:
    policy = closecall.policy("router", budget=33).replace(rule=Even(keep=92.375))
    assert Policy.from_json(policy.to_json()) == policy
    assert policy.name == "even-on-mean"
    assert "keep 92.38 blocks a tile, all tiles alike" in str(policy)


def test_errors() -> None:
    with pytest.raises(ValueError, match="keep must be a number of blocks a tile, at least 1, got 0"):
        Even(keep=0)
    router = closecall.policy("router", budget=33)
    with pytest.raises(ValueError, match="only a router has a budget-matched control, not topk"):
        matched(closecall.policy("topk", budget=33), 66, 32768)
    with pytest.raises(ValueError, match=r"no policy keeps 70 blocks a tile of 4096 tokens: its 64 tiles see 32\.5"):
        matched(router, 70, 4096)
    low = closecall.policy("router", budget=33).replace(rule=Even(keep=2.5))
    with pytest.raises(ValueError, match="tile budget 2 must exceed the 2 forced blocks"):
        closecall.select(*qkv(400)[:2], low)
