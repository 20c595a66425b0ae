"""Water-filling, top-p and max-ratio against sorting in plain Python; budgets to the block; what changes nothing."""

from __future__ import annotations

import dataclasses
import math
import random
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from rankings import Drawn, bounds, drawn, greedy, pools

import closecall
from closecall import RULES, SCORERS, Policy
from closecall.ranking import Ranked
from closecall.rules.fill import Fill
from closecall.rules.max_ratio import MaxRatio
from closecall.rules.pooled import Pooled, later_first, ordered, spend
from closecall.rules.top_p import TopP
from closecall.rules.topk import TopK
from compare import kept_of
from drawing import over

SEEDS = st.integers(0, 2**40)
LOGITS = [-math.inf, -3.0, -0.5, -0.0, 0.0, 0.25, 2.0, 2.5, math.inf]
SHARES = [0.0, 2.0**-20, 2.0**-6, 2.0**-5, 0.125, 0.25]
RULE_CLASSES: list[type[Pooled]] = [Fill, TopP, MaxRatio]


@over(300, seed=SEEDS)
def test_spend_takes_the_most_wanted_slots(seed: int) -> None:
    r = random.Random(seed)
    shape = torch.Size((r.randint(1, 2), r.randint(1, 3), r.randint(1, 5)))
    n, width = shape.numel(), r.randint(1, 6)
    span = r.choice([1, 3, 2**40])
    wanted = torch.tensor([sorted((r.randint(-span, span) for _ in range(width)), reverse=True) for _ in range(n)])
    high = torch.tensor([r.randint(0, width) for _ in range(n)])
    low = torch.tensor([r.randint(0, int(h)) for h in high])
    pool = torch.tensor([r.randint(0, 2) for _ in range(n)])
    total = torch.tensor([r.randint(int(low[pool == p].sum()), int(high[pool == p].sum())) for p in range(3)])
    got = spend(wanted, low, high, pool, total, later_first(shape, torch.device("cpu"))).view(shape)
    cells = torch.arange(n).view(shape)
    for p in range(3):
        members = [tuple(c) for c in (pool.view(shape) == p).nonzero().tolist()]
        at = {c: int(cells[c]) for c in members}
        # One batch row after the other: within a pool of several, ties go to the first row.
        expected = greedy_rows({c: wanted[at[c]].tolist() for c in members}, {c: int(low[at[c]]) for c in members},
                               {c: int(high[at[c]]) for c in members}, int(total[p]))  # fmt: skip
        assert {c: int(got[c]) for c in members} == expected


def greedy_rows(wanted: Any, low: Any, high: Any, total: int) -> Any:
    got = dict(low)
    others = [(-wanted[c][s], s, c[0], -c[2], c[1], c) for c in wanted for s in range(low[c], high[c])]
    for *_, cell in sorted(others)[: total - sum(low.values())]:
        got[cell] += 1
    return got


@over(100, values=st.lists(st.floats(width=32, allow_nan=False), min_size=2, max_size=10))
def test_ordered_compares_as_numbers_do(values: list[float]) -> None:
    keys = ordered(torch.tensor(values)).tolist()
    for a, x in zip(values, keys, strict=True):
        for b, y in zip(values, keys, strict=True):
            assert (a < b, a == b) == (x < y, x == y)


def wanted_by(rule: Pooled, scores: list[float]) -> list[Any]:
    """How much each free block of a cell is wanted, from the definitions."""
    if isinstance(rule, TopP):
        return [sum(Fraction(s) for s in scores[i:]) for i in range(len(scores))]
    if isinstance(rule, MaxRatio) and rule.shares:
        return [Fraction(s) / Fraction(scores[0]) if scores[0] else 1 for s in scores]
    if isinstance(rule, MaxRatio):
        return [0.0 if s == scores[0] else s - scores[0] for s in scores]
    return list(scores)


def expected_counts(case: Drawn, rule: Pooled, *, pool: str) -> dict[tuple[int, int, int], int]:
    expected = {}
    for cells in pools(case, pool):
        limits = {c: bounds(case, c, rule.tile_budget, rule.least, rule.most) for c in cells}
        wanted = {c: wanted_by(rule, case.scores[c]) for c in cells}
        low, high = ({c: limits[c][i] for c in cells} for i in (0, 1))
        expected |= greedy(wanted, low, high, sum(limits[c][2] for c in cells))
    return {c: n + int(case.ranked.forced[c[0], c[2]]) for c, n in expected.items()}


