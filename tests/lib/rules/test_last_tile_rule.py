"""Protection of the last tile: who gets, who pays, and that the mean stays."""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from rankings import Drawn, drawn

import closecall
from closecall import RULES, SCORERS, Policy
from closecall import geometry as plans
from closecall.backends import cpu
from closecall.geometry import plan
from closecall.ranking import Ranked, Source
from closecall.rules import last_tile as last_tile_rule
from closecall.rules.base import Rule
from closecall.rules.even import Even
from closecall.rules.fill import Fill
from closecall.rules.last_tile import LastTile
from closecall.rules.router import Router
from closecall.rules.topk import TopK
from compare import kept_of
from drawing import over

SEEDS = st.integers(0, 2**40)
SCORES = [-1.0, 0.0, 0.5, 2.0]
INNER: dict[str, Rule] = {
    "topk": TopK(budget=5, tile_factor=1),
    "router": Router(budget=5, tile_factor=1, q=0.5, rho=1.6),
    "fill": Fill(budget=5, tile_factor=1, floor=0.4),
    "even": Even(keep=5.4),
}


def settled(case: Drawn, inner: torch.Tensor, rule: LastTile) -> dict[Any, int]:
    """Counts by plain Python: in turns every payer that still can gives one block, earlier tiles first, and every
    protected tile that still wants takes one, later tiles first."""
    budget, n = rule.tile_budget, rule.tiles
    counts = {c: int(inner[c]) for c in case.scores}
    for places in case.sequences.values():
        last, others = places[-n:], places[:-n]
        for h in range(case.heads):
            room = {(b, h, t): int(case.ranked.visible[b, t]) - counts[b, h, t] for b, t in reversed(last)}

            def taking(factor: float, room: dict[Any, int] = room) -> list[Any]:
                wants = {c: min(math.floor(factor * counts[c]) - counts[c], room[c]) for c in room}
                return [c for turn in range(20) for c in wants if wants[c] > turn]

            takes = taking(100 if isinstance(rule.factor, str) else rule.factor)
            if not rule.pay:
                for cell in takes:
                    counts[cell] += 1
                continue
            can = {
                (b, h, t): (counts[b, h, t] - int(case.ranked.forced[b, t])) // 2
                for b, t in others
                if int(case.ranked.visible[b, t]) > budget
            }
            gives = [c for turn in range(20) for c in can if can[c] > turn]
            free = sum(counts[b, h, t] - int(case.ranked.forced[b, t]) for b, h, t in can)
            gives = gives[: math.floor(Fraction(str(rule.give)) * free)]
            if isinstance(rule.factor, str) and len(gives) < len(takes):  # all they see, or up to twice as many
                takes = taking(2)
            for giver, taker in zip(gives, takes, strict=False):
                counts[giver] -= 1
                counts[taker] += 1
    return counts


@pytest.mark.parametrize("pay", [True, False])
@pytest.mark.parametrize(
    ("factor", "tiles", "give"), [(1, 1, 0.5), (1.5, 2, 0.5), (2, 1, 0.5), ("dense", 1, 0.1), ("dense", 3, 0.3)]
)
@pytest.mark.parametrize("name", INNER)
@over(30, seed=SEEDS)
def test_counts_against_plain_python(
    name: str, factor: float | str, tiles: int, give: float, pay: bool, seed: int
) -> None:
    case = drawn(seed, SCORES)
    rule = LastTile(INNER[name], factor=factor, pay=pay, tiles=tiles, give=give)
    inner = INNER[name].decide(case.ranked)
    decision = rule.decide(case.ranked)
    expected = settled(case, inner.counts, rule)
    assert {c: int(decision.counts[c]) for c in expected} == expected
    assert int(decision.counts.sum()) == sum(expected.values())
    if pay:
        assert int(decision.counts.sum()) == int(inner.counts.sum())


@pytest.mark.parametrize("factor", [1.5, 2, "dense"])
@pytest.mark.parametrize("name", INNER)
@over(30, seed=SEEDS)
def test_ranking_further_than_its_limits_changes_nothing(name: str, factor: float | str, seed: int) -> None:
    ranked = drawn(seed, SCORES).ranked
    rule = LastTile(INNER[name], factor=factor)
    limits = rule.limits(ranked.sequence, ranked.scores.shape[3])
    beyond = torch.arange(ranked.scores.shape[3]) >= limits[:, None, :, None]
    cut = dataclasses.replace(ranked, scores=ranked.scores.masked_fill(beyond, -torch.inf))
    whole, short = rule.decide(ranked), rule.decide(cut)
    assert torch.equal(whole.counts, short.counts)
    assert torch.equal(whole.margin.nan_to_num(2), short.margin.nan_to_num(2))
    assert torch.equal(whole.triggered, short.triggered)


