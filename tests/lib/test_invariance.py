"""Bit for bit: what a sequence gets does not depend on its batch, its padding, its packing, threads, or the day."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import closecall
from closecall.policy import accepted
from compare import kept_of
from drawing import Case, cases, over
from engines import EXACTLY_REPEATABLE, Engine

exactly = pytest.mark.parametrize("engine", [e for e in EXACTLY_REPEATABLE if e.backend != "triton"], ids=str)
native = pytest.mark.parametrize("engine", [e for e in EXACTLY_REPEATABLE if e.backend == "cpu"], ids=str)

POLICIES = {
    "dense": {},
    "topk": {},
    "quest": {"aggregate": "mean"},
    "router": {"q": 0.3},
    "router-on-quest": {"q": 0.5, "trigger": "random"},
}
LENGTHS = [300, 77, 500, 1]


def policy(preset: str) -> closecall.Policy:
    return closecall.policy(preset, block=16, tile=32, **accepted(preset, {"budget": 4}), **POLICIES[preset])


def run(engine: Engine, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, preset: str, **arguments: Any) -> tuple:
    out, lse = engine.attention(q, k, v, policy(preset), return_lse=True, **arguments)
    return out, lse, engine.select(q, k, policy(preset), **arguments)


def alone(engine: Engine, preset: str, dtype: torch.dtype) -> list[tuple]:
    """(q, k, v) and results of sequences of LENGTHS, each by itself. 6 query heads, 2 key heads."""
    generator = torch.Generator().manual_seed(5)
    found = []
    for n in LENGTHS:
        qkv = [torch.randn(1, h, n, d, generator=generator).to(dtype) for h, d in ((6, 40), (2, 40), (2, 24))]
        found.append((qkv, run(engine, *qkv, preset)))
    return found


def assert_same(mine: tuple, rows: slice, tiles: slice, batch: int, whole: tuple) -> None:
    """One sequence's part of a batched result against its result alone."""
    out, lse, selection = mine
    all_out, all_lse, all_selection = whole
    assert torch.equal(all_out[batch, :, rows], out[0])
    assert torch.equal(all_lse[batch, :, rows], lse[0])
    assert torch.equal(all_selection.margin[batch, :, tiles].nan_to_num(2), selection.margin[0].nan_to_num(2))
    assert torch.equal(all_selection.triggered[batch, :, tiles], selection.triggered[0])
    kept, all_kept = kept_of(selection), kept_of(all_selection)
    for _, h, t in kept:
        assert all_kept[batch, h, tiles.start + t] == kept[0, h, t]


def n_tiles(n: int) -> int:
    return -(-n // 32)


@exactly
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("preset", POLICIES)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_batches(engine: Engine, side: str, preset: str, dtype: torch.dtype) -> None:
    each = alone(engine, preset, dtype)
    longest = max(LENGTHS) + 7
    buffers = [
        torch.full((len(LENGTHS), h, longest, d), torch.nan, dtype=dtype) for h, d in ((6, 40), (2, 40), (2, 24))
    ]
    padding = torch.zeros(len(LENGTHS), longest, dtype=torch.bool)
    places = [slice(longest - n, longest) if side == "left" else slice(0, n) for n in LENGTHS]
    for b, (qkv, _) in enumerate(each):
        padding[b, places[b]] = True
        for buffer, x in zip(buffers, qkv, strict=True):
            buffer[b, :, places[b]] = x[0]
    whole = run(engine, *buffers, preset, key_padding=padding)
    for b, (_, mine) in enumerate(each):
        assert_same(mine, places[b], slice(0, n_tiles(LENGTHS[b])), b, whole)
    assert bool((whole[0].transpose(1, 2)[~padding] == 0).all())
    assert bool(whole[1].transpose(1, 2)[~padding].isneginf().all())


@exactly
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("preset", POLICIES)
def test_packed(engine: Engine, preset: str, dtype: torch.dtype) -> None:
    each = alone(engine, preset, dtype)
    buffers = [torch.cat([qkv[i] for qkv, _ in each], 2) for i in range(3)]
    bounds = torch.tensor([0, *LENGTHS]).cumsum(0)
    whole = run(engine, *buffers, preset, cu_seqlens=bounds)
    tile = 0
    for b, (_, mine) in enumerate(each):
        n = n_tiles(LENGTHS[b])
        assert_same(mine, slice(int(bounds[b]), int(bounds[b + 1])), slice(tile, tile + n), 0, whole)
        tile += n


@exactly
@pytest.mark.parametrize("preset", POLICIES)
def test_batches_of_equal_length(engine: Engine, preset: str) -> None:
    generator = torch.Generator().manual_seed(6)
    q, k, v = (torch.randn(3, h, 333, 64, generator=generator) for h in (4, 2, 2))
    whole = run(engine, q, k, v, preset)
    for b in range(3):
        mine = run(engine, q[b : b + 1], k[b : b + 1], v[b : b + 1], preset)
        assert_same(mine, slice(0, 333), slice(0, n_tiles(333)), b, whole)


@exactly
@pytest.mark.parametrize("preset", POLICIES)
def test_chunks_behind_left_padding(engine: Engine, preset: str) -> None:
    """The last 100 rows of a padded batch, as in chunked prefill."""
    generator = torch.Generator().manual_seed(7)
    q, k, v = (torch.randn(2, h, n, 64, generator=generator) for h, n in ((4, 100), (2, 400), (2, 400)))
    padding = torch.arange(400) >= torch.tensor([[0], [130]])
    whole = run(engine, q, k, v, preset, key_padding=padding)
    for b, start in ((0, 0), (1, 130)):
        mine = run(engine, q[b : b + 1], k[b : b + 1, :, start:], v[b : b + 1, :, start:], preset)
        assert_same(mine, slice(0, 100), slice(0, n_tiles(100)), b, whole)


@pytest.mark.parametrize("engine", EXACTLY_REPEATABLE, ids=str)
@over(25, case=cases(work=1500, cells=40))
def test_repeated_calls(engine: Engine, case: Case) -> None:
    q, k, v = case.tensors()
    first, second = (
        engine.attention(q, k, v, case.policy(), scale=case.scale, return_lse=True, **case.arguments())
        for _ in range(2)
    )
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])


@native
@over(25, case=cases())
def test_strides(engine: Engine, case: Case) -> None:
    """Views in any layout give what their contiguous copies give; BLAS may add up in another order for another."""
    q, k, v = case.tensors()
    arguments = {"scale": case.scale, "return_lse": True} | case.arguments()
    view = engine.attention(q, k, v, case.policy(), **arguments)
    copy = engine.attention(q.contiguous(), k.contiguous(), v.contiguous(), case.policy(), **arguments)
    assert torch.equal(view[0], copy[0])
    assert torch.equal(view[1], copy[1])


@native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("m", [1, 64, 1500])
@pytest.mark.parametrize("preset", ["dense", "router", "router-on-quest"])
def test_thread_counts(engine: Engine, preset: str, m: int, dtype: torch.dtype) -> None:
    """Enough work for several threads; decode may share one row's keys between them."""
    generator = torch.Generator().manual_seed(8)
    q, k, v = (torch.randn(2, h, n, 64, generator=generator).to(dtype) for h, n in ((6, m), (2, 1500), (2, 1500)))
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            results.append(run(engine, q, k, v, preset))
    finally:
        torch.set_num_threads(before)
    for out, lse, selection in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(lse, results[0][1])
        assert torch.equal(selection.kv_idx, results[0][2].kv_idx)
        assert torch.equal(selection.margin.nan_to_num(2), results[0][2].margin.nan_to_num(2))
