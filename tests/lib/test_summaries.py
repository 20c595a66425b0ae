"""Summaries kept from call to call: the same selections bit for bit, fewer keys read, and errors for wrong use."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

import closecall
from closecall import Policy, Selection, Summaries
from drawing import laid_out, over
from engines import ENGINES, FLOATS, Engine, has_native

NATIVE = [e for e in ENGINES if e.backend == "cpu"]
OTHERS = [e for e in ENGINES if e.backend in ("reference", "flex")]
SCORERS: dict[str, dict[str, Any]] = {
    "mean": {}, "quest": {}, "box": {}, "outliers": {"m": 2}, "boxed outliers": {"m": 1, "c": 0.5},
}  # fmt: skip
AGGREGATES = ("max", "mean", "mass", "mass-max", "softmax")
PAIRS = [(s, a) for s in SCORERS for a in AGGREGATES if not (s.endswith("outliers") and a == "mean")]  # has no kernel
POLICY = closecall.policy("router-on-quest", block=8, tile=8, budget=5, tile_factor=1)
needs_native = pytest.mark.skipif(not has_native(), reason="no native code: nothing is kept")


def made(
    scorer: str, aggregate: str = "max", *, block: int = 8, tile: int = 8, sinks: int = 1, more: int = 2
) -> Policy:
    most_forced = sinks + (tile + block - 2) // block + 1
    return Policy(
        closecall.SCORERS[scorer.removeprefix("boxed ")](**SCORERS[scorer]),
        closecall.RULES["router"](budget=most_forced + more, tile_factor=1, q=0.5),
        block=block, tile=tile, sinks=sinks, aggregate=aggregate,
    )  # fmt: skip


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def same(a: Selection, b: Selection) -> bool:
    bits = torch.equal(a.margin.view(torch.int32), b.margin.view(torch.int32))
    return bits and all(torch.equal(getattr(a, x), getattr(b, x)) for x in ("kv_idx", "counts", "triggered"))


@pytest.mark.parametrize("engine", NATIVE, ids=str)
@pytest.mark.parametrize(("scorer", "aggregate"), PAIRS)
def test_selections_are_the_same_bit_for_bit(engine: Engine, scorer: str, aggregate: str) -> None:
    """Chunks and single rows of all lengths, keys dropped in between, and other strides at every call."""

    @over(4, seed=st.integers(0, 2**32 - 1), dtype=st.sampled_from(FLOATS))
    def check(seed: int, dtype: torch.dtype) -> None:
        r = random.Random(seed)
        block, tile = r.choice([4, 5, 8, 16]), r.choice([1, 4, 8, 24])
        policy = made(scorer, aggregate, block=block, tile=tile, sinks=r.choice([0, 1, 2]), more=r.randint(2, 4))
        heads, kv_heads = r.choice([(1, 1), (2, 1), (4, 2), (6, 2)])
        batch, dim = r.choice([1, 1, 2]), r.choice([1, 8, 16, 33])
        k = draw(batch, kv_heads, 0, dim).to(dtype)
        summaries, known = Summaries(), 0
        for step in range(r.randint(3, 8)):
            if r.random() < 0.3:  # other keys from here on
                left = r.randint(max(0, k.shape[2] - 2 * block), k.shape[2])
                k = k[:, :, :left]
                summaries.crop(left)
                known = min(known, left)
            rows = r.choice([1, 1, r.randint(1, 3 * block), r.randint(1, 4 * tile), 6 * block])
            k = torch.cat([k, draw(batch, kv_heads, rows, dim, seed=seed + step).to(dtype)], 2)
            q = draw(batch, heads, rows, dim, seed=seed + 100 + step).to(dtype)
            shown = laid_out(k, r.choice(["plain", "bnhd", "spaced", "inner"]))
            assert same(engine.select(q, shown, policy, summaries=summaries), engine.select(q, k, policy))
            ranked = -(-k.shape[2] // block) > policy.rule.tile_budget  # type: ignore[attr-defined]
            assert summaries.reused == (known // block if ranked else 0)
            known = k.shape[2] if ranked else known
            assert summaries.n_keys == known

    check()


@pytest.mark.parametrize("engine", NATIVE, ids=str)
@pytest.mark.parametrize(("scorer", "aggregate"), PAIRS)
def test_complete_blocks_are_not_read_again(engine: Engine, scorer: str, aggregate: str) -> None:
    """Poison in all of them but those that are forced, and the selection is as if it were not there."""
    policy, summaries = made(scorer, aggregate), Summaries()
    q, k = draw(1, 4, 130, 16), draw(1, 2, 130, 16, seed=1)
    engine.select(q[:, :, :117], k[:, :, :117], policy, summaries=summaries)
    poisoned = k.clone()
    poisoned[:, :, 8:112] = torch.nan
    got = engine.select(q[:, :, 117:], poisoned, policy, summaries=summaries)
    assert summaries.reused == 14
    assert same(got, engine.select(q[:, :, 117:], k, policy))
    assert not same(got, engine.select(q[:, :, 117:], poisoned, policy))


@needs_native
def test_attention_uses_them_too() -> None:
    q, k, v = draw(1, 4, 200, 16), draw(1, 2, 200, 16, seed=1), draw(1, 2, 200, 16, seed=2)
    summaries = Summaries()
    for start, end in ((0, 130), (130, 131), (131, 200)):
        now = q[:, :, start:end], k[:, :, :end], v[:, :, :end]
        assert torch.equal(closecall.attention(*now, POLICY, summaries=summaries), closecall.attention(*now, POLICY))
        assert summaries.reused == start // 8
    shared = POLICY.replace(share="group")  # who decides is no business of theirs
    assert torch.equal(closecall.attention(*now, shared, summaries=summaries), closecall.attention(*now, shared))
    assert summaries.reused == 200 // 8
    closecall.attention(q, k, v, "dense", summaries=summaries)
    assert summaries.reused == 0  # nothing was looked at
    assert summaries.n_keys == 200


@needs_native
def test_threads_change_nothing() -> None:
    q, k = draw(1, 8, 600, 64), draw(1, 4, 600, 64, seed=1)
    alone = closecall.select(q[:, :, 500:], k, POLICY)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        summaries = Summaries()
        closecall.select(q[:, :, :500], k[:, :, :500], POLICY, summaries=summaries)
        assert same(closecall.select(q[:, :, 500:], k, POLICY, summaries=summaries), alone)
    finally:
        torch.set_num_threads(threads)


@needs_native
def test_room_grows_in_few_steps() -> None:
    q, k, summaries = draw(1, 1, 1, 8), draw(1, 1, 800, 8), Summaries()
    sizes = set()
    for end in range(80, 801, 8):
        closecall.select(q, k[:, :, :end], POLICY, summaries=summaries)
        sizes.add(summaries.nbytes)
    assert summaries.reused == 99
    assert len(sizes) <= 8  # 10 blocks to 100, by half more each time
    assert max(sizes) <= 1.5 * min(sizes) * 10


@pytest.mark.parametrize("engine", OTHERS, ids=str)
def test_backends_that_keep_nothing(engine: Engine) -> None:
    q, k, summaries = draw(1, 2, 1, 16), draw(1, 1, 90, 16), Summaries()
    for end in (80, 90):
        got = engine.select(q, k[:, :, :end], POLICY, summaries=summaries)
        assert same(got, engine.select(q, k[:, :, :end], POLICY))
        assert (summaries.reused, summaries.n_keys, summaries.nbytes) == (0, 0, 0)


@needs_native
def test_scorers_without_a_kernel_keep_nothing() -> None:
    policy = Policy(closecall.SCORERS["true-max"](), POLICY.rule, block=8, tile=8)
    q, k, summaries = draw(1, 2, 1, 16), draw(1, 1, 90, 16), Summaries()
    for _ in range(2):
        assert same(closecall.select(q, k, policy, summaries=summaries), closecall.select(q, k, policy))
        assert (summaries.reused, summaries.n_keys) == (0, 0)


@needs_native
@pytest.mark.parametrize(
    "change", ["batch", "key heads", "dim", "type", "block", "scorer", "parameter", "instruction set"]
)
def test_other_kinds_of_keys_start_over(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And fewer of them are no error then. Other rows, query heads, rules and reductions of rows change nothing."""
    shape, dtype, policy = [1, 2, 90, 16], torch.float32, made("boxed outliers")
    summaries = Summaries()
    closecall.select(draw(1, 4, 1, 16), draw(*shape), policy, summaries=summaries)
    other = made("boxed outliers", "softmax", tile=16, sinks=2)
    assert same(
        closecall.select(draw(1, 2, 5, 16), draw(*shape), other, summaries=summaries),
        closecall.select(draw(1, 2, 5, 16), draw(*shape), other),
    )
    assert summaries.reused == 11
    if change == "batch":
        shape[0] = 2
    elif change == "key heads":
        shape[1] = 4
    elif change == "dim":
        shape[3] = 24
    elif change == "type":
        dtype = torch.bfloat16
    elif change == "block":
        policy = made("boxed outliers", block=16)
    elif change == "scorer":
        policy = made("quest")
    elif change == "parameter":
        policy = policy.replace(scorer=closecall.SCORERS["outliers"](m=1, c=0.25))
    elif len(NATIVE) > 1 and NATIVE[-1].tier is not None:
        monkeypatch.setenv("CLOSECALL_ISA", NATIVE[-1].tier)
    else:
        pytest.skip("one tier only")
    q, k = draw(shape[0], 4, 1, shape[3]).to(dtype), draw(*shape).to(dtype)[:, :, :85]
    expected = closecall.select(q, k, policy)
    assert same(closecall.select(q, k, policy, summaries=summaries), expected)
    assert summaries.reused == 0
    assert same(closecall.select(q, k, policy, summaries=summaries), expected)
    assert summaries.reused == 85 // policy.block


