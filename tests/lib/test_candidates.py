"""Blocks that means and outlying rows like are scored again by every row (`candidates=`): what is kept, who refuses.

The oracle scores nothing twice. What a tile's means like best is what they would keep at a larger budget, and a tile
that looks at some blocks chooses as it would if the prompt had no others.
"""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
import torch

import closecall
from closecall import Policy, paged
from closecall.paged import Pages
from engines import ENGINES, FLOATS, Engine

# Triton's kernels have tests of their own (triton/test_again.py), and flex ranks as the reference does.
ENOUGH = [e for e in ENGINES if e.backend in ("reference", "cpu")]
GRID = {"block": 8, "tile": 16, "budget": 5, "tile_factor": 1}
AGGREGATES = ("max", "mean", "softmax", "mass", "mass-max")


def tensors(rows: int = 700, keys: int = 700, heads: int = 4) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, h, keys, 32, generator=generator) for h in (heads, 2, 2))
    return q[:, :, keys - rows :], k, v


def kept_blocks(q: torch.Tensor, k: torch.Tensor, policy: Policy, head: int) -> list[int]:
    """What the only tile of these rows keeps, by the reference."""
    found = closecall.select(q, k, policy, backend="reference", scale=0.2)
    assert found.counts.shape[2] == 1
    return found.kept_mask()[0, head, 0].nonzero()[:, 0].tolist()


