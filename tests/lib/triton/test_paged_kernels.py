"""The Triton kernels over pages, under the interpreter: equal to those over one piece of memory bit for bit."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

pytest.importorskip("triton")

from launches import NoSync, launched

import closecall
from closecall import paged
from closecall.backends.paged_reference import gathered
from closecall.backends.triton import backend, device
from closecall.backends.triton import paged as kernels_on_pages
from closecall.ranking import alone
from paged_steps import Step, make_step

POLICIES = {
    "quest": {"budget": 3},
    "auto": {"budget": 3, "pay": False, "share": "group"},  # two heads' rows in one program
    "topk-on-box": {"budget": 3, "aggregate": "mass", "pool": 4, "outlying": 2, "unpooled": 2},
}
GRID = {"block": 16, "tile": 16, "tile_factor": 1}
CHUNKS = [(20, 70), (1, 40), (18, 18)]  # a chunk behind a prefix, a decoding step, a whole prompt


@pytest.fixture(autouse=True)
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")


def contiguous(step: Step, policy: closecall.Policy) -> tuple[torch.Tensor, closecall.Selection]:
    """The contiguous Triton backend on gathered pages, with the same tiles."""
    made = step.pages.plan(step.k.shape[2], policy.block, policy.tile)
    q, k, v = step.q.transpose(0, 1)[None], gathered(step.k, made), gathered(step.v, made)
    g, scale = made.chosen, step.q.shape[2] ** -0.5
    ranked = dataclasses.replace(backend.rank(q, k, policy, g, scale), all_heads=alone)
    decision = policy.rule.decide(ranked)
    kv_idx = backend.gather_kept(ranked, decision.counts, g, policy.sinks, policy.rule.limit(g.n_blocks))
    kept = closecall.Selection.of_groups(kv_idx, decision, g, step.q.shape[1])
    return backend.attend(q, k, v, kept, g, scale)[0][0].transpose(0, 1), kept


@pytest.mark.parametrize(
    ("name", "page", "dims", "dtype", "layouts"),
    [
        ("quest", 16, (16, 16), torch.float32, ("rows", "flash")),
        ("auto", 48, (32, 16), torch.bfloat16, ("flash", "flash")),
        ("topk-on-box", 32, (24, 40), torch.float16, ("across", "rows")),  # vLLM's keys on CPU; padded dims
    ],
)
def test_equals_the_contiguous_kernels_bit_for_bit(name, page, dims, dtype, layouts):
    policy = closecall.policy(name, **(POLICIES[name] | GRID))
    step = make_step(1, CHUNKS, page, (2, 1), dims, dtype, layouts)
    expected, theirs = contiguous(step, policy)
    made = paged.select(step.q, step.k, policy, step.pages, backend="triton")
    assert int(made.counts.sum()) < int(made.geometry.visible.sum()) * 2  # something was cut
    assert torch.equal(made.kept_mask(), theirs.kept_mask())
    target = torch.full((len(step.q), 3, dims[1]), 7.0, dtype=dtype)[:, 1:]
    out = paged.attend(step.q, step.k, step.v, made, step.pages, backend="triton", out=target)
    assert out is target
    assert torch.equal(out, expected)


def test_rows_that_attend_to_everything():
    """A mixed step: decoding, a prompt below the minimum, rows generated before a preemption; few rows and many."""
    lengths, prompts = [(1, 75), (33, 33), (3, 50), (1, 16)], [60, 33, 48, 15]
    step = make_step(5, lengths, 32, (4, 2), (16, 16), layouts=("flash", "rows"), prompts=prompts)
    step.pages = dataclasses.replace(step.pages, min_context=40)
    used = step.pages.block_table[step.pages.block_table < 2**30].tolist()
    others = [p for p in range(len(step.k)) if p not in used]
    step.k[others], step.v[others] = torch.nan, torch.nan
    args = (step.q, step.k, step.v, None, step.pages)
    out, lse = paged.attend(*args, block=16, tile=16, backend="triton", return_lse=True)
    want, want_lse = exact(step)
    torch.testing.assert_close(out.double(), want, atol=3e-6, rtol=0)
    torch.testing.assert_close(lse.double(), want_lse, atol=3e-6, rtol=0)


def exact(step: Step) -> tuple[torch.Tensor, torch.Tensor]:
    """Dense attention in float64, sequence by sequence."""
    made = step.pages.plan(step.k.shape[2], 16, 16)
    n = len(step.pages.keys)
    k, v = (gathered(x.nan_to_num(), made)[0].double().unflatten(1, (n, -1)) for x in (step.k, step.v))
    group = step.q.shape[1] // step.k.shape[1]
    parts = []
    for i, keys in enumerate(step.pages.keys):
        rows = slice(*step.pages.bounds[i : i + 2])
        q = step.q[rows].double().transpose(0, 1)
        here = [x[:, i, :keys].repeat_interleave(group, 0) for x in (k, v)]
        s = q @ here[0].mT * step.q.shape[2] ** -0.5
        behind = torch.arange(keys) > torch.arange(keys - q.shape[1], keys)[:, None]
        s = s.masked_fill(behind, -torch.inf)
        parts.append(((s.softmax(-1) @ here[1]).transpose(0, 1), s.logsumexp(-1)))
    outs, sums = zip(*parts, strict=True)
    return torch.cat(outs), torch.cat(sums, 1)


class TestSummaries:
    POLICY = closecall.policy("auto", **(POLICIES["auto"] | GRID | {"share": "head"}))

    def test_kept_ones_change_nothing_and_are_used(self):
        policy = paged.chunk_proof(self.POLICY)
        step = make_step(7, [(112, 112)], 32, (2, 1), (16, 16), torch.bfloat16)
        kept = paged.PageSummaries(policy, backend="triton")

        def pages(a: int, b: int) -> paged.Pages:  # the prompt goes on behind them: no tile is protected as its last
            return paged.Pages(step.pages.block_table, torch.tensor([0, b - a]), torch.tensor([b]), torch.tensor([500]))

        for a, b in itertools.pairwise([0, 32, 64, 96]):
            args = (step.q[a:b], step.k, policy, pages(a, b))
            ours, fresh = (paged.select(*args, backend="triton", summaries=s) for s in (kept, None))
            assert torch.equal(ours.kept_mask(), fresh.kept_mask())
        # Now the keys of complete blocks are spoilt: who still selects the same has not read them.
        last, table = (step.q[96:], policy, pages(96, 112)), step.pages.block_table[0]
        spoilt = torch.randn(step.k.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
        spoilt[table[3]] = step.k[table[3]]  # the page of the tile's own block
        keep = [
            paged.select(last[0], k, *last[1:], backend="triton", summaries=s).kept_mask()
            for k, s in ((step.k, kept), (spoilt, kept), (spoilt, None))
        ]
        assert torch.equal(keep[1], keep[0])
        assert not torch.equal(keep[2], keep[0])

    def test_update_is_what_a_selecting_step_leaves(self):
        step = make_step(10, [(70, 70), (10, 61)], 32, (2, 1), (16, 16))
        first = paged.Pages(step.pages.block_table, torch.tensor([0, 70, 121]), torch.tensor([70, 51]))
        q = torch.randn(121, 2, 16)
        one, two = (paged.PageSummaries(self.POLICY, backend="triton") for _ in range(2))
        paged.select(q, step.k, self.POLICY, first, backend="triton", summaries=one)
        two.update(q, step.k, first)
        assert torch.equal(one._store, two._store)
        assert int((one._store != 0).any(-1).sum()) == 3 * (4 + 3)  # planes of complete blocks
        # Another backend selects from keys and leaves the store up to date.
        for s in (one, two):
            paged.select(step.q, step.k, self.POLICY, step.pages, backend="triton" if s is one else "cpu", summaries=s)
        assert torch.equal(one._store, two._store)


def test_nothing_is_asked_of_the_device(monkeypatch):
    """After a first layer made the step's tables, a layer is nothing but launches."""
    policy = paged.chunk_proof(closecall.policy("quest", **(POLICIES["quest"] | GRID)))
    step = make_step(3, [(20, 70), (1, 48)], 32, (2, 1), (16, 16), prompts=[70, 30])
    kept = paged.PageSummaries(policy, backend="triton")
    paged.attention(step.q, step.k, step.v, policy, step.pages, backend="triton", summaries=kept)
    made = step.pages.plan(32, 16, 16)
    monkeypatch.setattr(device, "kernels", launched)
    q, out, lse = step.q.transpose(0, 1)[None], torch.zeros(1, 2, 21, 16), torch.zeros(1, 2, 21)
    with NoSync():
        ranked = kernels_on_pages.rank(q, step.k, policy, made.chosen, made, 0.2, made.chosen.sequence, kept._store)
        decision = policy.rule.decide(ranked)
        kv_idx = backend.gather_kept(ranked, decision.counts, made.chosen, policy.sinks, 4)
        chosen = closecall.Selection(kv_idx, decision.counts, decision.margin, decision.triggered, made.chosen)
        for selection, g in ((chosen, made.chosen), (None, made.dense)):
            kernels_on_pages.attend(q, step.k, step.v, selection, g, made, 0.2, 0.0, out, lse)
        kernels_on_pages.update(q, step.k, policy, made.dense, made, kept._store)


class TestBadInput:
    def test_a_table_that_names_no_page(self):
        step = make_step(13, [(20, 60)], 32, (2, 1), (16, 16))
        step.pages.block_table[0, 1] = 77
        with pytest.raises(ValueError, match="block table names pages"):
            paged.attention(step.q, step.k, step.v, "dense:block=16,tile=16", step.pages, backend="triton")

    def test_more_keys_than_the_kernels_can_count(self):
        step = make_step(13, [(20, 60)], 32, (2, 1), (16, 16))
        wide = paged.Pages(torch.zeros(1, 2**26, dtype=torch.int32), torch.tensor([0, 20]), torch.tensor([60]))
        with pytest.raises(ValueError, match="no wider than its longest sequence"):
            paged.attention(step.q, step.k, step.v, "dense:block=16,tile=16", wide, backend="triton")

    def test_without_the_interpreter(self, monkeypatch):
        monkeypatch.delenv("TRITON_INTERPRET")
        step = make_step(13, [(20, 60)], 32, (2, 1), (16, 16))
        with pytest.raises(ValueError, match=r"backend 'triton' cannot run here: .* use backend='cpu'"):
            paged.attention(step.q, step.k, step.v, "dense:block=16,tile=16", step.pages, backend="triton")
