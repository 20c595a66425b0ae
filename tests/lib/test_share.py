"""Heads that share their blocks (`share="group"`): what they keep, who can share, and who refuses.

That the kept blocks are the ones defined is tested with all others, on drawn calls (test_selection.py and its like).
"""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

import closecall
import oracle
from closecall import Policy, backends
from closecall.geometry import plan
from closecall.policy import as_policy
from closecall.ranking import margins_at
from compare import assert_attention, kept_of
from engines import ENGINES, Engine

GRID = {"block": 16, "tile": 16, "budget": 5, "tile_factor": 1}


def tensors(heads: int = 6, kv_heads: int = 2, engine: Engine | None = None) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(11)
    q, k, v = (torch.randn(1, h, 300, 32, generator=generator) for h in (heads, kv_heads, kv_heads))
    if engine is not None and engine.backend == "triton":  # a chunk: the interpreter is slow
        return q[:, :, -20:], k[:, :, :150], v[:, :, :150]
    return q, k, v


def test_a_policy_says_who_decides_together() -> None:
    plain, shared = closecall.policy("auto", budget=8), closecall.policy("auto", budget=8, share="group")
    assert plain.share == "head"
    assert "share" not in json.loads(plain.to_json())  # what was stored under a policy's JSON is still found
    assert Policy.from_json(plain.to_json()) == plain
    assert Policy.from_json(shared.to_json()) == shared == as_policy("auto:budget=8,share=group")
    assert "heads of a KV head" in str(shared)
    assert shared.name == "auto"
    with pytest.raises(ValueError, match=r"unknown share 'groups': did you mean 'group'\?"):
        closecall.policy("auto", share="groups")
    with pytest.raises(ValueError, match="share= has no effect on rule 'dense'"):
        closecall.policy("dense", share="group")


def test_budgets_by_head_are_refused() -> None:
    rule = closecall.RULES["per-head"](budgets=((8, 9, 8, 9),))
    with pytest.raises(ValueError, match=r"a budget for each query head, and under share='group' .* use share='head'"):
        Policy(closecall.SCORERS["quest"](), rule, share="group")
    trigger = closecall.TRIGGERS["calibrated"](thresholds=((0.1, 0.2),))
    with pytest.raises(ValueError, match=r"a threshold for each query head, and under share='group'"):
        closecall.policy("router", trigger=trigger, share="group")
    one = closecall.TRIGGERS["calibrated"](thresholds=(0.1,))
    assert closecall.policy("router", trigger=one, share="group").share == "group"


@pytest.mark.parametrize("engine", ENGINES, ids=str)
def test_a_group_of_one_is_a_head(engine: Engine) -> None:
    q, k, v = tensors(2, 2, engine)
    policy = closecall.policy("auto", **GRID)
    one, other = (engine.select(q, k, p) for p in (policy, policy.replace(share="group")))
    for part in ("kv_idx", "counts", "triggered"):
        assert torch.equal(getattr(one, part), getattr(other, part))
    assert torch.equal(engine.attention(q, k, v, policy), engine.attention(q, k, v, policy.replace(share="group")))


@pytest.mark.parametrize("engine", ENGINES, ids=str)
@pytest.mark.parametrize("aggregate", ["max", "softmax", "mass", "mean"])
def test_heads_that_want_the_same_share_what_each_would_keep(engine: Engine, aggregate: str) -> None:
    """The largest of equal scores is the score: copies of a head keep together what one keeps alone."""
    q, k, _ = tensors(1, 1, engine)
    scorer = "quest" if aggregate == "mean" else "outliers"
    policy = closecall.policy("router", scorer=scorer, aggregate=aggregate, **GRID)
    alone = engine.select(q, k, policy)
    together = engine.select(q.repeat_interleave(3, 1), k, policy.replace(share="group"))
    assert together.group == 3
    assert torch.equal(together.kv_idx, alone.kv_idx.repeat_interleave(3, 1))
    assert torch.equal(together.triggered, alone.triggered.repeat_interleave(3, 1))