def test_the_native_backend_ranks_only_the_last_tile_further() -> None:
    if not cpu.tiers():
        pytest.skip("the native module was not built")
    generator = torch.Generator().manual_seed(3)
    q, k = torch.randn(1, 4, 200, 16, generator=generator), torch.randn(1, 2, 200, 16, generator=generator)
    made = Policy(SCORERS["quest"](), LastTile(TopK(budget=5, tile_factor=1)), block=8, tile=8)
    ranked = cpu.rank(q, k, made, plan(1, 200, 200, 8, 8), 0.25)
    found = ranked.scores.isfinite().sum(-1)[0, 0].tolist()
    assert found == [min(max(t - 1, 0), 10 if t == 24 else 5) for t in range(25)]


@pytest.mark.parametrize("name", INNER)
def test_a_factor_of_one_is_the_rule(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, h, 150, 16, generator=generator) for h in (4, 2))
    plain = Policy(SCORERS["quest"](), INNER[name], block=8, tile=8)
    mine = closecall.select(q, k, plain.replace(rule=LastTile(INNER[name], factor=1)))
    theirs = closecall.select(q, k, plain)
    assert kept_of(mine) == kept_of(theirs)
    assert torch.equal(mine.margin.nan_to_num(2), theirs.margin.nan_to_num(2))
    assert torch.equal(mine.triggered, theirs.triggered)


@pytest.mark.parametrize("pay", [True, False])
def test_the_last_tile_of_each_sequence(pay: bool) -> None:
    """25 and 12 tiles of 8 rows, right-padded and packed: twice the budget for the last, taken evenly from others."""
    generator = torch.Generator().manual_seed(1)
    q, k = (torch.randn(2, h, 200, 16, generator=generator) for h in (4, 2))
    padding = torch.arange(200) < torch.tensor([[200], [96]])
    made = Policy(SCORERS["quest"](), LastTile(TopK(budget=5, tile_factor=1), pay=pay), block=8, tile=8)
    kept = closecall.select(q, k, made, key_padding=padding)
    plain = [min(t + 1, 5) for t in range(25)]
    paid = [c - (pay and 5 <= t < 10) for t, c in enumerate(plain[:-1])]
    assert kept.counts[0, 0].tolist() == [*paid, 10]
    short = [c - (pay and 5 <= t < 10) for t, c in enumerate(plain[:11])]
    assert kept.counts[1, 0].tolist() == [*short, 10, *[0] * 13]
    assert torch.equal(kept.counts, kept.counts[:, :1].expand_as(kept.counts))
    assert kept.triggered[:, 0].nonzero().tolist() == [[0, 24], [1, 11]]
    packed = (torch.cat([x[0, :, :200], x[1, :, :96]], 1)[None] for x in (q, k))
    again = closecall.select(*packed, made, cu_seqlens=torch.tensor([0, 200, 296]))
    assert again.counts[0, 0].tolist() == [*paid, 10, *short, 10]


def test_a_decoding_step_has_nobody_to_pay() -> None:
    generator = torch.Generator().manual_seed(2)
    q, k = torch.randn(1, 4, 1, 16, generator=generator), torch.randn(1, 2, 200, 16, generator=generator)
    for pay, count in ((True, 5), (False, 10)):
        rule = LastTile(TopK(budget=5, tile_factor=1), pay=pay)
        made = Policy(SCORERS["quest"](), rule, block=8, tile=8)
        assert closecall.select(q, k, made).counts.flatten().tolist() == [count] * 4


def ranked_on(device: str, made: plans.Geometry) -> Ranked:
    """A ranking on a device where nothing is ever computed."""
    table = torch.empty(made.batch, 2, made.n_tiles, 10, device=device)
    on_device = (x.to(device) for x in (made.visible, made.forced(1), made.sequence))
    return Ranked(table.int(), table, *on_device, source=Source(table, table, made, 1.0, 1))


