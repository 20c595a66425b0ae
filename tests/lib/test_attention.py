"""Exact attention over kept blocks: every backend against the brute force, and the identities that tie the modes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import strategies as st

import closecall
from closecall.policy import accepted
from compare import assert_attention, everything, kept_of
from drawing import PRESETS, Case, cases, over
from engines import FLOATS, Engine, compiled, pairs
from oracle import attend as brute_force
from oracle import exact


@compiled
@over(110, case=cases(), softcap=st.sampled_from((0.0, 0.0, 0.0, 0.5, 3.0, 50.0)))
def test_attention_and_select_then_attend_match_the_oracle(engine: Engine, case: Case, softcap: float) -> None:
    q, k, v = case.tensors()
    given = {"scale": case.scale, "softcap": softcap, "return_lse": True}
    one = engine.attention(q, k, v, case.policy(), **given, **case.arguments())
    selection = engine.select(q, k, case.policy(), scale=case.scale, **case.arguments())
    two = engine.attend(q, k, v, selection, **given)
    expected = brute_force(q, k, v, kept_of(selection), case.tiles(), case.used_scale, softcap)
    for out, lse in (one, two):
        assert (out.dtype, lse.dtype) == (case.dtype, torch.float32)
        assert out.shape == (case.batch, case.heads, case.q_len, case.v_dim)
        assert lse.shape == out.shape[:3]
        assert_attention(out, lse, expected)
    assert torch.equal(engine.attend(q, k, v, selection, scale=case.scale, softcap=softcap), two[0])


@over(20, case=cases(dtypes=(torch.float64,)))
def test_reference_in_float64_matches_to_its_last_digits(case: Case) -> None:
    q, k, v = case.tensors()
    selection = closecall.select(q, k, case.policy(), scale=case.scale, backend="reference", **case.arguments())
    out, lse = closecall.attend(q, k, v, selection, scale=case.scale, backend="reference", return_lse=True)
    assert lse.dtype == torch.float64
    assert_attention(out, lse, brute_force(q, k, v, kept_of(selection), case.tiles(), case.used_scale))


def tensors(heads: int = 4, kv_heads: int = 2, q_len: int = 600, k_len: int = 600, dim: int = 64, dtype=torch.float32):
    generator = torch.Generator().manual_seed(q_len + k_len + dim)
    shapes = ((heads, q_len), (kv_heads, k_len), (kv_heads, k_len))
    return tuple(torch.randn(1, h, n, dim, generator=generator).to(dtype) for h, n in shapes)


@compiled
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_outputs_are_rounded_and_not_cut_off(engine: Engine, dtype: torch.dtype) -> None:
    """The oracle allows each output a rounding or two. If bits were cut off, almost all would err towards zero."""
    q, k, v = tensors(q_len=100, k_len=100, dtype=dtype)
    out = engine.attention(q, k, v, "dense").double()
    k, v = (x.double().repeat_interleave(2, 1) for x in (k, v))
    truth = torch.nn.functional.scaled_dot_product_attention(q.double(), k, v, is_causal=True)
    towards_zero = float((out.abs() < truth.abs()).double().mean())
    assert 0.4 < towards_zero < 0.6


SMALL = {"block": 16, "tile": 16, "budget": 3}  # tile budget 6 of 21 blocks
ON_TOPK = [("router", "topk"), ("router-on-quest", "quest")]


@compiled
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("preset", "q_len"), pairs(PRESETS, [150, 77, 1], lambda i, j: i % 3 == j))
def test_a_budget_that_covers_everything_is_dense_is_sdpa(engine, preset: str, q_len: int, dtype: torch.dtype) -> None:
    q, k, v = tensors(q_len=q_len, k_len=150, dtype=dtype)
    given = {"budget": 10, "tile_factor": 1, "block": 16, "tile": 16}  # 150 keys are 10 blocks
    policy = closecall.policy(preset, **accepted(preset, given))
    out, lse = engine.attention(q, k, v, policy, return_lse=True)
    at = torch.arange(150)
    causal = at <= at[-q_len:, None]
    sdpa = torch.nn.functional.scaled_dot_product_attention(
        q.double(), k.double(), v.double(), attn_mask=causal, enable_gqa=True
    )
    selection = engine.select(q, k, policy)
    assert selection.kept_fraction == 1
    expected = brute_force(q, k, v, kept_of(selection), _tiles(q_len, 150), 64**-0.5)
    assert (abs(exact(sdpa) - expected.out) < 1e-12).all()
    assert_attention(out, lse, expected)
    dense, dense_lse = engine.attention(q, k, v, closecall.policy("dense", block=16, tile=16), return_lse=True)
    assert torch.equal(out, dense)
    assert torch.equal(lse, dense_lse)


def _tiles(q_len: int, k_len: int, block: int = 16, tile: int = 16):
    from oracle import tiles

    return tiles(1, q_len, k_len, block, tile)


def same(engine: Engine, first: closecall.Policy, second: closecall.Policy) -> None:
    """Both policies keep the same blocks and give the same bits."""
    q, k, v = tensors(q_len=330, k_len=330)
    one, two = engine.select(q, k, first), engine.select(q, k, second)
    assert kept_of(one) == kept_of(two)
    assert one.kept_fraction < 0.9  # else the identity is empty
    assert torch.equal(engine.attention(q, k, v, first), engine.attention(q, k, v, second))


@compiled
@pytest.mark.parametrize(
    ("trigger", "names"),
    pairs(["quantile", "per-cell", "random", "last"], ON_TOPK, lambda i, j: i % 2 == j),
)
def test_q_zero_is_topk_and_q_one_is_topk_at_the_expanded_budget(engine, trigger: str, names: tuple[str, str]) -> None:
    router, topk = names
    same(engine, closecall.policy(router, q=0, trigger=trigger, **SMALL), closecall.policy(topk, **SMALL))
    wide = SMALL | {"budget": 6}
    same(engine, closecall.policy(router, q=1, trigger=trigger, **SMALL), closecall.policy(topk, **wide))


@compiled
@pytest.mark.parametrize(("router", "topk"), ON_TOPK)
def test_rho_one_is_topk(engine: Engine, router: str, topk: str) -> None:
    same(engine, closecall.policy(router, rho=1, **SMALL), closecall.policy(topk, **SMALL))


@compiled
def test_absolute_threshold_at_its_ends(engine: Engine) -> None:
    absolute = {"trigger": "absolute"} | SMALL
    same(engine, closecall.policy("router", threshold=1, **absolute), closecall.policy("topk", **SMALL | {"budget": 6}))
    same(engine, closecall.policy("router", threshold=0, **absolute), closecall.policy("topk", **SMALL))


@compiled
@pytest.mark.parametrize("aggregate", ["max", "mean"])
@pytest.mark.parametrize("preset", ["topk", "quest"])
def test_tiles_of_one_row_choose_for_themselves(engine: Engine, preset: str, aggregate: str) -> None:
    """Row by row as a chunk of its own; a single row is its own maximum and its own mean."""
    policy = closecall.policy(preset, tile=1, block=16, budget=3, aggregate=aggregate)
    q, k, v = tensors(q_len=40, k_len=200)
    q, k = q.mul(2).round(), k.mul(2).round()  # exact scores
    selection = engine.select(q, k, policy, scale=1.0)
    out = engine.attend(q, k, v, selection, scale=1.0)
    for i in (0, 17, 39):
        stop = 200 - 40 + i + 1
        alone = engine.select(q[:, :, i : i + 1], k[:, :, :stop], policy, scale=1.0)
        for h in range(4):
            assert kept_of(alone)[0, h, 0] == kept_of(selection)[0, h, i]
        expected = brute_force(
            q[:, :, i : i + 1], k[:, :, :stop], v[:, :, :stop], kept_of(alone), _tiles(1, stop, tile=1), 1.0
        )
        assert (abs(exact(out[:, :, i : i + 1]) - expected.out) <= expected.out_error).all()


@compiled
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("q_len", [1, 2, 100])
def test_dense_chunks_are_the_last_rows_of_the_whole(engine: Engine, q_len: int, dtype: torch.dtype) -> None:
    q, k, v = tensors(q_len=333, k_len=333, dtype=dtype)
    dense = closecall.policy("dense", block=16, tile=16)
    whole, whole_lse = engine.attention(q, k, v, dense, return_lse=True)
    chunk, chunk_lse = engine.attention(q[:, :, -q_len:], k, v, dense, return_lse=True)
    plan = _tiles(333, 333)
    expected = brute_force(q, k, v, everything(plan, 4), plan, 64**-0.5)
    error = torch.from_numpy(2 * expected.out_error[:, :, -q_len:])
    assert bool(((chunk.double() - whole[:, :, -q_len:].double()).abs() <= error).all())
    error = torch.from_numpy(2 * expected.lse_error[:, :, -q_len:])
    assert bool(((chunk_lse.double() - whole_lse[:, :, -q_len:].double()).abs() <= error).all())


@compiled
@pytest.mark.parametrize("dtype", FLOATS)
def test_halves_merge_by_their_lse(engine: Engine, dtype: torch.dtype) -> None:
    """Attention over the even blocks and over the odd ones, weighted by exp(lse), is attention over both."""
    q, k, v = tensors(q_len=150, k_len=210, dtype=dtype)
    whole = engine.select(q, k, closecall.policy("dense", block=16, tile=32))
    n, halves = whole.n_blocks, []
    for parity in (0, 1):
        mine = torch.where(whole.kv_idx % 2 == parity, whole.kv_idx, n).where(whole.kv_idx < n, torch.tensor(n))
        mine = mine.sort(-1).values.to(torch.int32)
        half = closecall.Selection.from_blocks(mine, (mine < n).sum(-1), q_len=150, k_len=210, block=16, tile=32)
        halves.append(engine.attend(q, k, v, half, return_lse=True))
    plan = _tiles(150, 210, tile=32)
    expected = brute_force(q, k, v, everything(plan, 4), plan, 64**-0.5)
    weights = torch.stack([lse for _, lse in halves]).double().softmax(0)
    merged = sum(w[..., None] * out.double() for w, (out, _) in zip(weights, halves, strict=True))
    # Each half is off by at most its own bound; merged, by at most both together and the whole's.
    bound = expected.out_error.copy()
    for parity, (out, lse) in enumerate(halves):
        kept = {c: [b for b in blocks if b % 2 == parity] for c, blocks in everything(plan, 4).items()}
        half = brute_force(q, k, v, kept, plan, 64**-0.5)
        assert_attention(out, lse, half)
        spread = abs(half.out).max(-1, keepdims=True, initial=0) * half.lse_error[..., None]
        bound += half.out_error + 2 * spread
    assert (abs(exact(merged) - expected.out) <= bound).all()


def test_rows_that_see_nothing_get_zero_and_minus_infinity(engine: Engine) -> None:
    """A hand-made selection that leaves out the diagonal: the first tile's rows, and those before a kept block."""
    q, k, v = tensors(q_len=64, k_len=64)
    n = 4
    index = torch.full((1, 4, 4, 1), n, dtype=torch.int32)
    counts = torch.zeros(1, 4, 4, dtype=torch.int32)
    index[:, :, 2], counts[:, :, 2] = 2, 1  # tile 2 sees only the diagonal block; the others nothing
    selection = closecall.Selection.from_blocks(index, counts, q_len=64, k_len=64, block=16, tile=16)
    out, lse = engine.attend(q, k, v, selection, return_lse=True)
    expected = brute_force(q, k, v, kept_of(selection), _tiles(64, 64), 64**-0.5)
    assert_attention(out, lse, expected)
    assert bool(lse[:, :, :32].isneginf().all())
    assert bool((out[:, :, 48:] == 0).all())
    assert bool(lse[:, :, 32:48].isfinite().all())


