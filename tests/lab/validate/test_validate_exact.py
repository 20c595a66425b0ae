"""The package's own float64 answers and bounds, against the tests' brute force, which shares no code with it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import closecall
import oracle
from closecall_lab.bench.validate import exact
from closecall_lab.bench.validate.cases import CASES, Case
from compare import kept_of

CPU = torch.device("cpu")
# Of every kind one, and small: the brute force is slow.
NAMES = [
    "topk, fp32", "router-on-quest, bf16", "router, fp16, exact scores with ties", "7 heads on 1", "65 keys",
    "16 rows at the end of 900 keys", "decode, quest", "padded on the right", "packed", "softcap 5, fp32",
    "peaked softmax", "mean over a tile's rows", "no sink block", "tiles of 32",
]  # fmt: skip
U = 2.0**-24


def the(name: str) -> Case:
    return next(case for case in CASES if case.name == name)


def plan_of(case: Case) -> list[oracle.Tile]:
    p = case.policy()
    return oracle.tiles(case.batch, case.rows or case.keys, case.keys, p.block, p.tile, **case.arguments())


@pytest.mark.parametrize("name", NAMES)
def test_attention_and_its_bounds(name: str) -> None:
    case = the(name)
    q, k, v = case.tensors(CPU)
    selection = closecall.select(q, k, case.policy(), scale=case.scale, backend="reference", **case.arguments())
    scale = case.scale or case.dim**-0.5
    attended = exact.attend(q, k, v, selection, scale, case.softcap, U)
    theirs = oracle.attend(q, k, v, kept_of(selection), plan_of(case), scale, case.softcap)
    for a, b in ((attended.out, theirs.out), (attended.lse, theirs.lse)):
        np.testing.assert_allclose(a.numpy(), b, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(attended.lse_error.numpy(), theirs.lse_error, rtol=1e-9)
    if q.dtype == torch.float16:  # ours also lets weights be rounded to float16, as tensor cores need it
        assert (attended.out_error.numpy() >= theirs.out_error).all()
        # No more than two roundings to float16 where the brute force has one, and the smallest weights' own.
        room = 2.0**-11 * 1.02 * v.double().abs().max() + 2.0**-25 * 1.01 * v.double().abs().sum(2).max()
        assert (attended.out_error.numpy() <= theirs.out_error + room.item()).all()
    else:
        np.testing.assert_allclose(attended.out_error.numpy(), theirs.out_error, rtol=1e-9)


@pytest.mark.parametrize("name", [n for n in NAMES if n != "65 keys"])
def test_scores_margins_and_their_bounds(name: str) -> None:
    case, p = the(name), the(name).policy()
    q, k, _ = case.tensors(CPU)
    geometry = closecall.select(q, k, p, scale=case.scale, backend="reference", **case.arguments()).geometry
    scale = case.scale or case.dim**-0.5
    scored = exact.scores(q, k, p, geometry, scale, U)
    wide = oracle.exact(q), oracle.exact(k)
    assert p.scorer is not None
    for tile in plan_of(case):
        for h in range(case.heads):
            at = (tile.batch, h, tile.number)
            theirs = oracle.block_scores(*wide, tile, h, p.scorer.name, p.aggregate, scale, p.sinks, U)
            assert scored.free[tile.batch, 0, tile.number].nonzero()[:, 0].tolist() == sorted(theirs)
            for block, (score, error) in theirs.items():
                assert float(scored.score[at][block]) == pytest.approx(score, rel=1e-12, abs=1e-12)
                assert float(scored.error[at][block]) == pytest.approx(error, rel=1e-9)
            value, error = oracle.margin_of(theirs, tile, p.rule.tile_budget, p.sinks)  # type: ignore[attr-defined]
            got = float(scored.margin[at])
            if np.isnan(value):
                assert np.isnan(got)
            else:
                assert got == pytest.approx(value, rel=1e-9, abs=1e-12)
                assert float(scored.margin_error[at]) == pytest.approx(min(1.0, error + 4 * U), rel=1e-6)
