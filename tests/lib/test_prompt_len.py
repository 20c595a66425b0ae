"""Prompts in chunks on tensors: a chunk that does not hold the prompt's last tiles protects none."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch

import closecall
from closecall.chunks import chunk_proof
from compare import kept_of
from engines import Engine, compiled

SMALL: dict[str, Any] = {"block": 8, "tile": 8, "budget": 5, "tile_factor": 1}


def drawn(length: int, batch: int = 1) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(length)
    return tuple(torch.randn(batch, heads, length, 16, generator=generator) for heads in (4, 2, 2))


def in_chunks(
    select: Any, q: torch.Tensor, k: torch.Tensor, policy: Any, cuts: list[int], **given: Any
) -> list[closecall.Selection]:
    return [
        select(q[:, :, a:b], k[:, :, :b], policy, **{name: x[:, :b] for name, x in given.items()}, prompt_len=cuts[-1])
        for a, b in itertools.pairwise(cuts)
    ]


@compiled
@pytest.mark.parametrize("cuts", [[0, 80, 160, 200], [0, 96, 192, 195], [0, 8, 200]], ids=str)
@pytest.mark.parametrize("given", [{}, {"factor": 2}, {"rule": "per-head", "budgets": ((3, 4, 5, 6),)}], ids=str)
def test_a_prompt_in_chunks_keeps_what_the_whole_one_does(
    engine: Engine, cuts: list[int], given: dict[str, Any]
) -> None:
    """Two tiles are protected; a last chunk of one tile leaves the other to the chunk before."""
    q, k, _ = drawn(200)
    q, k = q[:, :, : cuts[-1]], k[:, :, : cuts[-1]]
    small = {"block": 8, "tile": 8} if given.get("rule") == "per-head" else SMALL
    policy = closecall.policy("last-tile-on-quest", **{"factor": "dense", "tiles": 2, **small, **given})
    assert policy.rule.pay
    whole = engine.select(q, k, chunk_proof(policy))
    assert int(whole.triggered.any(1).sum()) == 2
    tile = 0
    for part in in_chunks(engine.select, q, k, policy, cuts):
        here = slice(tile, tile + part.counts.shape[2])
        expected = {(b, h, t - tile): x for (b, h, t), x in kept_of(whole).items() if here.start <= t < here.stop}
        assert kept_of(part) == expected
        assert torch.equal(part.triggered, whole.triggered[:, :, here])
        tile = here.stop


def test_without_a_length_every_chunk_counts_as_a_prompts_end() -> None:
    q, k, v = drawn(200)
    policy = closecall.policy("last-tile-on-quest", factor="dense", pay=False, **SMALL)
    kept = closecall.select(q[:, :, :80], k[:, :, :80], policy)
    assert kept.counts[0, 0, -1] == 10
    assert closecall.select(q[:, :, :80], k[:, :, :80], policy, prompt_len=81).counts[0, 0, -1] == 5
    # Without a question in it, and with the whole of it, paying as ever.
    policy = closecall.policy("last-tile-on-quest", **SMALL)
    plain = closecall.policy("quest", **SMALL)
    chunk = q[:, :, :80], k[:, :, :80], v[:, :, :80]
    assert torch.equal(closecall.attention(*chunk, policy, prompt_len=500), closecall.attention(*chunk, plain))
    assert torch.equal(closecall.attention(q, k, v, policy, prompt_len=200), closecall.attention(q, k, v, policy))


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_prompts_end_where_their_keys_do(side: str) -> None:
    """On the left, both end with the buffer. On the right, the shorter one ends in the second of three chunks."""
    q, k, _ = drawn(192, batch=2)
    at = torch.arange(192)
    short = at >= 72 if side == "left" else at < 120
    padding = torch.stack([torch.ones(192, dtype=torch.bool), short])
    policy = closecall.policy("last-tile-on-quest", factor="dense", **SMALL)
    parts = in_chunks(closecall.select, q, k, policy, [0, 64, 128, 192], key_padding=padding)
    fired = torch.cat([part.triggered.any(1) for part in parts], 1)  # 8 tiles of a chunk
    last = {"left": [[0, 23], [1, 23]], "right": [[0, 23], [1, 14]]}[side]
    if side == "left":  # its first chunk is padding alone, and the tiles of its second one start at its first key
        assert [len(part.counts[1, 0].nonzero()) for part in parts] == [0, 7, 8]
    assert fired.nonzero().tolist() == last


def test_a_router_below_sees_its_tiles() -> None:
    q, k, _ = drawn(200)
    routed = closecall.policy("last-tile-on-quest", rule="router", q=0.5, factor=1, **SMALL)
    plain = closecall.policy("router-on-quest", q=0.5, **SMALL)
    for part, expected in zip(
        in_chunks(closecall.select, q, k, routed, [0, 96, 200]),
        in_chunks(closecall.select, q, k, plain, [0, 96, 200]),
        strict=True,
    ):
        assert bool(expected.triggered.any())
        assert torch.equal(part.triggered, expected.triggered)
        assert kept_of(part) == kept_of(expected)


def test_pooled_rows_of_the_last_tile_only() -> None:
    """A policy that pools scores every row of the tile that asks, and of no other chunk's last tile."""
    q, k, _ = drawn(160)
    protected = closecall.policy("last-tile-on-quest", factor=1, pool=8, **SMALL)
    pooled, single = (closecall.policy("quest", pool=n, **SMALL) for n in (8, 1))
    for backend in ("cpu", "reference"):
        first, last = in_chunks(closecall.select, q, k, protected, [0, 80, 160])
        assert kept_of(first) == kept_of(closecall.select(q[:, :, :80], k[:, :, :80], pooled, backend=backend))
        rows = kept_of(closecall.select(q[:, :, 80:], k, single, backend=backend))
        means = kept_of(closecall.select(q[:, :, 80:], k, pooled, backend=backend))
        assert kept_of(last) == {cell: (rows if cell[2] == 9 else means)[cell] for cell in rows}