@needs_native
@pytest.mark.parametrize("aggregate", ["max", "mass"])
def test_fewer_keys_are_refused(aggregate: str) -> None:
    q, k, summaries = draw(1, 2, 1, 16), draw(1, 1, 90, 16), Summaries()
    policy = POLICY.replace(aggregate=aggregate)
    closecall.select(q, k, policy, summaries=summaries)
    with pytest.raises(ValueError, match=r"k holds 85 keys but these summaries know 90: say summaries.crop.*reset"):
        closecall.select(q, k[:, :, :85], policy, summaries=summaries)
    assert summaries.n_keys == 90
    summaries.crop(100)
    assert summaries.n_keys == 90
    summaries.crop(70)
    assert summaries.n_keys == 70
    k[:, :, 70:] = draw(1, 1, 20, 16, seed=3)
    assert same(
        closecall.select(q, k[:, :, :85], policy, summaries=summaries), closecall.select(q, k[:, :, :85], policy)
    )
    assert summaries.reused == 8
    summaries.reset()
    assert (summaries.n_keys, summaries.reused, summaries.nbytes) == (0, 0, 0)
    assert same(closecall.select(q, -k, policy, summaries=summaries), closecall.select(q, -k, policy))


def test_it_says_what_it_holds() -> None:
    summaries = Summaries()
    assert repr(summaries) == "Summaries of 0 keys: 0 complete blocks of 1, 0.0 MiB"
    if has_native():
        closecall.select(draw(1, 2, 1, 16), draw(1, 1, 90, 16), POLICY, summaries=summaries)
        assert repr(summaries).startswith("Summaries of 90 keys: 11 complete blocks of 8, ")


@pytest.mark.parametrize("call", ["select", "attention"])
def test_bad_use(call: str) -> None:
    q, k = draw(1, 2, 90, 16), draw(1, 1, 90, 16)

    def run(**kwargs: Any) -> None:
        tensors = (q, k) if call == "select" else (q, k, k)
        getattr(closecall, call)(*tensors, POLICY, **kwargs)

    with pytest.raises(TypeError, match=r"summaries must be a closecall.Summaries or None, got dict"):
        run(summaries={})
    padding = torch.ones(1, 90, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"cannot be kept with key_padding: leave summaries out, or call for each"):
        run(summaries=Summaries(), key_padding=padding)
    with pytest.raises(ValueError, match=r"cannot be kept with cu_seqlens"):
        run(summaries=Summaries(), cu_seqlens=torch.tensor([0, 40, 90]))


@pytest.mark.parametrize("n_keys", [-1, 2.5, True, "9"])
def test_bad_crop(n_keys: Any) -> None:
    with pytest.raises(ValueError, match=r"n_keys must be a whole number of keys to keep"):
        Summaries().crop(n_keys)
