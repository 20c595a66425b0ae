"""Tiles that look only where an earlier tile found something (`anchor=`): what they see, and who refuses.

The oracle needs no anchors. A tile that looks at some blocks chooses as it would if the prompt had no others, and what
an anchor likes best is what it would keep at a larger budget.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

import closecall
from closecall import Policy, paged
from closecall.geometry import plan
from closecall.paged import Pages
from engines import ENGINES, Engine

ENOUGH = [e for e in ENGINES if e.backend in ("reference", "cpu")]  # the others rank as the reference does
GRID = {"block": 8, "tile": 16, "budget": 5, "tile_factor": 1}
AGGREGATES = ("max", "mean", "softmax", "mass", "mass-max")


def tensors(rows: int = 700, keys: int = 700, heads: int = 4, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """Topics that last for some hundred rows, so that neighbours want nearly the same blocks, and not quite."""
    generator = torch.Generator().manual_seed(seed)
    topic = torch.randn(keys // 100 + 1, 32, generator=generator).repeat_interleave(100, 0)[:keys]
    q = torch.randn(1, heads, keys, 32, generator=generator) + topic
    k, v = (torch.randn(1, 2, keys, 32, generator=generator) for _ in range(2))
    return q[:, :, keys - rows :], k + topic.flip(0), v


def kept_blocks(q: torch.Tensor, k: torch.Tensor, policy: Policy, head: int) -> list[int]:
    """What the only tile of these rows keeps, by the reference."""
    found = closecall.select(q, k, policy, backend="reference", scale=0.2)
    assert found.counts.shape[2] == 1
    return found.kept_mask()[0, head, 0].nonzero()[:, 0].tolist()


def expected(q: torch.Tensor, k: torch.Tensor, policy: Policy) -> torch.Tensor:
    """bool `[H, T, n_blocks]`, tile by tile, from calls without anchors."""
    block, tile, first = policy.block, policy.tile, k.shape[2] - q.shape[2]
    rule = policy.rule
    assert isinstance(rule, closecall.RULES["topk"])
    plain = policy.replace(anchor=1, unpooled=0)
    found = []
    for head in range(q.shape[1]):
        leader, liked = -1, []
        for at in range(0, q.shape[2], tile):
            rows, pos = q[:, :, at : at + tile], first + at
            end = min(pos + tile, k.shape[2])
            own = range(pos // block, -(-end // block))
            if leader < 0 or pos // (tile * policy.anchor) != leader // (tile * policy.anchor):
                leader, looked = pos, list(range(own.stop))
                forced = {*range(min(policy.sinks, own.start)), *own}
                most = max(policy.candidates * rule.tile_budget, rule.limit(10**6)) + len(forced)
                wide = plain.replace(rule=closecall.RULES["topk"](budget=most, tile_factor=1))
                liked = sorted({*kept_blocks(rows, k[:, :, :end], wide, head)} - forced)
            else:
                sinks = range(min(policy.sinks, leader // block))
                looked = [*sinks, *liked, *range(leader // block, own.stop)]
            keys = torch.cat([k[:, :, b * block : min((b + 1) * block, end)] for b in looked], 2)
            mine = torch.zeros(-(-k.shape[2] // block), dtype=torch.bool)
            mine[[looked[b] for b in kept_blocks(rows, keys, plain, head)]] = True
            found.append(mine)
    return torch.stack(found).unflatten(0, (q.shape[1], -1))


@pytest.mark.parametrize("share", ["head", "group"])
@pytest.mark.parametrize("pool", [1, 4])
@pytest.mark.parametrize("aggregate", AGGREGATES)
def test_by_definition(aggregate: str, pool: int, share: str) -> None:
    """Off the block grid and on it, with groups that begin before the call, for every native tier and the reference."""
    scorer = "quest" if aggregate == "mean" else "outliers"
    led = 0
    for rows, anchor in ((330, 4), (400, 3)):
        if aggregate == "softmax" and rows == 400:
            continue  # off the grid it counts a tile's last block with keys that are behind the tile
        q, k, _ = tensors(rows, 402)
        policy = closecall.policy(
            "topk", scorer=scorer, aggregate=aggregate, pool=pool, share=share, anchor=anchor, candidates=1, **GRID
        )  # fmt: skip
        wanted = expected(q, k, policy)
        everywhere = closecall.select(q, k, policy.replace(anchor=1), backend="reference", scale=0.2).kept_mask()[0]
        led += int((wanted != everywhere).sum())
        for engine in ENOUGH:
            assert torch.equal(engine.select(q, k, policy, scale=0.2).kept_mask()[0], wanted), str(engine)
    assert led  # else this says nothing about anchors


@pytest.mark.parametrize("engine", ENOUGH, ids=str)
@pytest.mark.parametrize("preset", ["quest", "auto", "router-on-quest"])
def test_with_as_many_candidates_as_blocks_nothing_changes(engine: Engine, preset: str) -> None:
    q, k, v = tensors()
    policy = closecall.policy(preset, **GRID | {"budget": 8})
    narrow, wide = (policy.replace(anchor=4, candidates=n) for n in (1, 99))
    found, same, other = (engine.select(q, k, p) for p in (policy, wide, narrow))
    for part in ("kv_idx", "counts", "triggered"):
        assert torch.equal(getattr(found, part), getattr(same, part))
    torch.testing.assert_close(found.margin, same.margin, equal_nan=True, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(engine.attention(q, k, v, policy), engine.attention(q, k, v, wide))
    assert not torch.equal(found.kept_mask(), other.kept_mask())
    if preset != "router-on-quest":  # which compares a tile with all others
        assert torch.equal(found.kept_mask()[:, :, ::4], other.kept_mask()[:, :, ::4])  # who leads looks everywhere


@pytest.mark.parametrize("engine", ENOUGH, ids=str)
def test_last_tiles_look_everywhere(engine: Engine) -> None:
    q, k, _ = tensors(640, 640)
    policy = closecall.policy("topk", scorer="quest", **GRID)
    plain, led, spared = (engine.select(q, k, p).kept_mask() for p in (
        policy, policy.replace(anchor=8, candidates=1), policy.replace(anchor=8, candidates=1, unpooled=6),
    ))  # fmt: skip
    assert not torch.equal(led[:, :, -6:], plain[:, :, -6:])
    assert torch.equal(spared[:, :, -6:], plain[:, :, -6:])
    assert torch.equal(spared[:, :, :-6], led[:, :, :-6])
    protected = closecall.policy("last-tile-on-quest", factor=1, anchor=8, candidates=1, **GRID)
    assert torch.equal(engine.select(q, k, protected).kept_mask()[:, :, -1], plain[:, :, -1])


@pytest.mark.parametrize("engine", ENOUGH, ids=str)
def test_whole_groups_may_come_in_chunks(engine: Engine) -> None:
    q, k, _ = tensors(640, 640)
    policy = closecall.policy("quest", anchor=4, candidates=1, **GRID)
    whole = engine.select(q, k, policy).kept_mask()
    summaries = closecall.Summaries()
    for at in range(0, 640, 128):
        chunk = engine.select(q[:, :, at : at + 128], k[:, :, : at + 128], policy, summaries=summaries).kept_mask()
        assert torch.equal(chunk, whole[:, :, at // 16 : at // 16 + 8, : chunk.shape[3]])
    odd = engine.select(q[:, :, 16:], k, policy).kept_mask()  # the first group lacks its first tile: the next one leads
    assert torch.equal(odd[:, :, 3:], whole[:, :, 4:])


@pytest.mark.parametrize("engine", ENOUGH, ids=str)
def test_padded_and_packed_sequences_are_led_by_their_own(engine: Engine) -> None:
    q, k, _ = tensors()
    policy = closecall.policy("quest", anchor=4, candidates=1, **GRID)
    first, second = (
        engine.select(q[:, :, at], k[:, :, at], policy).kept_mask() for at in (slice(300), slice(300, 700))
    )
    packed = engine.select(q, k, policy, cu_seqlens=torch.tensor([0, 300, 700], dtype=torch.int32)).kept_mask()
    assert torch.equal(packed[0, :, : first.shape[2], : first.shape[3]], first[0])
    assert torch.equal(packed[0, :, first.shape[2] :, : second.shape[3]], second[0])
    padding = torch.arange(700)[None] >= 300
    padded = engine.select(q, k, policy, key_padding=padding).kept_mask()
    assert torch.equal(padded[0, :, : second.shape[2], : second.shape[3]], second[0])


@pytest.mark.parametrize("backend", sorted({e.backend for e in ENOUGH}))
def test_in_pages(backend: str) -> None:
    q, k, _ = tensors(640, 640)
    policy = closecall.policy("quest", anchor=4, candidates=1, **GRID)
    table = torch.randperm(40, generator=torch.Generator().manual_seed(1)).to(torch.int32)
    k_pages = torch.empty(40, 2, 16, 32)
    k_pages[table.long()] = k[0].unflatten(1, (40, 16)).transpose(0, 1)
    pages = Pages(table[None], torch.tensor([0, 640]), torch.tensor([640]))
    found = paged.select(q[0].transpose(0, 1), k_pages, policy, pages, backend=backend)
    assert found is not None
    assert torch.equal(found.kept_mask(), closecall.select(q, k, policy, backend=backend).kept_mask())
    ending = Pages(table[None], torch.tensor([0, 640]), torch.tensor([640]), prompt_lens=torch.tensor([640]))
    with pytest.raises(ValueError, match="depends on how prompts are cut"):
        paged.select(q[0].transpose(0, 1), k_pages, policy, ending, backend=backend)


def test_leaders() -> None:
    geometry = plan(1, 150, 190, 16, 16)  # tiles at 40, 56, ..., 184; groups of 48 positions
    policy = closecall.policy("quest", anchor=3, **GRID | {"block": 16})
    assert policy.leaders(geometry) is not None
    assert policy.leaders(geometry).tolist() == [[0, 1, 1, 1, 4, 4, 4, 7, 7, 7]]
    last = closecall.policy("last-tile-on-quest", anchor=3, unpooled=2, **GRID | {"block": 16})
    assert last.leaders(geometry).tolist() == [[0, 1, 1, 1, 4, 4, 4, 7, 8, 9]]
    assert policy.replace(anchor=1).leaders(geometry) is None
    assert policy.n_candidates(1000) == 20
    assert policy.n_candidates(12) == 12
    assert (
        closecall.policy("router", anchor=2, candidates=1, **GRID | {"budget": 8}).n_candidates(99) == 16
    )  # what a tile may keep


def test_what_a_policy_says() -> None:
    plain, led = closecall.policy("auto", budget=8), closecall.policy("auto", budget=8, anchor=16)
    assert (led.anchor, led.candidates, led.unpooled, led.outlying) == (16, 4, 16, 0)
    assert {"anchor", "candidates"}.isdisjoint(json.loads(plain.to_json()))  # old results are still found
    assert Policy.from_json(led.to_json()) == led
    assert "one tile in 16, and the last 16, sees every block's summary, the others 64 candidates" in str(led)
    assert led.replace(anchor=1, candidates=9) == plain
    both = closecall.policy("auto", budget=8, anchor=16, pool=16)
    assert (both.unpooled, both.outlying) == (16, 4)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"preset": "quest", "candidates": 2}, "candidates= has no effect .* every policy with anchor=8"),
        ({"preset": "quest", "anchor": 0}, "anchor must be a whole number of at least 1, got 0"),
        ({"preset": "quest", "anchor": 4, "candidates": 0}, "candidates must be a whole number of at least 1, got 0"),
        ({"preset": "quest", "anchor": 2.5}, "anchor must be a whole number of at least 1, got 2.5"),
        ({"preset": "h2o", "anchor": 4}, "scorer 'h2o' judges all blocks at once, .* use anchor=1"),
        (
            {"preset": "certified-on-quest", "anchor": 4},
            "anchor = 4 needs a rule with a tile budget, .* use anchor = 1",
        ),
    ],
)
def test_refusals(given: dict[str, Any], message: str) -> None:
    preset = given.pop("preset")
    name = preset if preset != "h2o" else "topk-on-h2o"
    with pytest.raises(ValueError, match=message):
        closecall.policy(name, **given)


def test_engines_that_cut_prompts_refuse() -> None:
    with pytest.raises(ValueError, match="anchor = 8 makes tiles look where the tile before them did"):
        paged.chunk_proof(closecall.policy("auto", anchor=8))
