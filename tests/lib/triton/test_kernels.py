"""The Triton kernels under the interpreter, on shapes of its size: against the oracle, and against the reference.

tests/engines.py puts the same backend through the tests of all backends, as far as their shapes allow.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from launches import NoSync, launched

import closecall
from closecall import backends
from closecall.backends.triton import attending, backend, device, interpret, launch, rank, tables
from closecall.geometry import plan
from closecall.policy import accepted
from closecall.rules.certified import Certified
from closecall.rules.last_tile import LastTile
from closecall.rules.router import Router
from closecall.rules.top_p import TopP
from closecall.rules.topk import TopK
from compare import assert_attention, assert_selection, everything, kept_of
from drawing import PRESETS, TRIGGERS, Case, drawn
from engines import FLOATS, FUZZ, Engine, pairs
from oracle import UNIT_ROUNDOFF, exact, tiles
from oracle import attend as brute_attend


class Patient(Engine):
    """Runs what it is given, however long the interpreter takes."""

    def _bearable(self, *_: Any) -> None:
        pass


ENGINE = Patient("triton")
REFERENCE = Engine("reference")
CUTTING = tuple(p for p in PRESETS if p != "dense")
# The last tiles protected on top of the router, whose counts only the device knows.
PROTECTED: dict[str, dict[str, Any]] = {
    "router, last tile": {},
    "router, last tiles dense": {"factor": "dense", "tiles": 2},
    "router, nobody pays": {"pay": False},
}


@st.composite
def tiny(draw: st.DrawFn, **kwargs: Any) -> Case:
    """Cases of few programs: the interpreter's time goes by programs and steps, not by numbers."""
    seed = draw(st.integers(2**31, 2**32 - 1))
    options: dict[str, Any] = {
        "numbers": ("normal",), "presets": tuple(PRESETS), "dtypes": FLOATS, "odd_blocks": True,
        "sequences": ("whole", "left", "right", "packed"), "work": 500, "cells": 14,
    } | kwargs  # fmt: skip
    case = drawn(seed, **options)
    heads, kv_heads = [(1, 1), (2, 1), (4, 2), (3, 3)][seed % 4]
    return dataclasses.replace(case, heads=heads, kv_heads=kv_heads, batch=min(case.batch, 2), lengths=case.lengths[:2]
                               if case.sequences in ("left", "right") else case.lengths)  # fmt: skip


def few(count: int) -> Any:
    return settings(max_examples=count * (15 if FUZZ else 1))


@few(6)
@given(case=tiny(), softcap=st.sampled_from((0.0, 0.0, 3.0)))
def test_attention_equals_the_oracle(case: Case, softcap: float) -> None:
    q, k, v = case.tensors()
    options = {"scale": case.scale, **case.arguments()}
    out, lse = ENGINE.attention(q, k, v, case.policy(), softcap=softcap, return_lse=True, **options)
    assert out.dtype == case.dtype
    selection = ENGINE.select(q, k, case.policy(), **options)
    expected = brute_attend(q, k, v, kept_of(selection), case.tiles(), case.used_scale, softcap)
    assert_attention(out, lse, expected)
    assert torch.equal(ENGINE.attend(q, k, v, selection, scale=case.scale, softcap=softcap), out)


@few(7)
@given(case=tiny(numbers=("integers", "ties"), odd_blocks=False, presets=CUTTING))
def test_selection_equals_the_reference_block_for_block(case: Case) -> None:
    q, k, _ = case.tensors()
    options = {"scale": case.scale, **case.arguments()}
    mine, theirs = (e.select(q, k, case.policy(), **options) for e in (ENGINE, REFERENCE))
    assert_selection(case, q, k, mine)
    assert torch.equal(mine.kv_idx, theirs.kv_idx)
    assert torch.equal(mine.counts, theirs.counts)
    assert torch.equal(mine.triggered, theirs.triggered)
    if case.aggregate == "max":
        assert torch.equal(mine.margin.nan_to_num(2), theirs.margin.nan_to_num(2))


@few(4)
@given(case=tiny(presets=CUTTING))
def test_selection_equals_the_oracle_up_to_rounding(case: Case) -> None:
    q, k, _ = case.tensors()
    assert_selection(case, q, k, ENGINE.select(q, k, case.policy(), scale=case.scale, **case.arguments()))