def test_on_a_device_nothing_that_stays_is_computed() -> None:
    """It would be ready for the stream that asked first and for no other. The meta device computes nothing at all."""
    made = plan(1, 96, 96, 4, 4)
    rule = LastTile(TopK(budget=5, tile_factor=1))
    assert rule.decide(ranked_on("meta", made)).counts.shape == (1, 2, 24)
    moved, expanded = rule._moved_by_plan(Source(made.row, made.row, made, 1.0, 1), torch.device("cpu"))
    assert moved.flatten().tolist() == [0] * 5 + [-1] * 5 + [0] * 13 + [5]
    assert expanded.nonzero().tolist() == [[0, 0, 23]]
    assert last_tile_rule._last(made.sequence.to("meta"), 1) is not last_tile_rule._last(made.sequence.to("meta"), 1)


def test_what_is_remembered_is_of_this_plan_and_this_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts are settled once for a plan; another length, padding, sink or factor must not get them."""
    torch.manual_seed(0)
    q, k = torch.randn(2, 2, 96, 8), torch.randn(2, 1, 96, 8)
    padded = torch.ones(2, 96, dtype=torch.bool)
    padded[1, :41] = False
    calls: list[tuple[int, dict[str, Any], dict[str, Any]]] = [
        (rows, given, {"key_padding": padding})
        for rows, padding in ((96, None), (96, padded), (40, None))
        for given in ({}, {"sinks": 2}, {"factor": 3}, {"tiles": 2}, {"budget": 3}, {"pay": False})
    ]

    def counts(rows: int, given: dict[str, Any], where: dict[str, Any]) -> torch.Tensor:
        small = {"block": 4, "tile": 4, "budget": 4, **given}
        return closecall.select(q[:, :, -rows:], k, closecall.policy("last-tile-on-quest", **small), **where).counts

    def forget() -> None:
        plans._build.cache_clear()  # what is made of a plan goes with it
        last_tile_rule._last_on_host.cache_clear()

    fresh = []
    for call in calls:
        forget()
        fresh.append(counts(*call))
    settled: list[LastTile] = []
    plain = LastTile.moved
    monkeypatch.setattr(LastTile, "moved", lambda self, *args: (settled.append(self), plain(self, *args))[1])
    for _ in range(2):
        assert all(torch.equal(counts(*call), kept) for call, kept in zip(calls, fresh, strict=True))
    assert len(settled) == len(calls) - 1  # the last of the fresh ones was still known
    assert len({tuple(kept.flatten().tolist()) for kept in fresh}) > 12


def test_as_a_value() -> None:
    made = Policy(SCORERS["quest"](), LastTile(Fill(budget=7), factor="dense", pay=False))
    assert Policy.from_json(made.to_json()) == made
    assert hash(made) == hash(Policy.from_json(made.to_json()))
    assert (made.rule.tile_budget, made.rule.limit(1000)) == (14, 112)  # fill asks for 4 x 14
    assert LastTile(TopK(budget=10), factor=1.5).limit(1000) == 30
    assert LastTile(TopK(budget=5), factor=1.1).limit(1000) == 11  # 1.1 * 10 is 11, not what binary makes of it
    named = closecall.policy("last-tile-on-quest", rule="fill", budget=7, floor=0.25, factor=3)
    assert named.rule == LastTile(Fill(budget=7, floor=0.25), factor=3)
    assert closecall.policy("last-tile-on-quest", budget=7).rule == LastTile(TopK(budget=7))
    for line in (str(made), str(named)):
        assert "last tile" in line


@pytest.mark.parametrize(
    ("given", "error", "fragments"),
    [
        ({"factor": 0.5}, ValueError, ["factor", "from 1 to 1,000,000", "0.5"]),
        ({"factor": "all"}, ValueError, ["factor", "'dense'", "'all'"]),
        ({"factor": math.inf}, ValueError, ["factor", "inf"]),
        ({"tiles": 0}, ValueError, ["tiles", "at least 1", "0"]),
        ({"give": 0}, ValueError, ["give", "above 0", "got 0"]),
        ({"give": 0.75}, ValueError, ["give", "at most 0.5", "0.75"]),
        ({"pay": 1}, TypeError, ["pay", "True or False", "1"]),
        ({"rule": "topk"}, TypeError, ["rule", "topk"]),
        ({"rule": RULES["dense"]()}, ValueError, ["'dense'", "no tile budget"]),
        ({"rule": LastTile()}, ValueError, ["twice"]),
    ],
)
def test_bad_input(given: dict[str, Any], error: type[Exception], fragments: list[str]) -> None:
    with pytest.raises(error) as raised:
        LastTile(**given)
    assert all(f in str(raised.value) for f in fragments), str(raised.value)
