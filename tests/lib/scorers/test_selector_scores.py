"""Scorers and reductions against their definitions, on calls of every shape."""

from __future__ import annotations

import math
import random

import by_definition
import numpy as np
import pytest
import torch
from by_definition import ORACLES, PARAMETERS, SHRUNK, SUMMARIES, VOTES
from hypothesis import strategies as st
from small_calls import call

import closecall
import oracle
from closecall import SCORERS, Policy
from closecall.backends import reference
from closecall.geometry import plan
from closecall.scorers import base
from closecall.scorers.reductions import REDUCTIONS
from compare import check_box
from drawing import Case, over

NAMES = (*SUMMARIES, *ORACLES, *VOTES, "minference-block")
AGGREGATES = ("max", "mean", "mass", "mass-max", "softmax")
SEEDS = st.integers(0, 2**32 - 1)


def parameter(name: str, case: Case) -> float:
    """One that fits the case's grid."""
    r = random.Random(case.seed)
    if name == "box":
        return r.choice([0, 0.25, 0.5, 0.9, 1])
    if name.endswith("outliers"):
        return r.randint(0, max(0, min(4, case.block - 3)))
    if name == "nsa":
        return r.choice([p for p in (1, 2, 4) if case.block % p == 0 and (p < case.block or case.block == 1)])
    if name == "xattention":
        both = math.gcd(case.block, case.tile)
        return r.choice([s for s in (1, 2, 4, 8) if both % s == 0])
    return r.choice([1, 2, 5, 64, 10_000])


def made(name: str, aggregate: str, case: Case) -> tuple[Policy, float]:
    given = parameter(name, case)
    parameters = {PARAMETERS[name]: given} if name in PARAMETERS else {}
    if name == "boxed outliers":
        name, parameters = "outliers", parameters | {"c": SHRUNK}
    scorer = SCORERS[name](**parameters)
    return Policy(scorer, closecall.RULES["topk"](), case.block, case.tile, case.sinks, aggregate), given


def scored(case: Case, policy: Policy, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    geometry = plan(case.batch, case.q_len, case.k_len, case.block, case.tile, **case.arguments())
    return reference.tile_scores(q, k, policy, geometry, case.used_scale)


def bound(case: Case, q: np.ndarray, k: np.ndarray, u: float) -> tuple[float, float]:
    """How far a score may be from the exact one: a part that is there in any case, and one that grows with the score.

    A logit is a product of D terms of a mean over a block, off by at most `u` times the number of operations times the
    size of its terms; a share is an exponential of logits over a sum of such, and running sums add one rounding of
    their length per term.
    """
    size = case.used_scale * np.nan_to_num(np.abs(q)).sum(-1).max() * np.nan_to_num(np.abs(k)).max()
    logit = 4 * u * (case.dim + case.block + case.tile + 16) * (1 + size)
    share = math.expm1(2 * logit) + 4 * u * (case.k_len + case.q_len + 64)
    return logit + share * case.q_len, share


def scored_in_parts(case: Case, policy: Policy, q: torch.Tensor, k: torch.Tensor) -> np.ndarray:
    """The scores, with one row, a thousand or as many as usual taken at a time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(base, "AT_ONCE", random.Random(case.seed).choice([1, 1000, base.AT_ONCE]))
        return oracle.exact(scored(case, policy, q, k))


@pytest.mark.parametrize("aggregate", AGGREGATES)
@pytest.mark.parametrize("name", NAMES)
def test_by_definition(name: str, aggregate: str) -> None:
    @over(5, seed=SEEDS)
    def check(seed: int) -> None:
        case = call(seed)
        q, k, _ = case.tensors()
        policy, given = made(name, aggregate, case)
        found = scored_in_parts(case, policy, q, k)
        wide_q, wide_k = oracle.exact(q), oracle.exact(k)
        always, relative = bound(case, wide_q, wide_k, 2.0**-53)
        tiles = case.tiles()
        for t in tiles:
            for h in range(case.heads):
                s = by_definition.Sequence(wide_q, wide_k, tiles, t, h, case.used_scale)
                expected = by_definition.tile_scores(name, given, aggregate, s, case.sinks)
                got = found[t.batch, h, t.number]
                assert np.isneginf(got[len(t.visible) :]).all()
                got = got[: len(t.visible)]
                assert (np.isneginf(got) == np.isneginf(expected)).all()
                seen = np.isfinite(expected)
                off = np.abs(got[seen] - expected[seen])
                assert (off <= always + relative * np.abs(expected[seen])).all()
                if aggregate.startswith("mass"):
                    assert got.min() >= 0
                    assert got.max() <= 1 + 4 * len(t.rows) * 2.0**-53
                if aggregate == "softmax":
                    assert got.max() <= always
                if aggregate == "mass" and name not in VOTES:
                    assert got.sum() == pytest.approx(1)

    check()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("aggregate", AGGREGATES)
@pytest.mark.parametrize("name", ["mean", "quest", "true-mass", "nsa"])
def test_scores_are_accumulated_in_float32(name: str, aggregate: str, dtype: torch.dtype) -> None:
    @over(3, seed=SEEDS)
    def check(seed: int) -> None:
        case = call(seed, dtype)
        q, k, _ = case.tensors()
        policy, _ = made(name, aggregate, case)
        exact = scored(case, policy, q.double(), k.double())
        found = scored(case, policy, q, k)
        assert found.dtype == torch.float32
        always, relative = bound(case, oracle.exact(q), oracle.exact(k), 2.0**-24)
        seen = exact.isfinite()
        assert torch.equal(seen, found.isfinite())
        off = (found.double() - exact).abs()[seen]
        assert bool((off <= always + relative * exact.abs()[seen]).all())

    check()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("c", [0.0, 0.25, 0.75, 1.0])
def test_a_box_is_rounded_once_to_the_keys_type(c: float, dtype: torch.dtype) -> None:
    k = torch.randn(37, 16, generator=torch.Generator().manual_seed(1)).to(dtype)
    check_box(torch.stack(SCORERS["box"](c=c).summarise(k, 16)), k, 16, c)


def test_all_there_is_was_tested() -> None:
    """A scorer that registers itself with the package has its definition here."""
    ours = {n for n in SCORERS.names() if SCORERS[n].__module__.startswith("closecall.")}
    assert ours | {"boxed outliers"} == {*NAMES}
    assert set(REDUCTIONS) == set(AGGREGATES)