# --- Each path by itself ---------------------------------------------------------------------------------------------


def tensors(
    heads: int = 2, kv_heads: int = 1, q_len: int = 70, k_len: int = 70, dim: int = 32, v_dim: int = 32,
    dtype: torch.dtype = torch.float32, batch: int = 1,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    generator = torch.Generator().manual_seed(q_len + k_len + dim)
    shapes = ((heads, q_len, dim), (kv_heads, k_len, dim), (kv_heads, k_len, v_dim))
    q, k, v = (torch.randn(batch, *shape, generator=generator).to(dtype) for shape in shapes)
    return q, k, v


def dense(block: int = 32, tile: int = 32) -> closecall.Policy:
    return closecall.policy("dense", block=block, tile=tile)


@pytest.mark.parametrize(("dim", "v_dim"), [(64, 64), (96, 96), (128, 64), (192, 128), (256, 256), (80, 100), (200, 1)])
@pytest.mark.parametrize("q_len", [40, 2])
def test_head_dims(dim: int, v_dim: int, q_len: int) -> None:
    """Whole, sliced and padded ones, in both paths."""
    q, k, v = tensors(q_len=q_len, k_len=40, dim=dim, v_dim=v_dim)
    plan = tiles(1, q_len, 40, 32, 32)
    out, lse = ENGINE.attention(q, k, v, dense(), return_lse=True)
    assert_attention(out, lse, brute_attend(q, k, v, everything(plan, 2), plan, dim**-0.5))


@pytest.mark.parametrize(("block", "tile"), [(64, 64), (128, 16), (16, 128), (100, 1), (24, 5), (1, 8), (256, 300)])
def test_grids(block: int, tile: int) -> None:
    """Blocks and tiles of more than one step, of less than one, and off the powers of two."""
    n = min(2 * max(block, tile) + 27, 330)
    q, k, v = tensors(heads=1, q_len=n if tile > 16 else 3 * tile - 1, k_len=n)
    plan = tiles(1, q.shape[2], n, block, tile)
    out, lse = ENGINE.attention(q, k, v, dense(block, tile), return_lse=True)
    assert_attention(out, lse, brute_attend(q, k, v, everything(plan, 1), plan, 32**-0.5))


@pytest.mark.parametrize(
    ("preset", "dtype"), pairs(["dense", "router-on-quest"], FLOATS, lambda i, j: i == j or (i, j) == (1, 2))
)
def test_few_rows_equal_many(monkeypatch: pytest.MonkeyPatch, preset: str, dtype: torch.dtype) -> None:
    """Decode takes a path of its own; sent down the other one, the same call must agree, row by row."""
    q, k, v = tensors(heads=6, kv_heads=2, q_len=5, k_len=130, v_dim=24, dtype=dtype, batch=2)
    policy = closecall.policy(preset, block=16, tile=16, **accepted(preset, {"budget": 5, "tile_factor": 1}))
    padding = torch.arange(130) >= torch.tensor([[0], [127]])  # of the second sequence only three rows are real
    options: dict[str, Any] = {"key_padding": padding, "return_lse": True}
    selection = ENGINE.select(q, k, policy, key_padding=padding)
    expected = brute_attend(q, k, v, kept_of(selection), tiles(2, 5, 130, 16, 16, key_padding=padding), 32**-0.5)
    results = [ENGINE.attention(q, k, v, policy, **options)]
    monkeypatch.setattr(attending, "FEW_ROWS", 0)
    results.append(ENGINE.attention(q, k, v, policy, **options))
    for out, lse in results:
        assert_attention(out, lse, expected)
        assert bool((out[1, :, :2] == 0).all())


@pytest.mark.parametrize("number", [torch.nan, torch.inf])
@pytest.mark.parametrize("q_len", [48, 4])
def test_a_value_that_is_no_number_reaches_the_rows_that_see_it_in_its_column(q_len: int, number: float) -> None:
    """Key 46 of 48, in a block that the rows before it see in part."""
    q, k, v = tensors(q_len=q_len, k_len=48, v_dim=48)
    clean, clean_lse = ENGINE.attention(q, k, v, dense(16, 32), return_lse=True)
    seen = torch.arange(48 - q_len, 48) >= 46
    for column in (7, 40):  # one in each of the two slices that 48 is made of
        spoiled = v.clone()
        spoiled[0, 0, 46, column] = number
        out, lse = ENGINE.attention(q, k, spoiled, dense(16, 32), return_lse=True)
        assert torch.equal(lse, clean_lse)
        assert bool(out[:, :, seen, column].isnan().all())
        out[:, :, seen, column] = clean[:, :, seen, column]
        assert torch.equal(out, clean)


@pytest.mark.parametrize("q_len", [48, 4])
def test_a_key_or_a_row_that_is_no_number(q_len: int) -> None:
    q, k, v = tensors(q_len=q_len, k_len=48)
    clean = ENGINE.attention(q, k, v, dense(16, 32))
    seen = torch.arange(48 - q_len, 48) >= 46
    spoiled = k.clone()
    spoiled[0, 0, 46, 3] = torch.nan
    out, lse = ENGINE.attention(q, spoiled, v, dense(16, 32), return_lse=True)
    assert torch.equal(lse.isnan(), seen.expand(1, 2, -1))
    assert torch.equal(out.isnan().all(-1), seen.expand(1, 2, -1))
    assert torch.equal(out[:, :, ~seen], clean[:, :, ~seen])
    row = q.clone()
    row[0, 1, 2] = torch.nan
    out, lse = ENGINE.attention(row, k, v, dense(16, 32), return_lse=True)
    assert bool(out[0, 1, 2].isnan().all())
    assert bool(lse[0, 1, 2].isnan())
    out[0, 1, 2] = clean[0, 1, 2]
    assert torch.equal(out, clean)


def test_a_block_with_a_key_that_is_no_number_ranks_last() -> None:
    generator = torch.Generator().manual_seed(3)
    q, k = (torch.randint(-3, 4, (1, 1, 160, 16), generator=generator).float() for _ in range(2))
    k[0, 0, 20, 5] = torch.nan  # block 1
    q[0, 0, 155] = torch.nan
    for preset in ("topk", "quest"):
        policy = closecall.policy(preset, block=16, tile=32, budget=6, tile_factor=1)
        mine, theirs = (e.select(q, k, policy) for e in (ENGINE, REFERENCE))
        assert torch.equal(mine.kv_idx, theirs.kv_idx)
        assert 1 not in kept_of(mine)[0, 0, 4]


@pytest.mark.parametrize("splits", [1, 2, 8])
def test_any_number_of_splits(monkeypatch: pytest.MonkeyPatch, splits: int) -> None:
    """More splits than blocks leave some without any."""
    q, k, v = tensors(heads=4, q_len=1, k_len=90)
    monkeypatch.setattr(attending, "_splits", lambda *_: splits)
    plan = tiles(1, 1, 90, 32, 32)
    out, lse = ENGINE.attention(q, k, v, dense(), return_lse=True)
    assert_attention(out, lse, brute_attend(q, k, v, everything(plan, 4), plan, 32**-0.5))


def test_rows_of_sixteen_at_most_share_a_tile_with_all_heads_of_their_group() -> None:
    """9 heads of 3 rows are 27 rows of one key head: two programs, the second partly empty."""
    q, k, v = tensors(heads=9, q_len=3, k_len=50)
    plan = tiles(1, 3, 50, 32, 32)
    out, lse = ENGINE.attention(q, k, v, dense(), return_lse=True)
    assert_attention(out, lse, brute_attend(q, k, v, everything(plan, 9), plan, 32**-0.5))


@pytest.mark.parametrize("axis", ["heads", "rows", "columns"])
def test_offsets_past_32_bits(monkeypatch: pytest.MonkeyPatch, axis: str) -> None:
    """In a buffer of which only the pages in use exist; the interpreter would copy all of it back onto itself."""
    from triton.runtime.interpreter import GridExecutor

    monkeypatch.setattr(GridExecutor, "_restore_args_dev", lambda *_: None)
    try:
        ocean = torch.empty(2**32 + 2**24, dtype=torch.float16)
    except RuntimeError as error:
        pytest.skip(f"no address space for 8 GiB: {error}")
    n, dim, quest = 64, 16, closecall.policy("quest", block=8, tile=32, budget=6, tile_factor=1)
    mass = dataclasses.replace(quest, scorer=closecall.SCORERS["outliers"](m=1), aggregate="mass")
    strides = {"heads": (2**31 + 64, dim, 1), "rows": (dim, 2**32 // n, 1), "columns": (1, dim, 2**32 // dim)}[axis]
    for q_len in (n, 2):
        q, k, v = tensors(kv_heads=2, q_len=q_len, k_len=n, dim=dim, v_dim=dim, dtype=torch.float16)
        far = [ocean.as_strided(x.shape, (0, *strides), 2**18 * i).copy_(x) for i, x in enumerate((q, k, v))]
        assert sum((size - 1) * step for size, step in zip(far[1].shape, far[1].stride(), strict=True)) > 2**31
        for policy in (quest, mass) if q_len == n else ():  # few rows are scored by the kernel that scores many
            assert torch.equal(ENGINE.select(*far[:2], policy).kv_idx, ENGINE.select(q, k, policy).kv_idx)
        assert torch.equal(ENGINE.attention(*far, dense()), ENGINE.attention(q, k, v, dense()))


def test_float16_weights_are_rounded_as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device the weights of float16 calls meet the values in float16, which adds 2^-11 of sum p |v|."""
    q, k, v = tensors(dtype=torch.float16, q_len=40, k_len=40)
    plan = tiles(1, 40, 40, 32, 32)
    exactly = brute_attend(q, k, v, everything(plan, 2), plan, 32**-0.5)
    sizes = brute_attend(q, k, v.abs(), everything(plan, 2), plan, 32**-0.5)
    kernel = interpret.kernels(True).attend_kernel
    asked = []

    class Narrow:
        def __getitem__(self, grid: Any) -> Any:
            def run(*args: Any, **kwargs: Any) -> None:
                asked.append(kwargs["WIDE"])
                kernel[grid](*args, **kwargs | {"WIDE": False})

            return run

    monkeypatch.setattr(device, "kernels", lambda interpreted: SimpleNamespace(attend_kernel=Narrow()))
    # The marks for NaN and infinite values are bfloat16 there, which the interpreter cannot multiply.
    module = interpret._interpreted()[0]
    monkeypatch.setattr(module, "weigh", lambda w, x, acc, *_: module.tl.dot(w.to(x.dtype), x, acc))
    for each in interpret._interpreted():
        if hasattr(each, "weigh"):
            monkeypatch.setattr(each, "weigh", module.weigh)
    out, lse = ENGINE.attention(q, k, v, dense(), return_lse=True)
    assert asked == [True]
    error = exactly.out_error + 1.01 * UNIT_ROUNDOFF[torch.float16] * sizes.out
    assert_attention(out, lse, dataclasses.replace(exactly, out_error=error))
    wide = np.abs(exact(out) - exactly.out) > exactly.out_error
    assert wide.any()  # so that the wider bound is needed, and the narrow products were really made


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_a_mean_key_is_stored_in_parts_that_hold_all_of_its_bits(dtype: str) -> None:
    kind = {name: d for d, name in launch.DTYPES.items()}[dtype]
    _, k, _ = tensors(k_len=70, dim=16, dtype=kind)
    k = k * 2.0**-9 if dtype == "fp16" else k  # small, where float16 runs out of exponents
    policy = closecall.policy("topk", block=16, tile=16, budget=3)
    here = tables.tables(plan(1, 70, 70, 16, 16), k.device)
    with ENGINE._forced():
        parts, told = backend._summarise(k, policy.scorer.planes, here, 16)
    back = sum(parts[0, i].double() * 2.0 ** (-told["SHIFT"] * i) for i in range(told["PLANES"]))
    mean = torch.stack([b.double().mean(-2) for b in k[0, 0].split(16)])
    size = torch.stack([b.double().abs().mean(-2) for b in k[0, 0].split(16)])
    assert bool(((back - mean).abs() <= (16 + 4) * 2.0**-24 * size).all())


def test_three_products_of_parts_are_as_good_as_float32() -> None:
    """float32 on NVIDIA: both factors in two parts of 11 bits, the product of the two small parts left out."""

    def cut(x: np.ndarray) -> np.ndarray:
        return (x.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)

    generator = np.random.default_rng(0)
    for dim in (16, 64, 128, 256):
        a, b = (generator.standard_normal((200, dim)).astype(np.float32) for _ in range(2))
        a1, b1 = cut(a), cut(b)
        a2, b2 = cut(a - a1), cut(b - b1)
        parts = sum((x.astype(np.float64) * y).sum(1) for x, y in ((a1, b1), (a1, b2), (a2, b1)))
        error = np.abs(parts - (a.astype(np.float64) * b).sum(1))
        size = np.abs(a.astype(np.float64) * b).sum(1)
        assert (error <= 2.0**-20 * size).all()
        # What the oracle allows float32 arithmetic beside the additions themselves.
        assert (error <= 2.0**-24 * (dim + 8) * size).all()


# --- Selection -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trigger", TRIGGERS)
@pytest.mark.parametrize("preset", ["router", "router-on-quest"])
def test_every_trigger(preset: str, trigger: str) -> None:
    generator = torch.Generator().manual_seed(3)
    q, k = (torch.randint(-3, 4, (1, h, 160, 16), generator=generator).float() for h in (2, 1))
    policy = closecall.policy(preset, block=16, tile=32, budget=5, tile_factor=1, trigger=trigger, sinks=0)
    mine, theirs = (e.select(q, k, policy) for e in (ENGINE, REFERENCE))
    assert torch.equal(mine.kv_idx, theirs.kv_idx)
    assert torch.equal(mine.triggered, theirs.triggered)


def test_equal_scores_go_to_the_lower_block_whatever_the_sign_of_zero() -> None:
    k = torch.zeros(1, 1, 160, 16)
    k[:, :, 32:64] = -0.0
    q = torch.full((1, 1, 160, 16), -1.0)
    policy = closecall.policy("topk", block=16, tile=16, budget=5, tile_factor=1)
    assert kept_of(ENGINE.select(q, k, policy))[0, 0, 9] == [0, 1, 2, 3, 9]


def test_scores_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tiles of one head at a time, five, two heads, and one tile where not even that fits."""
    q, k, _ = tensors(heads=3, kv_heads=3, q_len=96, k_len=96, dim=16, batch=2)
    policy = closecall.policy("quest", block=16, tile=16, budget=5, tile_factor=1)
    made: list[int] = []
    empty, tile = torch.empty, 8 * 2 * 6  # bytes

    def watched(*shape: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs.get("dtype") == torch.int32 and shape[-1] == 6:  # one number per block
            made.append(int(np.prod(shape)) * 8)
        return empty(*shape, **kwargs)

    with ENGINE._forced():
        whole = backend.rank(q, k, policy, plan(2, 96, 96, 16, 16), 0.25)
        monkeypatch.setattr(torch, "empty", watched)
        for size in (2 * tile, 5 * tile, 2 * 6 * tile, 1):
            monkeypatch.setattr(rank, "SCORE_BYTES", size)
            made.clear()
            parts = backend.rank(q, k, policy, plan(2, 96, 96, 16, 16), 0.25)
            assert torch.equal(parts.order, whole.order)
            assert torch.equal(parts.scores, whole.scores)
            assert max(made) <= max(size, tile)
            assert sum(made) == tile * 3 * 6


@pytest.mark.parametrize(("heads", "n_tiles", "group"), [(1, 1, 1), (3, 7, 1), (32, 2048, 1), (12, 7, 3), (4, 1, 4)])
def test_chunks_cover_every_cell_once(monkeypatch: pytest.MonkeyPatch, heads: int, n_tiles: int, group: int) -> None:
    for size in (1, 8 * 64 * 5, 2**20, 2**40):
        monkeypatch.setattr(rank, "SCORE_BYTES", size)
        seen = torch.zeros(heads, n_tiles, dtype=torch.int64)
        for h, t in rank.chunks(1, heads, n_tiles, 64, group):
            assert (h.stop - h.start) * (t.stop - t.start) * 64 * 8 <= max(size, group * 64 * 8)
            assert (h.start % group, h.stop % group) == (0, 0)
            seen[h, t] += 1
            if size == 1 and int(seen.sum()) > 100:
                break
        else:
            assert bool((seen == 1).all())


@pytest.mark.parametrize(
    ("kind", "q_len"),
    # Every kind once, many rows and few in turn.
    pairs(
        [*CUTTING, "outliers mass", "box mass-max", "outliers softmax group", *PROTECTED, "candidates"],
        [64, 1],
        lambda i, j: i % 2 == j,
    ),
)
def test_nothing_is_asked_of_the_device(monkeypatch: pytest.MonkeyPatch, kind: str, q_len: int) -> None:
    """After a first call made the plan's tables, everything between the kernels is launches."""
    q, k, v = tensors(q_len=q_len, k_len=160)
    preset = kind if kind in CUTTING else "router"
    policy = closecall.policy(preset, block=16, tile=32, budget=6, tile_factor=1)
    if kind in PROTECTED:
        policy = policy.replace(rule=LastTile(policy.rule, **PROTECTED[kind]))
    elif kind == "candidates":
        policy = policy.replace(rule=TopK(budget=6, tile_factor=1), aggregate="softmax", pool=16, candidates=1)
    elif kind != preset:
        scorer, aggregate, *share = kind.split()
        policy = policy.replace(scorer=closecall.SCORERS[scorer](), aggregate=aggregate, share=(*share, "head")[0])
    ENGINE.attention(q, k, v, policy)

    monkeypatch.setattr(device, "kernels", launched)
    made = plan(1, q_len, 160, 16, 32)
    with ENGINE._forced(), NoSync():
        kept = closecall.api.PlannedCall(q, k, policy, made, 0.2, backends.load("triton")).select()
        backend.attend(q, k, v, kept, made, 0.2)


@pytest.mark.parametrize(
    ("preset", "rule", "says"),
    [
        ("topk", TopP(), r"rule 'top-p' reads .* \(rules topk, router, and last-tile over one of them, do not\)"),
        ("topk", LastTile(TopP()), "rule 'last-tile' reads numbers back"),
        ("topk", Certified(), "rule 'certified' reads numbers back from the device, which no graph can hold"),
        ("topk-on-minference", None, "scorer 'minference' reads numbers back"),
        ("topk", None, None), ("router-on-quest", None, None), ("auto", None, None), ("topk", LastTile(Router()), None),
    ],
)  # fmt: skip
def test_what_a_graph_cannot_hold_says_so_when_it_is_captured(
    monkeypatch: pytest.MonkeyPatch, preset: str, rule: Any, says: str | None
) -> None:
    policy = closecall.policy(preset) if rule is None else closecall.policy(preset).replace(rule=rule)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    on = torch.device("cuda")
    if says is None:
        rank.check_capture(on, policy, backend.has_kernel(policy))
    else:
        with pytest.raises(RuntimeError, match=says):
            rank.check_capture(on, policy, backend.has_kernel(policy))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    rank.check_capture(on, policy, backend.has_kernel(policy))


# --- What bad input gets ---------------------------------------------------------------------------------------------


def call(x: torch.Tensor, **kwargs: Any) -> Any:
    return closecall.attention(x, x, x, "dense", backend="triton", **kwargs)


def test_cpu_tensors_without_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match=r"backend 'triton' cannot run here: .* not on cpu: use backend='cpu'"):
        call(torch.zeros(1, 1, 4, 8))


def test_an_old_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "3.4.0")
    device.installed_problem.cache_clear()
    try:
        with pytest.raises(ValueError, match=r"triton 3\.4\.0 is older than 3\.5: pip install -U triton, or use"):
            call(torch.zeros(1, 1, 4, 8))
    finally:
        device.installed_problem.cache_clear()


def test_a_triton_in_a_package_of_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch for ROCm brings it: asking for the version by the usual name is an error there."""

    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    device.installed_problem.cache_clear()
    try:
        assert device.installed_problem() is None
        monkeypatch.setattr("triton.__version__", "3.4.0+rocm7")
        device.installed_problem.cache_clear()
        assert "triton 3.4.0+rocm7 is older than 3.5" in str(device.installed_problem())
    finally:
        device.installed_problem.cache_clear()


def test_no_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "installed_problem", lambda: "triton is not installed: pip install triton")
    with pytest.raises(ValueError, match=r"triton is not installed: pip install triton, or use backend='cpu'"):
        call(torch.zeros(1, 1, 4, 8))


@pytest.mark.parametrize(
    ("x", "says"),
    [
        (torch.zeros(1, 1, 4, 8, dtype=torch.float64), "torch.float64: use float32.*backend='reference'"),
        (torch.zeros(1, 1, 4, 257), "head dim 257, the largest is 256: use backend='flex'"),
    ],
)
def test_unsupported_tensors(monkeypatch: pytest.MonkeyPatch, x: torch.Tensor, says: str) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(ValueError, match=says):
        call(x)


def test_an_unsupported_value_dim(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    x = torch.zeros(1, 1, 4, 8)
    with pytest.raises(ValueError, match="value dim 300, the largest is 256: use backend='flex'"):
        closecall.attention(x, x, torch.zeros(1, 1, 4, 300), "dense", backend="triton")


def test_another_device() -> None:
    says = backend.why_not(torch.zeros(1, 1, 4, 8, device="meta"))
    assert says is not None
    assert "cuda devices, not on meta" in says
    assert "backend='reference'" in says


class Device:
    """What torch says of a device that is not here."""

    def __init__(self, major: int = 0, minor: int = 0, arch: str = "") -> None:
        self.major, self.minor, self.gcnArchName = major, minor, arch
        self.multi_processor_count = 100


@pytest.mark.parametrize(
    ("gpu", "hip", "says"),
    [
        (Device(7, 5), None, "compute capability 8.0, not 7.5: use backend='flex'"),
        (Device(arch="gfx1100"), "6.4", "CDNA device .gfx9., not gfx1100: use backend='flex'"),
        (Device(8, 0), None, None),
        (Device(8, 6), None, None),
        (Device(8, 9), None, None),
        (Device(9, 0), None, None),
        (Device(10, 3), None, None),
        (Device(11, 0), None, None),
        (Device(12, 0), None, None),
        (Device(9, 4, "gfx942:sramecc+"), "6.4", None),
    ],
)
def test_devices(monkeypatch: pytest.MonkeyPatch, gpu: Device, hip: str | None, says: str | None) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "hip", hip)
    x = _On("cuda", torch.float16, (1, 1, 4, 64))
    problem = backend.why_not(x)  # type: ignore[arg-type]
    assert (problem is None) == (says is None)
    if says is None:
        kinds = {(8, 0): "sm_80", (8, 6): "sm_86", (8, 9): "sm_89", (9, 0): "sm_90", (10, 3): "sm_100"}
        kinds |= {(11, 0): "sm_86", (12, 0): "sm_120"}  # the least of all where the kind is unknown
        arch = kinds.get((gpu.major, gpu.minor))
        assert device.arch(torch.device("cuda")) == ("gfx942" if hip else arch)
        assert backends.explain(x) == ("triton", "cuda tensors of float16")  # type: ignore[arg-type]
    else:
        assert problem is not None
        assert says.replace("(", "").replace(")", "") in problem.replace("(gfx9)", ".gfx9.")
        choice = backends.explain(x)  # type: ignore[arg-type]
        assert choice.name == "flex"
        assert problem in choice.why


class _On:
    """As much of a tensor as the choice of a backend looks at."""

    def __init__(self, device: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        self.device, self.dtype, self.shape = torch.device(device), dtype, shape


def test_auto_falls_back_and_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "installed_problem", lambda: "triton is not installed: pip install triton")
    backends._say_once.cache_clear()
    x = _On("cuda", torch.float16, (1, 1, 4, 64))
    with pytest.warns(UserWarning, match="backend='auto' fell back to 'flex': triton is not installed"):
        assert backends.choose("auto", x).__name__.endswith("flex")  # type: ignore[arg-type,attr-defined]
    assert backends.choose("auto", x).__name__.endswith("flex")  # type: ignore[arg-type,attr-defined]
    backends._say_once.cache_clear()
