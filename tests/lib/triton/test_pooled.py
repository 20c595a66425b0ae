"""Means of rows in the Triton kernels, under the interpreter: what the reference scores, whichever tiles share a
program, and the packs of tiles that they are scored in."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from test_gpu_scorers import AGGREGATES, CALLS, ENGINE, REFERENCE, SCORED, Call

import closecall
from closecall.backends.triton import launch, rank, tables
from closecall.geometry import Geometry, plan
from closecall.rules.last_tile import LastTile
from closecall.rules.topk import TopK
from engines import FLOATS, pairs

CPU = torch.device("cpu")
POOLS = {"tails": (2, 5, 40), "chunked": (4, 16), "decode": (2, 8), "padded": (2, 4), "packed": (3, 15)}
# Every scorer under two reductions or more, and the other way round, on calls, types and pools in turn.
CHOSEN = pairs(SCORED, AGGREGATES, lambda i, j: (i + j) % 5 in (0, 2))
TURNS = list(zip(CHOSEN, itertools.cycle(CALLS), itertools.cycle(FLOATS), strict=False))


def by_block(ranked: Any, n_blocks: int) -> torch.Tensor:
    shape = (*ranked.order.shape[:3], n_blocks + 1)
    return torch.full(shape, -torch.inf).scatter_(-1, ranked.order.long(), ranked.scores)[..., :-1]


def agree(call: Call, policy: closecall.Policy, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """The scores of every block that may be ranked, which are the reference's."""
    geometry = call.geometry()
    found, expected = (by_block(e.rank(q, k, policy, geometry, 0.3), geometry.n_blocks) for e in (ENGINE, REFERENCE))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert bool(found.isfinite().any())
    return found


@pytest.mark.parametrize(
    ("scored", "aggregate", "name", "dtype"),
    [(*pair, name, dtype) for pair, name, dtype in TURNS],
    ids=[f"{pair[0]}-{pair[1]}-{name}-{str(dtype)[6:]}" for pair, name, dtype in TURNS],
)
def test_scores_are_those_of_the_reference(scored: str, aggregate: str, name: str, dtype: torch.dtype) -> None:
    """Short tiles and runs, chunks, padding on the left, sequences that share a buffer; with outlying rows and without;
    every second time the last tiles are scored by their rows, and sometimes all that there are."""
    call = CALLS[name]
    draw = random.Random(f"{scored} {aggregate}")
    pool = draw.choice(POOLS[name])
    far = min(draw.choice((0, 1, 3)), call.tile - call.tile // pool - 1)
    policy = call.policy(scored, aggregate).replace(pool=pool, outlying=far, unpooled=draw.choice((0, 0, 1, 2)))
    if AGGREGATES.index(aggregate) % 2:
        policy = policy.replace(rule=LastTile(rule=policy.rule, factor=1))
    agree(call, policy, *call.tensors(dtype))


@pytest.mark.parametrize("size", [1, 3000])
def test_tiles_are_scored_a_few_at_a_time_where_memory_is_short(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packs are whole in every chunk, protected tiles in the midst of them."""
    call = Call(150, 150, 8, 8, (2, 1), dim=16)
    policy = call.policy("quest", "max").replace(pool=2, rule=LastTile(rule=TopK(budget=150), factor=1, tiles=3))
    q, k = call.tensors(torch.float32)
    whole = agree(call, policy, q, k)
    monkeypatch.setattr(rank, "SCORE_BYTES", size)
    assert torch.equal(agree(call, policy, q, k), whole)


@pytest.mark.parametrize("preset", ["router-on-quest", "auto"])
def test_selections_margins_and_triggers_are_those_of_the_reference(preset: str) -> None:
    """The way that does not sort, and what follows from the scores."""
    generator = torch.Generator().manual_seed(5)
    q, k = (torch.randn(1, h, 130, 16, generator=generator) for h in (2, 1))
    policy = closecall.policy(preset, pool=4, block=8, tile=16, budget=3, tile_factor=2)
    found, expected = (e.select(q, k, policy) for e in (ENGINE, REFERENCE))
    assert torch.equal(found.kv_idx, expected.kv_idx)
    assert torch.equal(found.counts, expected.counts)
    assert torch.equal(found.triggered, expected.triggered)
    torch.testing.assert_close(found.margin, expected.margin, rtol=1e-4, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("aggregate", ["max", "mass-max", "softmax"])
def test_a_run_with_a_row_that_is_no_number_has_no_say(aggregate: str) -> None:
    call = Call(70, 70, 8, 16, (1, 1), dim=16)
    q, k = call.tensors(torch.float32)
    policy = call.policy("quest", aggregate).replace(pool=4)
    q[0, 0, 48:52] = 3 * q[0, 0, 48:49]  # a run that is heard
    before = agree(call, policy, q, k)
    q[0, 0, 50] = torch.nan
    without = agree(call, policy, q, k)
    assert aggregate != "max" or not torch.equal(without, before)


def geometries() -> dict[str, Geometry]:
    return {
        "whole": plan(1, 1000, 1000, 16, 16),
        "padded": plan(3, 300, 300, 16, 16, torch.arange(300) >= torch.tensor([[0], [77], [300]])),
        "packed": plan(1, 500, 500, 16, 16, cu_seqlens=torch.tensor([0, 3, 4, 133, 500])),
    }


@pytest.mark.parametrize("most", [1, 4, 8])
@pytest.mark.parametrize("name", sorted(geometries()))
def test_packs_hold_every_tile_once_and_never_two_sequences(name: str, most: int) -> None:
    g = geometries()[name]
    last = LastTile(rule=TopK(), tiles=2).every_row(g.sequence)
    assert last is not None
    for chosen in (None, last, ~last):
        packs = tables.packs(g, CPU, most, chosen)
        assert tables.packs(g, CPU, most, chosen) is packs
        seen = torch.zeros_like(g.row)
        for b, first, n in packs.listed.tolist():
            tiles = slice(first, first + n)
            seen[b, tiles] += 1
            assert 1 <= n <= most
            assert first // most == (first + n - 1) // most
            assert len(set(g.sequence[b, tiles].tolist())) == 1
        wanted = torch.ones_like(seen) if chosen is None else chosen.long()
        assert torch.equal(seen, wanted)
        for start in range(0, g.n_tiles, 2 * most):  # chunks of whole packs
            stop = min(start + 2 * most, g.n_tiles)
            firsts = packs.listed[list(packs.of(slice(start, stop)))][:, 1]
            assert bool(((firsts >= start) & (firsts < stop)).all())
        assert len(packs.of(slice(0, g.n_tiles))) == len(packs.listed)


@pytest.mark.parametrize(("pool", "rows", "tiles"), [(1, 64, 1), (2, 64, 2), (8, 64, 8), (8, 32, 4), (64, 16, 16)])
def test_how_many_tiles_share_a_program(pool: int, rows: int, tiles: int) -> None:
    found = launch.score_rows(pool, 64 // pool, rows)
    assert found == {"RUNS": 64 // pool, "TILES": tiles, "ROWS": rows}
    assert launch.score_rows(2, 128, 32) == {"RUNS": 128, "TILES": 1, "ROWS": 32}  # a tile of its own, in four parts
