"""What a prompt keeps does not depend on how an engine cuts it, mixes it with others or starts it again."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import closecall
from closecall import paged
from closecall.backends import cpu
from closecall.chunks import is_chunk_proof

pytestmark = pytest.mark.skipif(not cpu.tiers(), reason="the native module was not built")

POLICIES = {
    "topk": {"budget": 2},
    "auto": {"budget": 3},
    "router-on-quest": {"budget": 3, "trigger": "absolute", "threshold": 0.4},
    "fill-on-box": {"budget": 2, "among": "tile", "aggregate": "mass"},
    "last-tile-on-quest": {"budget": 3, "pool": 4},
    "topk-on-outliers": {"budget": 2, "pool": 8, "outlying": 3, "unpooled": 5},
    "top-p-on-mean": {"budget": 2, "p": 0.6},
}
BLOCK, PAGE, HEADS, DIM = 16, 32, (4, 2), 32


def policy_of(name: str) -> closecall.Policy:
    made = closecall.policy(name, block=BLOCK, tile=BLOCK, tile_factor=3, **POLICIES[name])
    return paged.chunk_proof(made)


class Cache:
    """One sequence's tokens, and pages for it that are filled chunk by chunk."""

    def __init__(self, length: int, seed: int = 0) -> None:
        gen = torch.Generator().manual_seed(seed)
        n = -(-length // PAGE)
        self.q = torch.randn(length, HEADS[0], DIM, generator=gen)
        self.k, self.v = (torch.randn(n + 2, HEADS[1], PAGE, DIM, generator=gen) for _ in range(2))
        self.table = torch.randperm(n + 2, generator=gen)[:n].to(torch.int32)[None]

    def run(self, policy: closecall.Policy, cuts: list[int], prompt: int, kept: bool = True) -> torch.Tensor:
        summaries = paged.PageSummaries(policy) if kept else None
        parts = []
        for a, b in itertools.pairwise(cuts):
            k, v = self.k.clone(), self.v.clone()
            for page, at in zip(self.table[0].tolist(), itertools.count(0, PAGE), strict=False):
                k[page, :, max(0, b - at) :] = torch.nan  # not computed yet
                v[page, :, max(0, b - at) :] = torch.nan
            pages = paged.Pages(self.table, torch.tensor([0, b - a]), torch.tensor([b]), torch.tensor([prompt]))
            parts.append(paged.attention(self.q[a:b], k, v, policy, pages, summaries=summaries))
        return torch.cat(parts)


@pytest.mark.parametrize("kept", [True, False])
@given(
    name=st.sampled_from(sorted(POLICIES)),
    length=st.integers(1, 400),
    cuts=st.lists(st.integers(1, 24), max_size=6, unique=True),
)
@settings(deadline=None, max_examples=60)
def test_any_cut_on_the_tile_grid_changes_nothing(kept, name, length, cuts):
    cache, policy = Cache(length, length), policy_of(name)
    inner = sorted(c * BLOCK for c in cuts if c * BLOCK < length)
    whole = cache.run(policy, [0, length], length, kept)
    assert torch.equal(cache.run(policy, [0, *inner, length], length, kept), whole)


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_neighbours_in_a_mixed_batch_change_nothing(name):
    policy, a, b = policy_of(name), Cache(300, 1), Cache(410, 2)
    alone_a, alone_b = a.run(policy, [0, 300], 300), b.run(policy, [0, 400, 401], 400)
    shift = len(a.k)
    width = max(a.table.shape[1], b.table.shape[1])
    table = torch.zeros(3, width, dtype=torch.int32)
    table[0, : a.table.shape[1]] = a.table
    table[1, : b.table.shape[1]] = table[2, : b.table.shape[1]] = b.table + shift
    k, v = torch.cat([a.k, b.k]), torch.cat([a.v, b.v])
    q = torch.cat([a.q[64:300], b.q[400:401], b.q[160:400]])  # a chunk, a decoding step, another chunk
    lens = torch.tensor([300, 401, 400])
    pages = paged.Pages(table, torch.tensor([0, 236, 237, 477]), lens, torch.tensor([300, 400, 400]))
    out = paged.attention(q, k, v, policy, pages)
    assert torch.equal(out[:236], alone_a[64:])
    assert torch.equal(out[236], alone_b[400])
    assert torch.equal(out[237:], alone_b[160:400])


def test_rows_generated_before_a_preemption_are_computed_again_as_dense():
    policy, cache = policy_of("auto"), Cache(330, 3)
    first = cache.run(policy, [0, 300, *range(301, 331)], 300)
    again = cache.run(policy, [0, 160, 330], 300)
    assert torch.equal(again[:300], first[:300])
    torch.testing.assert_close(again[300:], first[300:], atol=1e-6, rtol=1e-5)


def test_the_protected_tile_is_the_prompts_last():
    policy, cache = policy_of("auto"), Cache(400, 4)
    counts = []
    for a, b in itertools.pairwise([0, 160, 320, 400]):
        pages = paged.Pages(cache.table, torch.tensor([0, b - a]), torch.tensor([b]), torch.tensor([400]))
        counts.append(paged.select(cache.q[a:b], cache.k, policy, pages).counts[0, 0])
    counts = torch.cat(counts)
    budget = policy.rule.tile_budget
    assert counts[:-1].max() == budget
    assert counts[-1] == 25  # every block


def test_prompts_below_the_minimum_context_are_dense_in_every_chunk():
    policy, cache = policy_of("auto"), Cache(400, 5)
    dense = cache.run(closecall.policy("dense", block=BLOCK, tile=BLOCK), [0, 400], 400)
    for prompt, sparse in ((400, True), (399, False)):
        pages = paged.Pages(cache.table, torch.tensor([0, 80]), torch.tensor([prompt]), torch.tensor([prompt]), 400)
        out = paged.attention(cache.q[prompt - 80 : prompt], cache.k, cache.v, policy, pages)
        same = torch.allclose(out, dense[prompt - 80 : prompt], atol=1e-6)
        assert same is not sparse


class TestWhatIsRefused:
    @pytest.mark.parametrize(
        ("name", "overrides", "said"),
        [
            ("router", {}, "trigger 'quantile' compares all tiles of a prompt"),
            ("router", {"trigger": "random"}, "trigger 'random' compares"),
            ("fill-on-mean", {}, "rule 'fill' does not decide tile by tile"),
            ("topk-on-snapkv", {}, "scorer 'snapkv' looks at more than"),
            ("topk", {"tile": 48}, "tile 48 is no multiple of block 64: .* use tile=64"),
        ],
    )
    def test_with_a_remedy(self, name, overrides, said):
        with pytest.raises(ValueError, match=said):
            paged.chunk_proof(closecall.policy(name, **overrides))

    def test_prompt_lengths_need_a_chunk_proof_policy(self):
        cache = Cache(300)
        pages = paged.Pages(cache.table, torch.tensor([0, 300]), torch.tensor([300]), torch.tensor([300]))
        policy = closecall.policy("auto", budget=2, block=BLOCK, tile=BLOCK)
        assert not is_chunk_proof(policy)
        assert is_chunk_proof(paged.chunk_proof(policy))
        with pytest.raises(ValueError, match=r"paged\.chunk_proof"):
            paged.select(cache.q, cache.k, policy, pages)