@pytest.mark.parametrize("pool", ["layer", "tile"])
@pytest.mark.parametrize(
    ("rule", "values"),
    [
        (Fill(budget=5, tile_factor=1), LOGITS),
        (Fill(budget=4, tile_factor=1, floor=0, cap=1.5), SHARES),
        (Fill(budget=2, tile_factor=2, floor=0.75, cap=20), LOGITS),
        (TopP(budget=5, tile_factor=1, shares=True), SHARES),
        (TopP(budget=5, tile_factor=1, shares=True, floor=0.6, cap=2), SHARES),
        (MaxRatio(budget=5, tile_factor=1, shares=True), SHARES),
        (MaxRatio(budget=4, tile_factor=1, floor=0.3, cap=2.5), LOGITS),
    ],
)
@over(60, seed=SEEDS)
def test_counts_against_plain_python(rule: Pooled, values: list[float], pool: str, seed: int) -> None:
    case = drawn(seed, values)
    made = dataclasses.replace(rule, among=pool)
    decision = made.decide(case.ranked)
    expected = expected_counts(case, made, pool=pool)
    assert {c: int(decision.counts[c]) for c in expected} == expected
    assert int(decision.counts.sum()) == sum(expected.values())  # nothing for tiles that do not exist
    eligible = (case.ranked.visible > made.tile_budget)[:, None]
    assert torch.equal(decision.triggered, decision.counts > made.tile_budget)
    assert bool((decision.counts[eligible.expand_as(decision.counts)] >= made.least).all())
    assert bool((decision.counts <= max(made.most, made.tile_budget)).all())


@over(60, seed=SEEDS)
def test_top_p_of_logits_goes_where_most_is_dropped(seed: int) -> None:
    """Exponentials are rounded, so not the cells but what they lost is compared."""
    case = drawn(seed, [-3.0, -0.5, 0.0, 0.25, 2.0])
    rule = TopP(budget=5, tile_factor=1)
    counts = rule.decide(case.ranked).counts
    uniform = TopK(budget=5, tile_factor=1).decide(case.ranked).counts
    for places in case.sequences.values():
        cells = [(b, h, t) for b, t in places for h in range(case.heads)]
        assert sum(int(counts[c]) for c in cells) == sum(int(uniform[c]) for c in cells)
        taken, left = [math.inf], [0.0]
        for cell in cells:
            low, high, _ = bounds(case, cell, 5, 0, rule.most)
            n = int(counts[cell]) - int(case.ranked.forced[cell[0], cell[2]])
            weights = [math.exp(s) for s in case.scores[cell]]
            dropped = [sum(weights[i:]) / sum(weights) for i in range(len(weights))]
            taken += dropped[low:n]
            left += dropped[n:high]
        assert min(taken) >= max(left) - 1e-9


def test_top_p_with_infinite_scores() -> None:
    """An infinite score weighs all there is; two share it; blocks of score -inf weigh nothing beside any other."""
    scores = torch.tensor([[math.inf, 1.0, 0.0], [math.inf, math.inf, 0.0], [-math.inf] * 3])
    ranked = Ranked(
        torch.zeros(1, 3, 1, 3, dtype=torch.int32), scores.view(1, 3, 1, 3), torch.tensor([[4]]), torch.tensor([[1]]),
        torch.zeros(1, 1, dtype=torch.int64),
    )  # fmt: skip
    counts = TopP(budget=2, tile_factor=1, p=0.9).decide(ranked).counts.flatten().tolist()
    assert counts == [2, 3, 4]


@pytest.mark.parametrize("p", [0.2, 0.5, 0.75, 0.97, 1])
@over(40, seed=SEEDS)
def test_a_given_p_is_reached_and_no_block_too_many(p: float, seed: int) -> None:
    case = drawn(seed, SHARES)
    rule = TopP(budget=3, tile_factor=1, shares=True, p=p, cap=10)
    counts = rule.decide(case.ranked).counts
    for cell, scores in case.scores.items():
        forced, visible = (int(x[cell[0], cell[2]]) for x in (case.ranked.forced, case.ranked.visible))
        kept = next(n for n in range(len(scores) + 1) if 1 - sum(map(Fraction, scores[n:])) >= Fraction(str(p)))
        assert int(counts[cell]) == (visible if visible <= 3 else forced + kept)


@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("ratio", [0.25, 0.125, 1])
@over(40, seed=SEEDS)
def test_a_given_ratio_is_kept_to(ratio: float, shares: bool, seed: int) -> None:
    values = SHARES if shares else [-8.0, -1.0, 0.0, 0.5, 1.5]
    case = drawn(seed, values)
    rule = MaxRatio(budget=3, tile_factor=1, shares=shares, ratio=ratio, floor=0, cap=3)
    counts = rule.decide(case.ranked).counts
    for cell, scores in case.scores.items():
        forced, visible = (int(x[cell[0], cell[2]]) for x in (case.ranked.forced, case.ranked.visible))
        kept = sum(s >= ratio * scores[0] if shares else s - scores[0] >= math.log(ratio) for s in scores)
        assert int(counts[cell]) == (visible if visible <= 3 else min(forced + kept, 9, visible))