@pytest.mark.parametrize("engine", [e for e in ENGINES if e.backend == "cpu"], ids=str)
@pytest.mark.parametrize("aggregate", ["max", "mean", "softmax", "mass", "mass-max"])
def test_pooled_rows_of_heads_that_share(engine: Engine, aggregate: str) -> None:
    """Many heads, so that they fill the lanes of no tier or of several; integers, so that scores of rows are exact."""
    q, k, _ = (x.mul(2).round() for x in tensors(18, 1))
    policy = closecall.policy("last-tile-on-quest", aggregate=aggregate, pool=4, share="group", **GRID)
    geometry = plan(1, 300, 300, 16, 16)
    found, expected = (e.rank(q, k, policy, geometry, 0.125) for e in (engine, Engine("reference")))
    ranked = torch.arange(expected.scores.shape[3]) < policy.rule.limits(geometry.sequence, 19)[:, None, :, None]
    torch.testing.assert_close(found.scores[ranked], expected.scores[ranked], rtol=1e-4, atol=1e-6)
    if aggregate in ("max", "mean"):
        assert torch.equal(found.order[ranked], expected.order[ranked])


@pytest.mark.parametrize("engine", [e for e in ENGINES if e.backend != "flex"], ids=str)
def test_a_loud_head_does_not_change_what_attention_is(engine: Engine) -> None:
    """Attention is exact over what is kept, head by head: the same as with the same blocks said for each head."""
    q, k, v = tensors(3, 1, engine)
    loud = torch.tensor([1.0, 5.0, 1.0])[:, None, None]
    kept = engine.select(q * loud, k, closecall.policy("auto", share="group", **GRID))
    each = dataclasses.replace(kept, group=1)
    both = [engine.attend(q, k, v, s, return_lse=True) for s in (kept, each)]
    expected = oracle.attend(q, k, v, kept_of(each), oracle.tiles(1, q.shape[2], k.shape[2], 16, 16), 32**-0.5)
    for out, lse in both:
        assert_attention(out, lse, expected)
    if engine.backend != "triton":  # NumPy's products, which interpret it, round by the shape of what they multiply
        for one, other in zip(*both, strict=True):
            assert torch.equal(one, other)


def test_a_tile_stops_when_the_rows_of_all_heads_are_served() -> None:
    q, k, v = tensors()
    q = q * 3
    rule = closecall.RULES["certified"](eps=0.4, max_budget=12)
    policy = Policy(closecall.SCORERS["quest"](), rule, 16, 16, share="group")
    kept = closecall.select(q, k, policy, backend="reference")
    assert len({int(n) for n in kept.counts.unique()}) > 2  # it stops early somewhere
    lost = closecall.certify(q, k, v, kept).mass
    stopped = (kept.counts < 12).repeat_interleave(16, 2)[..., :300]
    assert bool((lost[stopped] <= 0.4).all())


@pytest.mark.parametrize("name", ["fill", "top-p", "max-ratio", "even", "last-tile"])
def test_rules_that_share_a_budget_out_spend_it(name: str) -> None:
    q, k, _ = tensors()
    how = {"keep": 5.5} if name == "even" else {"budget": 5, "tile_factor": 1}
    aggregate = {"aggregate": "mass"} if name in ("fill", "top-p") else {}
    alone = closecall.policy(f"{name}-on-quest", block=16, tile=16, **how, **aggregate)
    one, other = (closecall.select(q, k, p, backend="reference") for p in (alone, alone.replace(share="group")))
    assert int(one.counts.sum()) == int(other.counts.sum())
    assert torch.equal(other.counts, other.counts[:, ::3].repeat_interleave(3, 1))


def test_a_selection_that_says_it_is_shared_must_be() -> None:
    q, k, v = tensors()
    kept = closecall.select(q, k, closecall.policy("topk", **GRID))
    with pytest.raises(ValueError, match=r"selection.kv_idx differs between heads 0 and 1 .* make it with group=1"):
        closecall.attend(q, k, v, dataclasses.replace(kept, group=3))
    with pytest.raises(ValueError, match="group = 4 does not divide its 6 heads"):
        closecall.attend(q, k, v, dataclasses.replace(kept, group=4))


def test_margins_are_those_of_the_shared_ranking() -> None:
    q, k, _ = tensors()
    policy = closecall.policy("topk", share="group", **GRID)
    kept = closecall.select(q, k, policy)
    whole = policy.replace(rule=closecall.RULES["topk"](budget=19, tile_factor=1))
    ranked = backends.load("reference").rank(q, k, whole, kept.geometry, 32**-0.5)
    margin = margins_at(ranked, kept.counts[:, ::3].long())
    torch.testing.assert_close(kept.margin[:, ::3], margin, equal_nan=True)
    assert torch.equal(kept.margin.nan_to_num(7), kept.margin[:, ::3].repeat_interleave(3, 1).nan_to_num(7))
