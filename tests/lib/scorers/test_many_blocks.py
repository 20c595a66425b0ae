"""Prompts of more blocks than a native kernel scores at a time: what a tile thinks of them is what the reference
thinks, and does not depend on the tiles that are scored beside it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import closecall
from closecall import Policy
from closecall.geometry import plan
from engines import ENGINES, Engine

NATIVE = [e for e in ENGINES if e.backend == "cpu"]
BLOCK, TILE, DIM = 4, 16, 72  # a head dim of two whole panels and a bit
KEYS = 1710  # 428 blocks, the last of two keys
SCORERS: dict[str, dict[str, Any]] = {
    "mean": {},
    "quest": {},
    "outliers": {"m": 1, "c": 0.5},
    "many": {"m": 2, "c": 0.0},
}


def made(scorer: str, aggregate: str, pool: int, **more: Any) -> Policy:
    name = "outliers" if scorer == "many" else scorer
    more |= {"outlying": 2} if pool > 1 else {}
    return closecall.policy(
        "topk", scorer=closecall.SCORERS[name](**SCORERS[scorer]), aggregate=aggregate, pool=pool, budget=KEYS,
        tile_factor=1, block=BLOCK, tile=TILE, **more,
    )  # fmt: skip


def tensors(dtype: torch.dtype, heads: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, h, KEYS, DIM, generator=generator) for h in (heads, 1))
    return q.to(dtype), k.to(dtype)


@pytest.mark.parametrize("engine", NATIVE, ids=str)
@pytest.mark.parametrize("pool", [1, 16])
@pytest.mark.parametrize("aggregate", ["max", "softmax"])
@pytest.mark.parametrize("scorer", SCORERS)
def test_scores_are_the_reference_s(engine: Engine, scorer: str, aggregate: str, pool: int) -> None:
    q, k = tensors(torch.float32)
    rows = q[:, :, -5 * TILE - 3 :]
    policy, geometry = made(scorer, aggregate, pool), plan(1, rows.shape[2], KEYS, BLOCK, TILE)
    n = geometry.n_blocks

    def by_block(e: Engine) -> torch.Tensor:
        ranked = e.rank(rows, k, policy, geometry, 0.2)
        return torch.full((*ranked.order.shape[:3], n + 1), -torch.inf).scatter_(
            -1, ranked.order.long(), ranked.scores
        )[..., :n]

    found, expected = by_block(engine), by_block(Engine("reference"))
    assert torch.equal(found.isinf(), expected.isinf())
    torch.testing.assert_close(found.nan_to_num(neginf=0), expected.nan_to_num(neginf=0), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("engine", NATIVE, ids=str)
@pytest.mark.parametrize("share", ["head", "group"])
@pytest.mark.parametrize(("pool", "candidates"), [(1, 0), (16, 0), (16, 2)])
@pytest.mark.parametrize("aggregate", ["max", "softmax"])
def test_a_tile_alone_is_ranked_as_among_others(
    engine: Engine, aggregate: str, pool: int, candidates: int, share: str
) -> None:
    q, k = tensors(torch.bfloat16)
    rule = closecall.RULES["topk"](budget=40, tile_factor=1)
    policy = made("outliers", aggregate, pool, share=share).replace(candidates=candidates, rule=rule)
    together = engine.rank(q, k, policy, plan(1, KEYS, KEYS, BLOCK, TILE), 0.2)
    for tile in (60, 97, 98, 106):  # with one, two and three more in the same slab, and the short last one
        end = min((tile + 1) * TILE, KEYS)
        rows = q[:, :, tile * TILE : end]
        alone = engine.rank(rows, k[:, :, :end], policy, plan(1, rows.shape[2], end, BLOCK, TILE), 0.2)
        assert (alone.order[:, :, 0] < end // BLOCK).all()
        assert torch.equal(alone.order[:, :, 0], together.order[:, :, tile])
        assert torch.equal(alone.scores[:, :, 0], together.scores[:, :, tile])
