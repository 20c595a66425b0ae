"""Offsets past 2^31 and 2^32 elements, in buffers of which only the pages in use exist."""

from __future__ import annotations

import pytest
import torch

import closecall
from compare import assert_attention, kept_of
from engines import Engine, compiled
from oracle import attend as brute_force
from oracle import tiles

N, DIM, HEADS = 96, 64, 3
POLICY = closecall.policy("quest", block=16, tile=16, budget=4, tile_factor=1)


@pytest.fixture(scope="module")
def ocean() -> torch.Tensor:
    """Somewhat more than 2^32 bfloat16 numbers; torch.empty touches none of them."""
    try:
        return torch.empty(2**32 + 2**24, dtype=torch.bfloat16)
    except RuntimeError as error:
        pytest.skip(f"no address space for 8 GiB: {error}")


def placed(ocean: torch.Tensor, strides: tuple[int, int, int], offset: int, seed: int) -> torch.Tensor:
    view = ocean.as_strided((1, HEADS, N, DIM), (0, *strides), offset)
    view.copy_(torch.randn(1, HEADS, N, DIM, generator=torch.Generator().manual_seed(seed)))
    return view


HEAD_STRIDE = 2**31 + 64  # head 1 begins past 2^31, head 2 past 2^32
ROW_STRIDE = 2**32 // N  # rows from the middle on lie past 2^31
STRIDES = {"heads": (HEAD_STRIDE, DIM, 1), "rows": (DIM, ROW_STRIDE, 1), "channels": (1, DIM, 2**32 // DIM)}


@compiled
@pytest.mark.parametrize("axis", STRIDES)
def test_large_strides(engine: Engine, ocean: torch.Tensor, axis: str) -> None:
    room = N * DIM * HEADS * 2  # apart from each other, so that q, k and v do not overlap
    q, k, v = (placed(ocean, STRIDES[axis], i * room, i) for i in range(3))
    assert sum((n - 1) * s for n, s in zip(q.shape, q.stride(), strict=True)) > 2**31
    selection = engine.select(q, k, POLICY)
    copies = [x.contiguous() for x in (q, k, v)]
    assert kept_of(selection) == kept_of(engine.select(copies[0], copies[1], POLICY))
    out, lse = engine.attention(q, k, v, POLICY, return_lse=True)
    plan = tiles(1, N, N, 16, 16)
    assert_attention(out, lse, brute_force(*copies, kept_of(selection), plan, DIM**-0.5))
