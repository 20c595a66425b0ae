"""Blocks of the same keys have the same score, to the bit, and the lower ones are kept, whatever the length."""

from __future__ import annotations

import pytest
import torch

import closecall
from closecall.scorers.base import products
from engines import Engine, compiled

LENGTHS = (333, 386, 393, 577, 641, 777)
BUDGET = 5
SCORERS = ("mean", "quest", "box", "outliers", "true-max", "true-mass", "minference-block")
AGGREGATES = ("max", "mean", "softmax", "mass", "mass-max")


def expected(selection: closecall.Selection, t: int) -> list[int]:
    """What a tile keeps where all blocks tie: the first one, its own, and the lowest of the others."""
    g = selection.geometry
    n, own = int(g.visible[0, t]), int(g.first_own()[0, t])
    forced = {0, *range(own, n)}
    free = [b for b in range(n) if b not in forced]
    return sorted(forced | set(free[: max(0, BUDGET - len(forced))]))


def check(engine: Engine, n: int, dtype: torch.dtype, scorer: str, aggregate: str, block: int) -> None:
    generator = torch.Generator().manual_seed(n)
    q = torch.randn(1, 2, n, 64, generator=generator).to(dtype)
    some = torch.randn(1, 1, block, 64, generator=generator).to(dtype)
    k = some.repeat(1, 1, n // block + 1, 1)[:, :, :n]
    given = {"budget": BUDGET, "tile_factor": 1, "block": block, "tile": block, "aggregate": aggregate}
    selection = engine.select(q, k, closecall.policy(f"topk-on-{scorer}", **given))
    for t in range(selection.counts.shape[2]):
        for h in range(2):
            kept = selection.kv_idx[0, h, t, : int(selection.counts[0, h, t])].tolist()
            assert kept == expected(selection, t), f"head {h}, tile {t} of {n} rows"
            if int(selection.geometry.visible[0, t]) > BUDGET:
                assert float(selection.margin[0, h, t]) == 0


@compiled
@pytest.mark.parametrize("aggregate", AGGREGATES)
@pytest.mark.parametrize("scorer", SCORERS[:4])
def test_equal_blocks_tie_on_every_backend(engine: Engine, scorer: str, aggregate: str) -> None:
    for n in LENGTHS:
        check(engine, n, torch.float32, scorer, aggregate, 16)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("aggregate", ["max", "mean", "mass"])
@pytest.mark.parametrize("scorer", SCORERS)
def test_equal_blocks_tie_in_the_reference(dtype: torch.dtype, scorer: str, aggregate: str) -> None:
    for n in LENGTHS:
        for block in (16, 64):
            check(Engine("reference"), n, dtype, scorer, aggregate, block)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_equal_vectors_have_equal_products(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    for n in range(1, 120):
        rows = torch.randn(3, 17, 40, generator=generator, dtype=dtype)
        found = products(rows, torch.randn(1, 1, 40, generator=generator, dtype=dtype).expand(3, n, 40))
        assert found.shape == (3, 17, n)
        assert torch.equal(found, found[..., :1].expand_as(found))
