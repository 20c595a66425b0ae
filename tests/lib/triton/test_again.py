"""Candidates in the Triton kernels, under the interpreter: what the reference keeps, block for block.

Each call's answer is neither that of every row nor that of means and outlying rows alone. Whole numbers under `max` and
`mean` make scores exact, so that many blocks score the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from test_gpu_scorers import ENGINE, REFERENCE, SCORED

from closecall import SCORERS, Policy, paged
from closecall.backends.triton import backend, device, interpret, rank
from closecall.geometry import plan
from closecall.rules.last_tile import LastTile
from closecall.rules.router import Router
from closecall.rules.topk import TopK


@dataclass(frozen=True)
class Call:
    """Which rows and keys there are, and how they are ranked. Blocks have 8 keys."""

    scored: str
    aggregate: str
    rows: int
    keys: int
    tile: int
    heads: tuple[int, int]
    rule: Any
    dtype: torch.dtype = torch.float32
    fields: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    batch: int = 1
    dim: int = 16

    @property
    def policy(self) -> Policy:
        name, given = SCORED[self.scored]
        fields = {"pool": 8, "candidates": 1} | self.fields
        return Policy(SCORERS[name](**given), self.rule, block=8, tile=self.tile, aggregate=self.aggregate, **fields)

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(self.rows + self.keys)
        shapes = ((self.batch, h, n, self.dim) for h, n in zip(self.heads, (self.rows, self.keys), strict=True))
        q, k = (torch.randn(shape, generator=generator) for shape in shapes)
        if self.aggregate in ("max", "mean"):
            q, k = q.round(), k.round()
        return q.to(self.dtype), k.to(self.dtype)


def topk(budget: int) -> TopK:
    return TopK(budget=budget, tile_factor=1)


HALF, BRAIN = torch.float16, torch.bfloat16
PADDED = {"key_padding": torch.arange(130) >= torch.tensor([[0], [53]])}
PACKED = {"cu_seqlens": torch.tensor([0, 5, 145, 150], dtype=torch.int32)}
CALLS = {
    # Two parts of a tile in float32, and a short tile; two turns of candidates, the second a short one. Means are of as
    # many rows as keep them exact.
    "parts": Call("quest", "max", 52, 230, 48, (1, 1), topk(20), fields={"pool": 16}),
    "parts of a mean": Call("mean", "mean", 72, 208, 64, (1, 1), topk(13), fields={"pool": 64, "outlying": 1}),
    # A whole prompt in bfloat16: tiles with fewer blocks than candidates, a short tile, heads that decide together.
    "prompt": Call("1 outlier", "max", 70, 70, 16, (2, 1), topk(5), BRAIN, {"share": "group"}),
    "padded": Call("box", "softmax", 20, 130, 16, (1, 1), topk(6), HALF, {"pool": 4}, PADDED, batch=2),
    "packed": Call("quest", "softmax", 150, 150, 32, (1, 1), topk(8), fields={"pool": 16, "sinks": 2}, options=PACKED),
    # Some tiles look everywhere.
    "last ones": Call("1 boxed outlier", "softmax", 33, 130, 16, (2, 1), LastTile(topk(6), factor=1),
                      fields={"share": "group", "outlying": 1, "sinks": 0}, dim=48),
    "masses": Call("mean", "mass", 34, 170, 16, (2, 1), topk(5), BRAIN, {"pool": 16, "unpooled": 1}),
    "largest": Call("2 boxed outliers", "mass-max", 16, 120, 16, (2, 1), topk(6), fields={"share": "group"}, dim=48),
    "router": Call("quest", "max", 40, 170, 32, (2, 1), Router(budget=8, q=0.4, tile_factor=1), fields={"pool": 32}),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_selections_are_the_references(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call = CALLS[name]
    if name == "last ones":  # a few at a time, as where memory is short
        monkeypatch.setattr(rank, "SCORE_BYTES", 1)
    q, k = call.tensors()
    policy, given = call.policy, call.options | {"scale": 0.25}
    assert backend.has_kernel(policy)
    found, expected = (engine.select(q, k, policy, **given) for engine in (ENGINE, REFERENCE))
    for other in (policy.replace(pool=1), policy.replace(candidates=0)):
        assert not torch.equal(REFERENCE.select(q, k, other, **given).kept_mask(), expected.kept_mask())
    assert torch.equal(found.kv_idx, expected.kv_idx)
    assert torch.equal(found.counts, expected.counts)
    assert torch.equal(found.triggered, expected.triggered)
    torch.testing.assert_close(found.margin, expected.margin, rtol=1e-3, atol=1e-5, equal_nan=True)


def test_rankings_are_the_references() -> None:
    """Sorted, for rules that read the whole ranking and for prompts of more blocks than registers hold."""
    call = CALLS["last ones"]
    q, k = call.tensors()
    geometry = plan(1, call.rows, call.keys, 8, call.tile)
    found, expected = (engine.rank(q, k, call.policy, geometry, 0.25) for engine in (ENGINE, REFERENCE))
    assert torch.equal(found.order, expected.order)
    torch.testing.assert_close(found.scores, expected.scores, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("fields", [{"candidates": 9}, {"unpooled": 9}])
def test_nothing_is_scored_twice_where_every_row_sees_every_block(
    fields: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    call = replace(CALLS["prompt"], rows=10)
    q, k = call.tensors()
    without = interpret.kernels(True)
    del without.again_kernel
    monkeypatch.setattr(device, "kernels", lambda interpreted: without)
    with pytest.raises(AttributeError, match="again_kernel"):
        ENGINE.select(q, k, call.policy)
    policy = call.policy.replace(**fields)
    found, expected = (engine.select(q, k, policy) for engine in (ENGINE, REFERENCE))
    assert torch.equal(found.kv_idx, expected.kv_idx)


def test_a_row_or_key_that_is_no_number() -> None:
    """It has no say, and its block ranks last: as a mean's, as an outlying row's, and as its own."""
    call = replace(CALLS["parts"], rows=48)
    q, k = call.tensors()
    q[0, 0, 3], k[0, 0, 100] = torch.nan, torch.nan
    policy = call.policy.replace(outlying=1)
    found, expected = (engine.select(q, k, policy, scale=0.25).kept_mask() for engine in (ENGINE, REFERENCE))
    assert torch.equal(found, expected)


def test_in_pages() -> None:
    """A prompt's last chunk, whose earlier blocks come from kept summaries."""
    call = Call("quest", "max", 144, 144, 16, (2, 1), topk(6), fields={"outlying": 1, "unpooled": 1})
    (q, k), policy = call.tensors(), call.policy
    whole = REFERENCE.select(q, k, policy).kept_mask()[:, :, -3:]
    for other in (policy.replace(pool=1), policy.replace(candidates=0)):
        assert not torch.equal(REFERENCE.select(q, k, other).kept_mask()[:, :, -3:], whole)
    table = torch.randperm(9, generator=torch.Generator().manual_seed(1)).to(torch.int32)
    k_pages = torch.empty(9, 1, 16, 16)
    k_pages[table.long()] = k[0].unflatten(1, (9, 16)).transpose(0, 1)
    before, last = (
        paged.Pages(table[None], torch.tensor([0, rows]), torch.tensor([end]), torch.tensor([144]))
        for rows, end in ((96, 96), (48, 144))
    )
    kept = paged.PageSummaries(policy, backend="triton")
    rows = q[0].transpose(0, 1)
    with ENGINE._forced():
        kept.update(rows[:96], k_pages, before)
        found = paged.select(rows[96:], k_pages, policy, last, backend="triton", summaries=kept)
    assert found is not None
    assert torch.equal(found.kept_mask(), whole)