@pytest.mark.parametrize("pool", ["layer", "tile"])
@over(40, seed=SEEDS)
def test_heads_on_two_ranks_get_what_they_get_on_one(pool: str, seed: int) -> None:
    case = drawn(seed, LOGITS)
    if case.heads < 2:
        return
    rule = Fill(budget=4, tile_factor=1, among=pool)
    whole = rule.decide(case.ranked).counts
    ranks = [slice(0, 1), slice(1, None)]
    wanted = [rule.wanted(part(case.ranked, heads)) for heads in ranks]
    for heads in ranks:
        mine = dataclasses.replace(part(case.ranked, heads), all_heads=lambda _, h=heads: (torch.cat(wanted, 1), h))
        assert torch.equal(rule.decide(mine).counts, whole[:, heads])


def part(ranked: Ranked, heads: slice) -> Ranked:
    return dataclasses.replace(ranked, order=ranked.order[:, heads], scores=ranked.scores[:, heads])


# -- through select ----------------------------------------------------------------------------------------------------


def tensors(seed: int, batch: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q, k = (2 * torch.randn(batch, h, length, 16, generator=generator) for h in (4, 2))
    return q, k


def policies(**changes: Any) -> dict[str, Policy]:
    grid: dict[str, Any] = {"scorer": SCORERS["quest"](), "block": 8, "tile": 8}
    by_name = {}
    for cls in RULE_CLASSES:
        for pool in ("layer", "tile"):
            made = cls(**{"budget": 5, "tile_factor": 1, "among": pool} | changes)
            by_name[f"{cls.name} {pool}"] = Policy(rule=made, **grid)
    return by_name


@pytest.mark.parametrize("name", policies())
def test_the_budget_is_kept_to_the_block(name: str) -> None:
    """In a padded batch of a long, a short and a tiny sequence: of each by itself, over all heads of the layer."""
    q, k = tensors(1, 3, 203)
    padding = torch.arange(203) >= torch.tensor([[0], [90], [190]])
    made = policies()[name]
    kept = closecall.select(q, k, made, key_padding=padding)
    uniform = closecall.select(q, k, made.replace(rule=TopK(budget=5, tile_factor=1)), key_padding=padding)
    assert torch.equal(kept.counts.sum((1, 2)), uniform.counts.sum((1, 2)))
    assert kept.effective_budget == uniform.effective_budget
    if "tile" in name:
        assert torch.equal(kept.counts.sum(1), uniform.counts.sum(1))
    kept.check()
    assert not torch.equal(kept.counts, uniform.counts)
    assert bool((kept.counts.amin((1, 2)) >= 0).all())


@pytest.mark.parametrize("name", policies())
def test_a_prefix_of_the_ranking_is_kept(name: str) -> None:
    """Whatever a cell keeps more, uniform top-k of that many blocks keeps the same ones."""
    q, k = tensors(2, 1, 160)
    made = policies()[name]
    kept = closecall.select(q, k, made)
    for n in set(kept.counts.flatten().tolist()):
        if n > 2:
            uniform = kept_of(closecall.select(q, k, made.replace(rule=TopK(budget=n, tile_factor=1))))
            same = [c for c, blocks in kept_of(kept).items() if len(blocks) == n]
            assert all(kept_of(kept)[c] == uniform[c] for c in same)


@pytest.mark.parametrize("name", policies())
def test_floor_and_cap_at_the_budget_are_top_k(name: str) -> None:
    q, k = tensors(3, 2, 150)
    made = policies(floor=1, cap=1)[name]
    kept, uniform = (closecall.select(q, k, p) for p in (made, made.replace(rule=TopK(budget=5, tile_factor=1))))
    assert kept_of(kept) == kept_of(uniform)
    assert torch.equal(kept.margin.nan_to_num(2), uniform.margin.nan_to_num(2))
    assert not bool(kept.triggered.any())


@pytest.mark.parametrize("name", policies())
def test_a_budget_for_everything_is_dense(name: str) -> None:
    q, k = tensors(4, 1, 60)
    made = policies(budget=8)[name]
    assert kept_of(closecall.select(q, k, made)) == kept_of(closecall.select(q, k, "dense"
        if made.block == 64 else Policy(None, RULES["dense"](), block=8, tile=8)))  # fmt: skip


@pytest.mark.parametrize("name", policies())
def test_neighbours_change_nothing(name: str) -> None:
    """Alone, in another order, beside longer ones, and packed."""
    made = policies()[name]
    lengths = [170, 77, 120]
    alone = [tensors(10 + i, 1, n) for i, n in enumerate(lengths)]
    expected = [kept_of(closecall.select(q, k, made)) for q, k in alone]
    for order in ([0, 1, 2], [2, 0, 1]):
        padding = torch.zeros(3, 170, dtype=torch.bool)
        q, k = (torch.zeros(3, h, 170, 16) for h in (4, 2))
        for b, i in enumerate(order):
            padding[b, : lengths[i]] = True
            q[b, :, : lengths[i]], k[b, :, : lengths[i]] = alone[i][0][0], alone[i][1][0]
        together = kept_of(closecall.select(q, k, made, key_padding=padding))
        for b, i in enumerate(order):
            assert all(together[b, h, t] == blocks for (_, h, t), blocks in expected[i].items())
    packed = [torch.cat([pair[i] for pair in alone], 2) for i in range(2)]
    cu = torch.tensor([0, *lengths]).cumsum(0)
    together = kept_of(closecall.select(*packed, made, cu_seqlens=cu))
    first = 0
    for i, n in enumerate(lengths):
        assert all(together[0, h, first + t] == blocks for (_, h, t), blocks in expected[i].items())
        first += -(-n // 8)


@pytest.mark.parametrize("aggregate", ["mass", "mass-max"])
@pytest.mark.parametrize("rule", ["fill", "top-p", "max-ratio"])
def test_on_shares_of_mass_by_name(rule: str, aggregate: str) -> None:
    q, k = tensors(5, 1, 160)
    made = closecall.policy(f"{rule}-on-quest", budget=5, tile_factor=1, block=8, tile=8, aggregate=aggregate, cap=3)
    assert (made.rule.name, made.rule.cap, made.aggregate) == (rule, 3, aggregate)
    uniform = closecall.policy("quest", budget=5, tile_factor=1, block=8, tile=8, aggregate=aggregate)
    assert closecall.select(q, k, made).effective_budget == closecall.select(q, k, uniform).effective_budget
    assert Policy.from_json(made.to_json()) == made


def test_filling_keeps_the_most_estimated_mass() -> None:
    """Of all rules with the budget: its threshold is on the very shares that are summed."""
    from closecall.backends import reference
    from closecall.geometry import plan

    q, k = tensors(6, 1, 160)
    held = {}
    for name in ("topk", "fill", "top-p", "max-ratio"):
        more = {} if name == "topk" else {"floor": 0, "cap": 10}
        made = closecall.policy(
            f"{name}-on-quest", budget=5, tile_factor=1, block=8, tile=8, aggregate="mass", **more
        )  # fmt: skip
        kept = closecall.select(q, k, made)
        shares = reference.tile_scores(q, k, made, plan(1, 160, 160, 8, 8), 0.25)
        held[name] = sum(float(shares[cell][blocks].sum()) for cell, blocks in kept_of(kept).items())
    assert max(held, key=lambda name: held[name]) == "fill"
    assert held["fill"] > held["topk"]


@pytest.mark.parametrize(
    ("cls", "given", "fragments"),
    [
        (Fill, {"floor": 1.5, "budget": 10}, ["floor", "1.5", "20 blocks", "tile budget"]),
        (Fill, {"floor": -0.1}, ["floor", "[0, 1]", "-0.1"]),
        (Fill, {"floor": "1"}, ["floor", "'1'"]),
        (Fill, {"cap": 0.5}, ["cap", "at least 1", "0.5"]),
        (Fill, {"cap": math.inf}, ["cap", "inf"]),
        (Fill, {"among": "layr"}, ["among", "layr", "did you mean 'layer'"]),
        (Fill, {"budget": 0}, ["budget", "0"]),
        (TopP, {"p": 0}, ["p must be in (0, 1]", "0"]),
        (TopP, {"p": 1.5}, ["p must be in (0, 1]", "1.5"]),
        (MaxRatio, {"ratio": 2}, ["ratio", "(0, 1]", "2"]),
        (MaxRatio, {"ratio": True}, ["ratio", "True"]),
    ],
)
def test_bad_numbers(cls: type[Pooled], given: dict[str, Any], fragments: list[str]) -> None:
    with pytest.raises(ValueError, match=r".") as error:
        cls(**given)
    assert all(f in str(error.value) for f in fragments), str(error.value)


def test_what_scores_mean_must_be_known() -> None:
    for rule, aggregate, fragment in ((TopP(shares=True), "max", "logits"), (MaxRatio(), "mass", "shares of softmax")):
        with pytest.raises(ValueError, match=fragment) as error:
            Policy(SCORERS["quest"](), rule, aggregate=aggregate)
        assert "shares=" in str(error.value)


def test_a_line_each() -> None:
    for rule in (Fill(), TopP(), TopP(p=0.9), MaxRatio(among="tile"), MaxRatio(ratio=0.1)):
        line = str(Policy(SCORERS["quest"](), rule))
        assert "\n" not in line
        assert f"{rule.least} to {rule.most}" in line
