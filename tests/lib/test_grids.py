"""Grids finer than 64 x 64 on the native tiers, against float64: tiles of one vector, blocks shorter than a step."""

from __future__ import annotations

import pytest
import torch

import closecall
from compare import kept_of
from engines import ENGINES, Engine

NATIVE = [engine for engine in ENGINES if engine.backend == "cpu"]
ATOL = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 2e-3}


@pytest.mark.parametrize("dtype", ATOL, ids=str)
@pytest.mark.parametrize(("block", "tile"), [(32, 32), (32, 16), (16, 16), (16, 48)])
@pytest.mark.parametrize("native", NATIVE, ids=str)
def test_finer_grids(native: Engine, block: int, tile: int, dtype: torch.dtype) -> None:
    """Odd lengths and head dims, keys before the first row, a padded neighbour, heads that share and that do not."""
    generator = torch.Generator().manual_seed(block + tile)
    q, k, v = (
        torch.randn(2, heads, n, dim, generator=generator).to(dtype)
        for heads, n, dim in ((6, 211, 72), (2, 333, 72), (2, 333, 40))
    )
    padding = torch.arange(333) >= torch.tensor([[0], [150]])
    for share in ("head", "group"):
        policy = closecall.policy("auto", budget=7, tile_factor=1, block=block, tile=tile, share=share)
        kept = native.select(q, k, policy, key_padding=padding)
        assert int((kept.counts > 0).sum()) == int(kept.geometry.exists.sum()) * 6
        assert max(len(blocks) for blocks in kept_of(kept).values()) > 7  # the last tile has more than the others
        out, lse = native.attend(q, k, v, kept, return_lse=True)
        wide = (x.double() for x in (q, k, v))
        right, right_lse = closecall.attend(*wide, kept, backend="reference", return_lse=True)
        assert torch.allclose(out.double(), right, atol=ATOL[dtype], rtol=ATOL[dtype])
        seen = right_lse.isfinite()
        assert torch.equal(lse.isfinite(), seen)
        assert torch.allclose(lse.double()[seen], right_lse[seen], atol=ATOL[dtype])
        if dtype == torch.float32:
            expected = closecall.select(q, k, policy, key_padding=padding, backend="reference")
            assert torch.equal(kept.counts, expected.counts)
            same = (kept.kept_mask() == expected.kept_mask()).all(-1)
            assert bool(same.float().mean() > 0.98)  # blocks whose scores are equal up to rounding may change places
