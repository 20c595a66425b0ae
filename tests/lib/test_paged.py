"""The paged operator: equal to the contiguous one bit for bit, whatever the pages, strides and mix of sequences."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import closecall
from closecall import paged
from closecall.backends import cpu
from closecall.backends.paged_reference import gathered
from closecall.policy import Policy, accepted
from closecall.ranking import alone
from paged_steps import Step, make_step

pytestmark = pytest.mark.skipif(not cpu.tiers(), reason="the native module was not built")

POLICIES = {
    "topk": {"budget": 2},
    "quest": {"budget": 2},
    "router-on-quest": {"budget": 3, "trigger": "absolute", "threshold": 0.3},
    "auto": {"budget": 3, "pay": False},
    "topk-on-box": {"budget": 2, "aggregate": "mass"},
    "last-tile-on-quest": {"budget": 3, "pay": False, "pool": 4},
    "last-tile-on-outliers": {
        "budget": 3,
        "pay": False,
        "share": "group",
        "aggregate": "softmax",
        "pool": 4,
        "outlying": 2,
        "unpooled": 3,
    },
    "topk-on-quest": {"budget": 2, "share": "group"},
}


def contiguous(step: Step, policy: Policy) -> tuple[torch.Tensor, closecall.Selection | None]:
    """The contiguous native backend on gathered pages, with the same tiles."""
    plan = step.pages.plan(step.k.shape[2], policy.block, policy.tile)
    q, k, v = step.q.transpose(0, 1)[None], gathered(step.k, plan), gathered(step.v, plan)
    g, scale = plan.chosen, step.q.shape[2] ** -0.5
    ranked = dataclasses.replace(cpu.rank(q, k, policy, g, scale), all_heads=alone)
    decision = policy.rule.decide(ranked)
    width = policy.rule.limit(g.n_blocks)
    kv_idx = cpu.gather_kept(ranked, decision.counts, g, policy.sinks, width)
    made = closecall.Selection.of_groups(kv_idx, decision, g, q.shape[1])
    return cpu.attend(q, k, v, made, g, scale)[0][0].transpose(0, 1), made


sequence = st.integers(1, 200).flatmap(lambda n: st.tuples(st.one_of(st.just(1), st.integers(1, n)), st.just(n)))


@given(
    lengths=st.lists(sequence, min_size=1, max_size=4),
    name=st.sampled_from(sorted(POLICIES)),
    grid=st.sampled_from([(8, 8, 8), (8, 8, 24), (16, 32, 16), (16, 16, 64), (64, 64, 64), (20, 20, 40)]),
    heads=st.sampled_from([(1, 1), (3, 1), (4, 2)]),
    dims=st.sampled_from([(16, 16), (64, 64), (20, 12), (7, 33)]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    layouts=st.tuples(st.sampled_from(["rows", "across", "flash"]), st.sampled_from(["rows", "across", "flash"])),
    seed=st.integers(0, 2**16),
)
@settings(deadline=None, max_examples=120)
def test_equals_the_contiguous_operator_bit_for_bit(lengths, name, grid, heads, dims, dtype, layouts, seed):
    block, tile, page = grid
    policy = closecall.policy(name, block=block, tile=tile, **(POLICIES[name] | {"tile_factor": 3}))
    step = make_step(seed, lengths, page, heads, dims, dtype, layouts)
    made = paged.select(step.q, step.k, policy, step.pages)
    expected_out, expected = contiguous(step, policy)
    assert torch.equal(made.counts, expected.counts)
    used = torch.arange(min(made.kv_idx.shape[3], expected.kv_idx.shape[3]))
    shared = used < made.counts[..., None]
    assert torch.equal(made.kv_idx[..., : len(used)][shared], expected.kv_idx[..., : len(used)][shared])
    out = paged.attend(step.q, step.k, step.v, made, step.pages)
    assert torch.equal(out, expected_out)
    target = torch.full((len(step.q), heads[0] + 1, dims[1]), 7.0, dtype=dtype)[:, 1:]
    fused = paged.attention(step.q, step.k, step.v, policy, step.pages, out=target)
    assert fused is target
    assert torch.equal(fused, expected_out)


@pytest.mark.parametrize("isa", cpu.tiers())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_tier(isa, dtype, monkeypatch):
    monkeypatch.setenv("CLOSECALL_ISA", isa)
    policy = closecall.policy("auto", budget=2, block=16, tile=16, pay=False)
    step = make_step(1, [(50, 170), (1, 99), (33, 33)], 32, (4, 2), (64, 32), dtype, ("across", "rows"))
    assert torch.equal(paged.attention(step.q, step.k, step.v, policy, step.pages), contiguous(step, policy)[0])


@given(
    lengths=st.lists(sequence, min_size=1, max_size=3),
    name=st.sampled_from(sorted(POLICIES)),
    grid=st.sampled_from([(8, 8, 16), (16, 32, 48)]),
    seed=st.integers(0, 2**16),
)
@settings(deadline=None, max_examples=25)
def test_native_agrees_with_the_specification(lengths, name, grid, seed):
    block, tile, page = grid
    policy = closecall.policy(name, block=block, tile=tile, **(POLICIES[name] | {"tile_factor": 3}))
    step = make_step(seed, lengths, page, (4, 2), (16, 16), torch.float32, ("across", "rows"))
    native, spec = (paged.select(step.q, step.k, policy, step.pages, backend=b) for b in ("cpu", "reference"))
    if not torch.equal(native.kept_mask(), spec.kept_mask()):  # scores that rounding can swap
        assert (native.kept_mask() == spec.kept_mask()).float().mean() > 0.95
        return
    args = (step.q, step.k, step.v, native, step.pages)
    ours, theirs = (paged.attend(*args, backend=b, return_lse=True) for b in ("cpu", "reference"))
    torch.testing.assert_close(ours, theirs, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("name", ["dense", "topk", "auto"])
def test_whole_prompts_equal_the_public_operator(name):
    policy = closecall.policy(name, block=16, tile=16, **accepted(name, {"budget": 2}))
    step = make_step(3, [(90, 90), (64, 128), (133, 133)], 32, (4, 2), (32, 32))
    out = paged.attention(step.q, step.k, step.v, policy, step.pages)
    plan = step.pages.plan(32, 16, 16)
    k, v = (gathered(x, plan).unflatten(2, (3, -1)) for x in (step.k, step.v))
    for i, n in enumerate(step.pages.keys):
        rows = slice(*step.pages.bounds[i : i + 2])
        alone_ = closecall.attention(
            step.q[rows].transpose(0, 1)[None], k[:, :, i, :n], v[:, :, i, :n], policy, backend="cpu"
        )
        assert torch.equal(out[rows], alone_[0].transpose(0, 1)), f"sequence {i}"


def test_decoding_rows_attend_to_everything_and_equal_dense():
    policy = paged.chunk_proof(closecall.policy("auto", budget=2, block=16, tile=16))
    lengths, prompts = [(1, 200), (40, 180), (20, 130)], [190, 180, 115]
    step = make_step(5, lengths, 32, (4, 2), (32, 32), prompts=prompts)
    out, made = paged.attention(step.q, step.k, step.v, policy, step.pages, return_selection=True)
    dense = paged.attention(step.q, step.k, step.v, closecall.policy("dense", block=16, tile=16), step.pages)
    behind = torch.cat([torch.arange(n - r, n) >= p for (r, n), p in zip(lengths, prompts, strict=True)])
    assert torch.allclose(out[behind], dense[behind], atol=1e-6)
    assert not torch.allclose(out[~behind], dense[~behind], atol=1e-3)
    assert int(made.geometry.rows.sum()) == int((~behind).sum())


def test_a_nan_on_a_page_of_another_sequence_reaches_nobody():
    policy = closecall.policy("quest", budget=2, block=16, tile=16)
    step = make_step(6, [(20, 100), (5, 60)], 16, (2, 1), (16, 16))
    before = paged.attention(step.q, step.k, step.v, policy, step.pages)
    used = step.pages.block_table[step.pages.block_table < 2**30]
    others = [p for p in range(len(step.k)) if p not in used.tolist()]
    step.k[others] = torch.nan
    step.v[others] = torch.nan
    assert torch.equal(paged.attention(step.q, step.k, step.v, policy, step.pages), before)


class TestSummaries:
    def test_kept_summaries_change_nothing_and_are_used(self):
        policy = paged.chunk_proof(closecall.policy("auto", budget=2, block=16, tile=16, factor=2))
        step = make_step(7, [(256, 256)], 32, (4, 2), (32, 32), prompts=[256])
        kept, cuts = paged.PageSummaries(policy), [0, 48, 64, 160, 256]
        for a, b in itertools.pairwise(cuts):
            pages = paged.Pages(
                step.pages.block_table, torch.tensor([0, b - a]), torch.tensor([b]), torch.tensor([256])
            )
            args = (step.q[a:b], step.k, step.v, policy, pages)
            assert torch.equal(paged.attention(*args, summaries=kept), paged.attention(*args))
        # Now the keys of complete blocks are spoilt: who still selects the same has not read them.
        pages = paged.Pages(step.pages.block_table, torch.tensor([0, 16]), torch.tensor([256]), torch.tensor([256]))
        before = paged.select(step.q[240:], step.k, policy, pages, summaries=kept)
        spoilt, last = (
            torch.randn(step.k.shape, generator=torch.Generator().manual_seed(1)),
            step.pages.block_table[0, 7],
        )
        spoilt[last] = step.k[last]  # the tile's own block is read
        assert torch.equal(paged.select(step.q[240:], spoilt, policy, pages, summaries=kept).kv_idx, before.kv_idx)
        assert not torch.equal(paged.select(step.q[240:], spoilt, policy, pages).kv_idx, before.kv_idx)

    def test_decoding_completes_blocks_and_pages_are_used_again(self):
        policy = paged.chunk_proof(closecall.policy("quest", budget=2, block=16, tile=16))
        kept = paged.PageSummaries(policy)
        for seed in (8, 9):  # the second sequence lies on the first one's pages
            step = make_step(seed, [(96, 96)], 32, (4, 2), (32, 32), prompts=[40])
            table = torch.arange(4, dtype=torch.int32)[None]
            for n in (40, *range(41, 96)):
                rows = 40 if n == 40 else 1
                pages = paged.Pages(table, torch.tensor([0, rows]), torch.tensor([n]), torch.tensor([40]))
                paged.attention(step.q[n - rows : n], step.k, step.v, policy, pages, summaries=kept)
            again = paged.Pages(table, torch.tensor([0, 1]), torch.tensor([96]), torch.tensor([96]))
            args = (step.q[95:], step.k, policy, again)
            assert torch.equal(paged.select(*args, summaries=kept).kv_idx, paged.select(*args).kv_idx)

    def test_update_is_what_a_selecting_step_leaves(self):
        policy = closecall.policy("quest", budget=2, block=16, tile=16)
        step = make_step(10, [(120, 120), (10, 77)], 32, (4, 2), (32, 32))
        one, two = paged.PageSummaries(policy), paged.PageSummaries(policy)
        first = paged.Pages(step.pages.block_table, torch.tensor([0, 120, 187]), torch.tensor([120, 67]))
        q = torch.randn(187, 4, 32)
        paged.select(q, step.k, policy, first, summaries=one)
        two.update(q, step.k, first)
        assert torch.equal(one._store, two._store)

    def test_another_policy_is_refused(self):
        kept = paged.PageSummaries(closecall.policy("quest", budget=2, block=16, tile=16))
        step = make_step(11, [(120, 120)], 32, (4, 2), (32, 32))
        with pytest.raises(ValueError, match="summaries are of the policy quest"):
            paged.select(
                step.q, step.k, closecall.policy("topk", budget=2, block=16, tile=16), step.pages, summaries=kept
            )

    def test_other_pages_are_refused(self, monkeypatch):
        """Their summaries would not fit into the store."""
        policy = closecall.policy("quest", budget=2, block=16, tile=16)
        kept, step = paged.PageSummaries(policy), make_step(10, [(120, 120)], 32, (4, 2), (32, 32))
        kept.update(step.q, step.k, step.pages)
        for other in (step.k.bfloat16(), step.k[..., :16], step.k[:-1]):
            with pytest.raises(ValueError, match=r"these summaries are of k_pages .* make new ones for other pages"):
                kept.update(step.q[..., : other.shape[3]].to(other.dtype), other, step.pages)
        tiers = cpu.tiers()
        if len(tiers) > 1:
            monkeypatch.setenv("CLOSECALL_ISA", tiers[1])
            with pytest.raises(ValueError, match=rf"{tiers[0]}.*but now they are .*{tiers[1]}"):
                kept.update(step.q, step.k, step.pages)


class TestBadInput:
    def test_names_what_is_wrong(self):
        step = make_step(12, [(20, 100)], 32, (4, 2), (32, 32))
        with pytest.raises(ValueError, match="page of 32 keys does not hold whole blocks of 48"):
            paged.attention(step.q, step.k, step.v, closecall.policy("quest", block=48, tile=48), step.pages)
        with pytest.raises(ValueError, match="tile of 24 rows"):
            paged.attention(step.q, step.k, step.v, closecall.policy("quest", block=16, tile=24), step.pages)
        with pytest.raises(ValueError, match="q has 19 rows but cu_seqlens_q says 20"):
            paged.attention(step.q[1:], step.k, step.v, "quest", step.pages)
        with pytest.raises(ValueError, match="out must be"):
            paged.attention(
                step.q, step.k, step.v, closecall.policy("quest", block=16, tile=16), step.pages, out=step.q[1:]
            )
        with pytest.raises(ValueError, match="sequence 0 has 20 rows but only 7 keys"):
            paged.Pages(step.pages.block_table, torch.tensor([0, 20]), torch.tensor([7]))
        pages = paged.Pages(step.pages.block_table, torch.tensor([0, 20]), torch.tensor([9999]))
        with pytest.raises(ValueError, match="has 9999 keys but its"):
            paged.attention(step.q, step.k, step.v, closecall.policy("quest", block=16, tile=16), pages)
        with pytest.raises(TypeError, match="seq_lens must be an int32 or int64 tensor, got float"):
            paged.Pages(step.pages.block_table, torch.tensor([0, 20]), 3.0)

    @pytest.mark.parametrize("backend", ["cpu", "reference"])
    def test_a_table_that_names_no_page(self, backend):
        step = make_step(13, [(20, 100)], 32, (4, 2), (32, 32))
        step.pages.block_table[0, 1] = 77
        with pytest.raises((ValueError, RuntimeError), match="block table names pages"):
            paged.attention(
                step.q,
                step.k,
                step.v,
                closecall.policy("quest", budget=2, block=16, tile=16),
                step.pages,
                backend=backend,
            )