@pytest.mark.parametrize("cuts", [[0, 80, 160, 200], [0, 96, 192, 195]], ids=str)
@pytest.mark.parametrize("preset", ["quest", "last-tile-on-quest"])
def test_a_prompts_last_tiles_are_not_pooled_whichever_chunk_they_are_in(preset: str, cuts: list[int]) -> None:
    q, k, _ = drawn(200)
    q, k = q[:, :, : cuts[-1]], k[:, :, : cuts[-1]]
    policy = closecall.policy(preset, pool=4, outlying=2, unpooled=8, **SMALL)
    for backend in ("cpu", "reference"):
        whole = kept_of(closecall.select(q, k, chunk_proof(policy), backend=backend))
        tile = 0
        for part in in_chunks(closecall.select, q, k, policy, cuts):
            assert all(whole[b, h, tile + t] == x for (b, h, t), x in kept_of(part).items())
            tile += part.counts.shape[2]
    fewer = kept_of(closecall.select(q, k, chunk_proof(policy.replace(unpooled=0))))
    assert fewer != whole


@pytest.mark.parametrize(
    ("given", "fragments"),
    [
        ({"prompt_len": 199}, ["prompt_len", "at least the 200", "got 199"]),
        ({"prompt_len": 200.0}, ["prompt_len", "whole number", "200.0"]),
        ({"prompt_len": True}, ["prompt_len", "True"]),
        ({"prompt_len": 10**30}, ["prompt_len", "at most 9223372036854775807", "while it is unknown"]),
        ({"prompt_len": 200, "cu_seqlens": torch.tensor([0, 200])}, ["prompt_len", "cu_seqlens", "whole"]),
    ],
)
def test_bad_input(given: dict[str, Any], fragments: list[str]) -> None:
    q, k, v = drawn(200)
    for call in (
        lambda: closecall.select(q, k, "auto", **given),
        lambda: closecall.attention(q, k, v, "auto", **given),
    ):
        with pytest.raises(ValueError, match="prompt_len") as raised:
            call()
        assert all(f in str(raised.value) for f in fragments), str(raised.value)


def test_under_torch_compile() -> None:
    q, k, v = drawn(120)
    policy = closecall.policy("last-tile-on-quest", factor="dense", **SMALL)

    def run(to: int) -> torch.Tensor:
        return closecall.attention(q[:, :, 40:], k, v, policy, prompt_len=to)

    compiled = torch.compile(run, fullgraph=True, backend="eager", dynamic=False)
    assert not torch.equal(run(120), run(300))
    for to in (120, 300):
        assert torch.equal(compiled(to), run(to))


def test_the_answer_is_remembered_for_the_plan() -> None:
    from closecall import chunks

    q, k, _ = drawn(160)
    policy = closecall.policy("last-tile-on-quest", **SMALL)
    call = (q[:, :, 80:], k, policy)
    first, second = (closecall.select(*call, prompt_len=200).geometry for _ in range(2))
    assert first is second
    assert dataclasses.asdict(chunks._unpaid(policy).rule)["pay"] is False
