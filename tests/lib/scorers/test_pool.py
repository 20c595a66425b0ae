"""Means of runs of rows instead of rows: what is computed, on which calls, and who refuses."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import by_definition
import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from small_calls import call
from test_selector_native import NAMED, NATIVE, check_ranked_scores
from test_selector_scores import AGGREGATES, bound, made, scored_in_parts

import closecall
import oracle
from closecall import SCORERS, Policy
from closecall.backends import reference
from closecall.geometry import plan
from drawing import Case, over
from engines import ENGINES, FLOATS, Engine, pairs

POOLED = ("mean", "quest", "box", "outliers", "boxed outliers")
OF_SCORES = ("max", "mean", "softmax")  # the others also ask what the rows, not their means, find in forced blocks
POOLING = [e for e in ENGINES if e.backend != "triton"]  # whose shapes are in triton/test_pooled.py
SEEDS = st.integers(0, 2**32 - 1)
LAST = closecall.RULES["last-tile"](rule=closecall.RULES["topk"](budget=4, tile_factor=1))
GRID = {"block": 8, "tile": 16, "budget": 4, "tile_factor": 1}


def divisor(case: Case, least: int = 2) -> int:
    """A pool that fits the case's tiles."""
    fitting = [p for p in range(least, case.tile + 1) if case.tile % p == 0] or [1]
    return random.Random(case.seed).choice(fitting)