def expected(q: torch.Tensor, k: torch.Tensor, policy: Policy) -> torch.Tensor:
    """bool `[H, T, n_blocks]`, tile by tile, from calls that score everything once."""
    block, tile, first = policy.block, policy.tile, k.shape[2] - q.shape[2]
    budget = policy.rule.tile_budget
    assert budget is not None
    found = []
    for head in range(q.shape[1]):
        for at in range(0, q.shape[2], tile):
            rows, pos = q[:, :, at : at + tile], first + at
            end = min(pos + tile, k.shape[2])
            own = range(pos // block, -(-end // block))
            forced = {*range(min(policy.sinks, own.start)), *own}
            most = policy.candidates * budget + len(forced)
            rough = policy.replace(candidates=0, rule=closecall.RULES["topk"](budget=most, tile_factor=1))
            looked = sorted(kept_blocks(rows, k[:, :, :end], rough, head))
            keys = torch.cat([k[:, :, b * block : min((b + 1) * block, end)] for b in looked], 2)
            mine = torch.zeros(-(-k.shape[2] // block), dtype=torch.bool)
            mine[[looked[b] for b in kept_blocks(rows, keys, policy.replace(pool=1), head)]] = True
            found.append(mine)
    return torch.stack(found).unflatten(0, (q.shape[1], -1))


@pytest.mark.parametrize("share", ["head", "group"])
@pytest.mark.parametrize("aggregate", AGGREGATES)
def test_by_definition(aggregate: str, share: str) -> None:
    """Off the block grid and on it, with and without outlying rows, for every native tier and the reference."""
    scorer = "quest" if aggregate == "mean" else "outliers"
    for rows, pool, outlying in ((330, 16, 2), (400, 4, 0)):
        if aggregate == "softmax" and rows == 400:
            continue  # off the grid it counts a tile's last block with keys that are behind the tile
        q, k, _ = tensors(rows, 402)
        policy = closecall.policy(
            "topk", scorer=scorer, aggregate=aggregate, pool=pool, outlying=outlying, share=share, candidates=1, **GRID
        )
        wanted = expected(q, k, policy)
        for other in (policy.replace(pool=1), policy.replace(candidates=0)):  # neither every row nor means alone
            plain = closecall.select(q, k, other, backend="reference", scale=0.2)
            assert not torch.equal(wanted, plain.kept_mask()[0])
        for engine in ENOUGH:
            assert torch.equal(engine.select(q, k, policy, scale=0.2).kept_mask()[0], wanted), str(engine)


@pytest.mark.parametrize("engine", ENOUGH, ids=str)
@pytest.mark.parametrize("preset", ["quest", "auto", "router-on-quest"])
def test_with_as_many_candidates_as_blocks_every_row_decides(engine: Engine, preset: str) -> None:
    q, k, v = tensors()
    policy = closecall.policy(preset, **GRID | {"budget": 8})
    again = policy.replace(pool=16, candidates=99)
    found, same, other = (engine.select(q, k, p) for p in (policy, again, again.replace(candidates=0)))
    for part in ("kv_idx", "counts", "triggered"):
        assert torch.equal(getattr(found, part), getattr(same, part))
    torch.testing.assert_close(found.margin, same.margin, equal_nan=True, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(engine.attention(q, k, v, policy), engine.attention(q, k, v, again))
    assert not torch.equal(found.kept_mask(), other.kept_mask())


@pytest.mark.parametrize("engine", ENOUGH, ids=str)
def test_a_row_that_looks_for_one_key_finds_it(engine: Engine) -> None:
    """One row in the midst of the prompt, against all others of its tile: their mean drowns it. As an outlying row it
    brings its block among the candidates, where every row has its say."""
    q, k, _ = (0.1 * x for x in tensors(640, 640))
    q, k = q.clone(), k.clone()
    q[0, 0, 384:448] = -1.0
    q[0, 0, 405], k[0, 0, 100] = 9.0, 9.0
    policy = closecall.policy("topk", scorer="mean", pool=64, **GRID | {"tile": 64, "budget": 12})
    without, beside = (engine.select(q, k, policy.replace(outlying=m, candidates=2)).kept_mask() for m in (0, 1))
    assert not bool(without[0, 0, 6, 12])
    assert bool(beside[0, 0, 6, 12])


@pytest.mark.parametrize("engine", ENOUGH, ids=str)
def test_last_tiles_look_everywhere(engine: Engine) -> None:
    q, k, _ = tensors(640, 640)
    policy = closecall.policy("topk", scorer="quest", **GRID)
    again = policy.replace(pool=16, candidates=1)
    plain, pooled, spared = (engine.select(q, k, p).kept_mask() for p in (policy, again, again.replace(unpooled=6)))
    assert not torch.equal(pooled[:, :, -6:], plain[:, :, -6:])
    assert torch.equal(spared[:, :, -6:], plain[:, :, -6:])
    assert torch.equal(spared[:, :, :-6], pooled[:, :, :-6])
    protected = closecall.policy("last-tile-on-quest", factor=1, pool=16, candidates=1, **GRID)
    assert torch.equal(engine.select(q, k, protected).kept_mask()[:, :, -1], plain[:, :, -1])


@pytest.mark.parametrize("engine", ENOUGH, ids=str)
def test_chunks_padding_and_packing_change_nothing(engine: Engine) -> None:
    q, k, _ = tensors(640, 640)
    policy = closecall.policy("quest", pool=8, outlying=1, candidates=1, **GRID)
    whole = engine.select(q, k, policy).kept_mask()
    summaries = closecall.Summaries()
    for at in range(0, 640, 80):
        chunk = engine.select(q[:, :, at : at + 80], k[:, :, : at + 80], policy, summaries=summaries).kept_mask()
        assert torch.equal(chunk, whole[:, :, at // 16 : at // 16 + 5, : chunk.shape[3]])
    parts = slice(300), slice(300, 640)
    first, second = (engine.select(q[:, :, at], k[:, :, at], policy).kept_mask() for at in parts)
    packed = engine.select(q, k, policy, cu_seqlens=torch.tensor([0, 300, 640], dtype=torch.int32)).kept_mask()
    assert torch.equal(packed[0, :, : first.shape[2], : first.shape[3]], first[0])
    assert torch.equal(packed[0, :, first.shape[2] :, : second.shape[3]], second[0])
    padded = engine.select(q, k, policy, key_padding=torch.arange(640)[None] >= 300).kept_mask()
    assert torch.equal(padded[0, :, : second.shape[2], : second.shape[3]], second[0])


@pytest.mark.parametrize("backend", sorted({e.backend for e in ENOUGH}))
def test_in_pages_and_in_engines_that_cut_prompts(backend: str) -> None:
    q, k, _ = tensors(640, 640)
    policy = closecall.policy("quest", pool=8, outlying=1, unpooled=2, candidates=1, **GRID)
    assert paged.chunk_proof(policy) is policy
    table = torch.randperm(40, generator=torch.Generator().manual_seed(1)).to(torch.int32)
    k_pages = torch.empty(40, 2, 16, 32)
    k_pages[table.long()] = k[0].unflatten(1, (40, 16)).transpose(0, 1)
    whole = closecall.select(q, k, policy, backend=backend).kept_mask()
    for start, end in ((0, 640), (0, 208), (208, 640)):
        pages = Pages(table[None], torch.tensor([0, end - start]), torch.tensor([end]), prompt_lens=torch.tensor([640]))
        found = paged.select(q[0, :, start:end].transpose(0, 1), k_pages, policy, pages, backend=backend)
        assert found is not None
        kept = found.kept_mask()
        assert torch.equal(kept, whole[:, :, start // 16 : end // 16, : kept.shape[3]])


def test_what_a_policy_says() -> None:
    plain, again = closecall.policy("auto", budget=8), closecall.policy("auto", budget=8, pool=64, candidates=4)
    assert (again.candidates, again.unpooled, again.outlying) == (4, 16, 4)
    assert "candidates" not in json.loads(plain.replace(pool=8).to_json())  # old results are still found
    assert Policy.from_json(again.to_json()) == again
    assert "the 64 best blocks scored again by every row" in str(again)
    assert again.replace(pool=1) == plain
    assert again.n_candidates(1000) == 64
    assert again.n_candidates(12) == 12
    assert plain.n_candidates(1000) == 0
    router = closecall.policy("router", pool=8, candidates=1, **GRID | {"budget": 8})
    assert router.n_candidates(99) == 16  # what a tile may keep


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"preset": "quest", "candidates": 2}, "candidates= has no effect .* every policy that pools rows"),
        ({"preset": "quest", "pool": 8, "candidates": -1}, "candidates must be a whole number of at least 0, got -1"),
        ({"preset": "quest", "pool": 8, "candidates": 1.5}, "candidates must be a whole number of at least 0, got 1.5"),
        (
            {"preset": "certified-on-quest", "pool": 8, "candidates": 4},
            "needs a rule with a tile budget .* candidates = 0",
        ),
    ],
)
def test_refusals(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        closecall.policy(given.pop("preset"), **given)


@pytest.mark.parametrize("engine", [e for e in ENOUGH if e.backend == "cpu"], ids=str)
def test_native_keeps_what_the_reference_keeps(engine: Engine) -> None:
    """Drawn calls of integers, so that scores are exact, some with NaN and infinities among rows and keys."""
    for seed in range(60):
        draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        heads, kv_heads = draw.choice([(4, 2), (6, 1), (2, 2), (5, 1)])
        keys, dim, dtype = draw.randint(200, 900), draw.choice([16, 33, 64]), draw.choice(FLOATS)
        rows = draw.randint(1, keys)
        q, k = (
            torch.randint(-3, 4, (1, h, n, dim), generator=generator).to(dtype)
            for h, n in ((heads, rows), (kv_heads, keys))
        )
        if seed % 3 == 0:
            q[0, 0, draw.randrange(rows)], k[0, 0, draw.randrange(keys)] = torch.nan, torch.nan
        if seed % 5 == 0:
            k[0, -1, draw.randrange(keys), 0] = torch.inf
        tile = draw.choice([16, 32, 64])
        policy = closecall.policy(
            "topk", scorer=draw.choice(["mean", "quest", "box", "outliers"]), pool=draw.choice([4, 8, tile]),
            outlying=draw.choice([0, 1, 3]), unpooled=draw.choice([0, 2]), candidates=draw.choice([1, 2, 4]),
            block=draw.choice([8, 16]), tile=tile, budget=draw.choice([12, 14]), tile_factor=1,
            sinks=draw.choice([0, 1, 2]), share=draw.choice(["head", "group"]),
        )  # fmt: skip
        found, expected = (e.select(q, k, policy).kept_mask() for e in (engine, Engine("reference")))
        assert torch.equal(found, expected), (seed, policy)
