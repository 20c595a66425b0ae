"""The oracle itself: against torch where torch has the operation, and that its bounds are neither false nor idle."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import oracle
from compare import assert_attention, everything
from engines import FLOATS


def dense(dtype: torch.dtype, dim: int = 64, n: int = 300):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, h, n, dim, generator=generator).to(dtype) for h in (2, 1, 1))
    plan = oracle.tiles(1, n, n, 64, 64)
    return q, k, v, oracle.attend(q, k, v, everything(plan, 2), plan, dim**-0.5)


@pytest.mark.parametrize("dtype", FLOATS)
def test_dense_attention_is_torch_s(dtype: torch.dtype) -> None:
    q, k, v, expected = dense(dtype)
    wide = (x.double() for x in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(*wide, is_causal=True, enable_gqa=True)
    assert np.abs(out.numpy() - expected.out).max() < 1e-13


@pytest.mark.parametrize("dim", [32, 256])
@pytest.mark.parametrize("dtype", FLOATS)
def test_bounds_admit_torch_and_refuse_small_faults(dtype: torch.dtype, dim: int) -> None:
    q, k, v, expected = dense(dtype, dim)
    lse = torch.from_numpy(expected.lse)
    good = torch.nn.functional.scaled_dot_product_attention(
        q.float(), k.float(), v.float(), is_causal=True, enable_gqa=True
    ).to(dtype)
    assert_attention(good, lse, expected)

    def refused(out: torch.Tensor, sums: torch.Tensor = lse) -> None:
        with pytest.raises(AssertionError, match="beyond its bound"):
            assert_attention(out, sums, expected)

    # One key too few, one too many, another scale, another head, less precise arithmetic.
    causal = torch.ones(300, 300, dtype=torch.bool).tril()
    for mask in (causal.clone().fill_diagonal_(False), torch.ones(300, 300, dtype=torch.bool).tril(1)):
        mask[0, 0] = True
        refused(
            torch.nn.functional.scaled_dot_product_attention(
                q.float(), k.float(), v.float(), attn_mask=mask, enable_gqa=True
            ).to(dtype)
        )
    refused(good.roll(1, 1))
    refused(good, lse + 1e-3)
    if dtype == torch.float32:
        refused(good.bfloat16().float())
        half = [x.bfloat16().float() for x in (q, k, v)]
        refused(torch.nn.functional.scaled_dot_product_attention(*half, is_causal=True, enable_gqa=True))


@pytest.mark.parametrize(
    ("dtype", "allowed"),
    [
        (torch.float32, 2.0**-8 / 32),  # far below a bfloat16 rounding: arithmetic in a lower precision must show
        (torch.float16, 2 * 2.0**-11),  # two roundings of the type
        (torch.bfloat16, 2 * 2.0**-8),
    ],
)
def test_bounds_are_of_the_size_of_the_roundings(dtype: torch.dtype, allowed: float) -> None:
    """For values of about 1."""
    *_, expected = dense(dtype)
    assert expected.out_error.mean() < allowed
    assert expected.lse_error.max() < 2.0**-8 / 32


def test_tiles_by_hand() -> None:
    """Two rows of 5 keys, left padding of 2 in the second; the last 4 rows in tiles of 3; blocks of 2."""
    padding = torch.tensor([[True] * 5, [False, False, True, True, True]])
    tiles = oracle.tiles(2, 4, 5, 2, 3, key_padding=padding)
    assert [(t.batch, t.rows, t.positions) for t in tiles] == [
        (0, [0, 1, 2], [1, 2, 3]), (0, [3], [4]), (1, [1, 2, 3], [0, 1, 2]),
    ]  # fmt: skip
    assert [t.visible for t in tiles] == [[0, 1], [0, 1, 2], [0, 1]]
    assert [sorted(t.forced(1)) for t in tiles] == [[0, 1], [0, 2], [0, 1]]
    assert tiles[2].keys(1) == slice(4, 5)