def fitting(case: Case, pool: int, outlying: int) -> int:
    """As many outlying rows as still save work."""
    return max(0, min(outlying, case.tile - case.tile // pool - 1))


def tensors(n: int = 150, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    q, k = (torch.randn(1, heads, n, 16, generator=generator, dtype=torch.float64).to(dtype) for heads in (4, 2))
    return q, k


def scores(q: torch.Tensor, k: torch.Tensor, policy: Policy, **where: Any) -> torch.Tensor:
    geometry = plan(q.shape[0], q.shape[2], k.shape[2], policy.block, policy.tile, **where)
    return reference.tile_scores(q, k, policy, geometry, 0.25)


@pytest.mark.parametrize("aggregate", AGGREGATES)
@pytest.mark.parametrize("name", POOLED)
def test_by_definition(name: str, aggregate: str) -> None:
    """Against loops in float64, on calls of every shape, with and without outlying rows; under `last-tile` the last
    tile, and with `unpooled` as many as it says, by their single rows."""

    @over(5, seed=SEEDS, protected=st.booleans(), far=st.integers(0, 3), unpooled=st.integers(0, 3))
    def check(seed: int, protected: bool, far: int, unpooled: int) -> None:
        case = call(seed)
        q, k, _ = case.tensors()
        policy, given = made(name, aggregate, case)
        pool = divisor(case)
        far = fitting(case, pool, far)
        rule = LAST if protected else policy.rule
        policy = policy.replace(pool=pool, outlying=far, unpooled=unpooled, rule=rule)
        found = scored_in_parts(case, policy, q, k)
        wide_q, wide_k = oracle.exact(q), oracle.exact(k)
        always, relative = bound(case, wide_q, wide_k, 2.0**-53)
        tiles = case.tiles()
        for t in tiles:
            after = sum((u.batch, u.sequence) == (t.batch, t.sequence) and u.number > t.number for u in tiles)
            for h in range(case.heads):
                s = by_definition.Sequence(wide_q, wide_k, tiles, t, h, case.used_scale)
                runs = 1 if after < max(unpooled, int(protected)) else pool
                expected = by_definition.tile_scores(name, given, aggregate, s, case.sinks, runs, far)
                got = found[t.batch, h, t.number]
                assert np.isneginf(got[len(t.visible) :]).all()
                got = got[: len(t.visible)]
                seen = np.isfinite(expected)
                off = np.abs(got[seen] - expected[seen])
                assert (off <= always + relative * np.abs(expected[seen])).all()
                if aggregate == "mass":
                    assert got.sum() == pytest.approx(1)

    check()


@pytest.mark.parametrize("aggregate", OF_SCORES)
@pytest.mark.parametrize("name", NAMED)
def test_pooling_a_whole_tile_scores_its_mean(name: str, aggregate: str) -> None:
    """With one mean a tile, calls of one row each, the tile's mean, that see the same blocks rank them alike."""
    q, k = tensors(160)
    policy = closecall.policy("topk", scorer=NAMED[name], aggregate=aggregate, pool=16, **GRID)
    whole = scores(q, k, policy)
    for t in range(10):
        seen = k[:, :, : 16 * (t + 1)]
        mean = q[:, :, 16 * t : 16 * (t + 1)].mean(2, keepdim=True)
        alone = scores(mean, seen, policy.replace(tile=1, pool=1))
        torch.testing.assert_close(whole[:, :, t : t + 1, : alone.shape[3]], alone)


def test_the_mean_of_products_is_the_product_with_the_mean() -> None:
    """For the mean scorer under the mean over rows, runs of equal length change nothing."""
    q, k = tensors(160)
    policy = closecall.policy("topk", aggregate="mean", **GRID)
    for pool in (2, 4, 16):
        torch.testing.assert_close(scores(q, k, policy.replace(pool=pool)), scores(q, k, policy))


@pytest.mark.parametrize("aggregate", OF_SCORES)
@pytest.mark.parametrize("name", NAMED)
def test_equal_rows_are_their_mean(name: str, aggregate: str) -> None:
    """Rows that repeat four times are what runs of four of them average to, so nothing changes."""
    q, k = tensors(160)
    q = q[:, :, ::4].repeat_interleave(4, 2)
    policy = closecall.policy("topk", scorer=NAMED[name], aggregate=aggregate, **GRID)
    one, pooled = scores(q, k, policy), scores(q, k, policy.replace(pool=4))
    torch.testing.assert_close(one, pooled)


@pytest.mark.parametrize("aggregate", AGGREGATES)
@pytest.mark.parametrize("name", NAMED)
def test_a_sequence_gets_what_it_gets_alone(name: str, aggregate: str) -> None:
    """Packed, or padded on either side with poison; lengths that leave short runs."""
    lengths = (70, 149, 1)
    q, k = tensors(sum(lengths), torch.float32)
    policy = Policy(NAMED[name], LAST, 8, 16, aggregate=aggregate, pool=4)
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    packed = scores(q, k, policy, cu_seqlens=bounds)
    left = [torch.full((3, h, 160, 16), torch.nan) for h in (4, 2)]
    right = [torch.full((3, h, 160, 16), torch.nan) for h in (4, 2)]
    for i, (start, stop) in enumerate(itertools.pairwise(bounds.tolist())):
        for x, a, b in zip((q, k), left, right, strict=True):
            a[i, :, 160 - (stop - start) :], b[i, :, : stop - start] = x[0, :, start:stop], x[0, :, start:stop]
    real = torch.arange(160) < torch.tensor(lengths)[:, None]
    on_the_left = scores(left[0], left[1], policy, key_padding=real.flip(1))
    on_the_right = scores(right[0], right[1], policy, key_padding=real)
    tile = 0
    for i, (start, stop) in enumerate(itertools.pairwise(bounds.tolist())):
        alone = scores(q[:, :, start:stop].contiguous(), k[:, :, start:stop].contiguous(), policy)[0]
        tiles, blocks = alone.shape[1:]
        assert torch.equal(packed[0, :, tile : tile + tiles, :blocks], alone)
        assert torch.equal(on_the_left[i, :, :tiles, :blocks], alone)
        assert torch.equal(on_the_right[i, :, :tiles, :blocks], alone)
        tile += tiles


@pytest.mark.parametrize("engine", POOLING, ids=str)
@pytest.mark.parametrize("name", ["mean", "quest", "box", "boxed outliers"])
def test_chunks_of_whole_tiles_select_like_the_whole(engine: Engine, name: str) -> None:
    q, k = tensors(150, torch.float32)
    aggregate = "softmax" if name.endswith("outliers") else "max"
    policy = closecall.policy("topk", scorer=NAMED[name], aggregate=aggregate, pool=4, **GRID)
    whole = engine.select(q, k, policy)
    for start, stop in ((0, 48), (48, 112), (112, 150)):
        part = engine.select(q[:, :, start:stop], k[:, :, :stop], policy)
        tiles = slice(start // 16, -(-stop // 16))
        assert torch.equal(part.counts, whole.counts[:, :, tiles])
        for t in range(part.counts.shape[2]):
            n = int(part.counts[0, 0, t])
            assert torch.equal(part.kv_idx[0, :, t, :n], whole.kv_idx[0, :, tiles.start + t, :n])


@pytest.mark.parametrize("engine", POOLING, ids=str)
def test_margins_and_triggers_are_those_of_the_pooled_scores(engine: Engine) -> None:
    q, k = tensors(150, torch.float32)
    policy = closecall.policy("router-on-quest", pool=4, **GRID | {"budget": 6})
    found = engine.select(q, k, policy)
    # The same by hand: rows that are the means already, each repeated as often as its run is long.
    runs = torch.cat([x.mean(2, keepdim=True).expand_as(x) for x in q.split(4, 2)], 2)
    expected = closecall.select(runs, k, policy.replace(pool=1), backend="reference")
    assert torch.equal(found.triggered, expected.triggered)
    torch.testing.assert_close(found.margin, expected.margin, rtol=1e-4, atol=1e-5, equal_nan=True)
    assert torch.equal(found.counts, expected.counts)
    plain = engine.select(q, k, policy.replace(pool=1))
    assert not torch.equal(plain.margin.nan_to_num(), found.margin.nan_to_num())


@pytest.mark.parametrize("engine", NATIVE, ids=str)
@pytest.mark.parametrize("aggregate", AGGREGATES)
@pytest.mark.parametrize("name", POOLED)
def test_native_scores_are_those_of_the_reference(engine: Engine, name: str, aggregate: str) -> None:
    @over(5, seed=SEEDS, dtype=st.sampled_from(FLOATS), far=st.integers(0, 3))
    def check(seed: int, dtype: torch.dtype, far: int) -> None:
        case = call(seed, dtype)
        policy, _ = made(name, aggregate, case)
        pool = divisor(case)
        far = fitting(case, pool, far)
        check_ranked_scores(engine, case, policy.replace(pool=pool, outlying=far, unpooled=seed % 3))

    check()


@pytest.mark.parametrize("engine", NATIVE, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    ("preset", "pool"),
    pairs(["auto", "router-on-quest", "topk"], [2, 8, 16, 64], lambda i, j: i == j % 3),
)
def test_many_tiles_at_the_usual_sizes(engine: Engine, preset: str, pool: int, dtype: torch.dtype) -> None:
    """Enough tiles for several that are scored together, the last of them incomplete; and a last tile by rows."""
    generator = torch.Generator().manual_seed(pool)
    q, k = (torch.randn(1, h, 1500, 64, generator=generator).to(dtype) for h in (6, 2))
    policy = closecall.policy(preset, budget=4, pool=pool)
    geometry = plan(1, 1500, 1500, 64, 64)
    every = policy.replace(rule=closecall.RULES["topk"](budget=99))
    if preset == "auto":
        rule = closecall.RULES["last-tile"](rule=closecall.RULES["topk"](budget=99), factor=1)
        every = policy.replace(rule=rule)
    found, expected = (e.rank(q, k, every, geometry, 0.125) for e in (engine, Engine("reference")))

    def by_block(ranked: Any) -> torch.Tensor:
        return torch.zeros(1, 6, 24, 25).scatter_(-1, ranked.order.long(), ranked.scores)[..., :-1]

    torch.testing.assert_close(by_block(found).nan_to_num(), by_block(expected).nan_to_num(), rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("engine", NATIVE, ids=str)
@pytest.mark.parametrize("aggregate", ["max", "mass", "mass-max", "softmax"])
@pytest.mark.parametrize("name", NAMED)
def test_a_run_with_a_row_that_is_no_number_has_no_say(engine: Engine, name: str, aggregate: str) -> None:
    q, k = tensors(150, torch.float32)
    q[0, 1, 70] = torch.nan
    policy = closecall.policy("topk", scorer=NAMED[name], aggregate=aggregate, pool=4, **GRID | {"budget": 99})
    geometry = plan(1, 150, 150, 8, 16)
    found, expected = (e.rank(q, k, policy, geometry, 0.25) for e in (engine, Engine("reference")))
    torch.testing.assert_close(found.scores, expected.scores)
    clean = q.clone()
    clean[0, 1, 68:72] = q[0, 1, 64:68]  # the run's neighbour says what there is to say
    without = reference.rank(clean, k, policy, geometry, 0.25)
    if aggregate == "max":
        torch.testing.assert_close(found.scores, without.scores)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_means_are_summed_in_float32_and_rounded_once(dtype: torch.dtype) -> None:
    """64 numbers of 1 + 2^-7 add up exactly in float32 and in no 16-bit type; large ones do not overflow float16."""
    for value in (1 + 2.0**-7, 60000.0):
        q = torch.full((1, 1, 256, 8), value, dtype=dtype)
        k = torch.randn(1, 1, 256, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
        policy = closecall.policy("topk", budget=2, tile_factor=1.5)
        one, pooled = (scores(q, k, policy.replace(pool=p)) for p in (1, 64))
        torch.testing.assert_close(one, pooled)


@pytest.mark.parametrize("engine", POOLING, ids=str)
def test_threads_and_batches_change_nothing(engine: Engine) -> None:
    q, k = tensors(150, torch.float32)
    policy = closecall.policy("auto", pool=4, **GRID)
    alone = engine.select(q, k, policy)
    both = engine.select(torch.cat([q, q.flip(2)]), torch.cat([k, k.flip(2)]), policy)
    assert torch.equal(both.kv_idx[:1], alone.kv_idx)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert torch.equal(engine.select(q, k, policy).kv_idx, alone.kv_idx)
    finally:
        torch.set_num_threads(before)


def test_what_bad_pools_get() -> None:
    for pool in (3, 128):
        with pytest.raises(ValueError, match=f"pool = {pool} must divide the tile of 64 rows"):
            closecall.policy("quest", pool=pool)
    for pool in (0, -2, 1.5, True, "8"):
        with pytest.raises(ValueError, match="pool must be a whole number of at least 1"):
            closecall.policy("quest", pool=pool)
    for pool, most in ((8, 55), (2, 31)):
        assert closecall.policy("quest", pool=pool, outlying=most).scored == 63
        message = f"outlying = {most + 1} beside means of {pool} rows .* use at most outlying = {most}"
        with pytest.raises(ValueError, match=message):
            closecall.policy("quest", pool=pool, outlying=most + 1)
    for name, value in (("outlying", -1), ("outlying", True), ("unpooled", -1), ("unpooled", 1.5), ("unpooled", "8")):
        with pytest.raises(ValueError, match=f"{name} must be a whole number of at least 0"):
            closecall.policy("quest", pool=8, **{name: value})


@pytest.mark.parametrize("name", sorted({*SCORERS.names()} - {"mean", "quest", "box", "outliers"}))
def test_scorers_that_cannot_be_pooled_say_so(name: str) -> None:
    if not SCORERS[name].__module__.startswith("closecall."):
        pytest.skip("made by another test")
    with pytest.raises(ValueError, match=rf"scorer '{name}' .* use pool=1, or a scorer"):
        closecall.policy("topk", scorer=name, pool=8)
    assert closecall.policy("topk", scorer=name, pool=1).pool == 1


def test_json_knows_the_pool_and_files_without_one_score_every_row() -> None:
    policy = closecall.policy("auto", budget=8, pool=1)
    assert "pool" not in json.loads(policy.to_json())  # as it was before there was a pool
    assert Policy.from_json(policy.to_json()).pool == 1
    pooled = policy.replace(pool=8)
    assert pooled != closecall.policy("auto", budget=8, pool=8)  # which has outlying rows too
    assert json.loads(pooled.to_json())["pool"] == 8
    assert Policy.from_json(pooled.to_json()) == pooled != policy
    assert pooled.name == "auto"
    assert "means of 8 rows of 64-row tiles" in str(pooled)
    assert "means" not in str(policy)
    far = pooled.replace(outlying=4, unpooled=16)
    assert {"outlying": 4, "unpooled": 16}.items() <= json.loads(far.to_json()).items()
    assert "unpooled" not in pooled.to_json()
    assert Policy.from_json(far.to_json()) == far != pooled
    assert "means of 8 rows and 4 outlying rows of 64-row tiles (of the last 16, every row)" in str(far)


def test_old_names_of_parameters_are_read() -> None:
    """The rules that share a budget between tiles called `among` their pool."""
    old = '{"closecall_policy": 1, "scorer": {"name": "box"}, "rule": {"name": "fill", "pool": "tile"}}'
    assert Policy.from_json(old).rule.among == "tile"


@pytest.mark.parametrize("engine", POOLING, ids=str)
def test_a_prompt_of_no_more_tiles_than_are_unpooled_keeps_what_single_rows_find(engine: Engine) -> None:
    q, k = tensors(150, torch.float32)
    policy = closecall.policy("auto", pool=8, outlying=2, unpooled=10, **GRID)
    assert torch.equal(engine.select(q, k, policy).kv_idx, engine.select(q, k, policy.replace(pool=1)).kv_idx)
    fewer = engine.select(q, k, policy.replace(unpooled=9))
    assert torch.equal(fewer.kv_idx[:, :, 1:], engine.select(q, k, policy).kv_idx[:, :, 1:])


@pytest.mark.parametrize("engine", POOLING, ids=str)
def test_outlying_rows_are_heard(engine: Engine) -> None:
    """One row of 16 looks for one block; the mean looks elsewhere."""
    q, k = tensors(160, torch.float32)
    q, k = 0.1 * q, k.clone()
    k[:, :, 24:32] += 4.0 * torch.nn.functional.one_hot(torch.tensor(3), 16)
    q[:, :, 137, 3] = 6.0
    q[:, :, 128:144, 3] -= 0.5  # fifteen of them away from it
    policy = closecall.policy("quest", pool=16, **GRID)
    means, far = (engine.select(q, k, policy.replace(outlying=n)).kept_mask((0,))[:, 8, 3] for n in (0, 1))
    assert far.all()
    assert not means.any()


@pytest.mark.parametrize("engine", POOLING, ids=str)
def test_of_two_equally_distant_rows_the_first_is_scored(engine: Engine) -> None:
    """Two rows are as far from their mean as each other, however a backend rounds."""
    q, k = tensors(146, torch.float32)  # the last tile has two rows
    policy = closecall.policy("quest", pool=16, outlying=1, **GRID | {"budget": 99})
    geometry = plan(1, 146, 146, 8, 16)
    found = engine.rank(q, k, policy, geometry, 0.25)
    mean = q[:, :, 144:].mean(2, keepdim=True)
    by_hand = torch.cat([q[:, :, :144], mean, q[:, :, 144:145]], 2)
    expected = reference.rank(by_hand, k, policy.replace(pool=1, outlying=0), geometry, 0.25)
    torch.testing.assert_close(found.scores[:, :, 9], expected.scores[:, :, 9])


def test_the_last_tiles_of_each_sequence_are_not_pooled() -> None:
    policy = closecall.policy("quest", pool=8, unpooled=2)
    packed = plan(1, 192 + 64, 192 + 64, 64, 64, cu_seqlens=torch.tensor([0, 192, 256]))
    assert policy.every_row(packed).tolist() == [[False, True, True, True]]
    padded = plan(2, 256, 256, 64, 64, torch.arange(256) >= torch.tensor([[0], [130]]))
    assert policy.every_row(padded).tolist() == [[False, False, True, True], [True, True, False, False]]
    assert policy.replace(unpooled=0).every_row(packed) is None
    assert policy.replace(pool=1).every_row(packed) is None
    last = policy.replace(rule=closecall.RULES["last-tile"](tiles=3))
    assert last.every_row(packed).tolist() == [[True, True, True, True]]


def test_protected_tiles_are_the_last_of_each_sequence() -> None:
    sequence = torch.tensor([[0, 0, 0, 1, 1, -1]])
    two = closecall.RULES["last-tile"](tiles=2)
    assert LAST.every_row(sequence).tolist() == [[False, False, True, False, True, False]]
    assert two.every_row(sequence).tolist() == [[False, True, True, True, True, False]]
    assert closecall.RULES["topk"]().every_row(sequence) is None