def test_kept_blocks_ahead_of_a_row_are_masked(engine: Engine) -> None:
    """Blocks smaller than tiles: a tile keeps only its own last block, which its first rows cannot see."""
    q, k, v = tensors(q_len=64, k_len=64)
    index = torch.tensor([7, 15], dtype=torch.int32).view(1, 1, 2, 1).expand(1, 4, 2, 1)
    counts = torch.ones(1, 4, 2, dtype=torch.int64)
    selection = closecall.Selection.from_blocks(index, counts, q_len=64, k_len=64, block=4, tile=32)
    out, lse = engine.attend(q, k, v, selection, return_lse=True)
    plan = _tiles(64, 64, block=4, tile=32)
    assert_attention(out, lse, brute_force(q, k, v, kept_of(selection), plan, 64**-0.5))
    assert bool(lse[:, :, :28].isneginf().all())


@compiled
def test_large_logits_do_not_overflow(engine: Engine) -> None:
    """Logits of about 1e4 apart: the softmax is one-hot, not NaN."""
    q, k, v = tensors(q_len=130, k_len=130)
    plan = _tiles(130, 130)
    out, lse = engine.attention(q * 100, k * 100, v, closecall.policy("dense", block=16, tile=16), return_lse=True)
    assert_attention(out, lse, brute_force(q * 100, k * 100, v, everything(plan, 4), plan, 64**-0.5))


@compiled
def test_inputs_are_left_alone(engine: Engine) -> None:
    q, k, v = tensors()
    before = [x.clone() for x in (q, k, v)]
    engine.attention(q, k, v, closecall.policy("router", **SMALL))
    assert all(torch.equal(x, y) for x, y in zip(before, (q, k, v), strict=True))
