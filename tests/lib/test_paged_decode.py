"""Decoding over pages: query heads that share keys are worked on together, and no bit shows it."""

from __future__ import annotations

import contextlib
import dataclasses

import pytest
import torch

import closecall
from closecall import paged
from closecall.backends import cpu
from paged_steps import make_step

pytestmark = pytest.mark.skipif(not cpu.tiers(), reason="the native module was not built")

# One row over an odd number of keys, a block's only key, several pieces of 256 keys, rows of a speculative step.
LENGTHS = [(1, 517), (1, 1), (1, 65), (1, 1300), (5, 70), (8, 300)]
LAYOUTS = [("rows", "rows"), ("across", "rows"), ("across", "across"), ("flash", "flash")]
TYPES = [torch.float32, torch.bfloat16, torch.float16]


def attend(step, heads: slice = slice(None), keys: slice = slice(None)):
    """Everything attended to, and the log-sum-exp of each row."""
    q, k, v = step.q[:, heads], step.k[:, keys], step.v[:, keys]
    return paged.attend(q, k, v, None, step.pages, backend="cpu", return_lse=True)


@contextlib.contextmanager
def threads(count: int):
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.fixture(params=cpu.tiers(), autouse=True)
def tier(request, monkeypatch):
    monkeypatch.setenv("CLOSECALL_ISA", request.param)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 7])
def test_a_head_alone_gives_the_same_bits(group, dtype):
    step = make_step(group, LENGTHS, 64, (2 * group, 2), (64, 64), dtype, ("across", "rows"))
    together, sums = attend(step)
    for head in range(2 * group):
        one, its_sum = attend(step, slice(head, head + 1), slice(head // group, head // group + 1))
        assert torch.equal(together[:, head : head + 1], one)
        assert torch.equal(sums[head : head + 1], its_sum)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("dims", [(64, 64), (128, 96), (20, 12), (7, 33)])
def test_every_layout_gives_the_same_bits(dims, dtype):
    made = [make_step(1, LENGTHS, 128, (6, 2), dims, dtype, layouts) for layouts in LAYOUTS]
    expected = attend(made[0])
    for step, layouts in zip(made[1:], LAYOUTS[1:], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(attend(step), expected, strict=True)), layouts


@pytest.mark.parametrize("dtype", TYPES)
def test_agrees_with_the_specification(dtype):
    step = make_step(2, LENGTHS, 64, (9, 3), (64, 64), dtype, ("across", "rows"))
    spec = paged.attend(step.q.float(), step.k.float(), step.v.float(), None, step.pages, backend="reference")
    rounding = {"atol": 2e-6, "rtol": 1e-5} if dtype is torch.float32 else {"atol": 1e-2, "rtol": 1e-2}
    torch.testing.assert_close(attend(step)[0].float(), spec, **rounding)


def test_threads_that_share_the_keys_of_a_sequence_change_no_bit():
    # Alone, of one size, and one that is most of the work: it is cut into more runs than the others.
    for lengths in ([(1, 3000)], [(1, 3000), (1, 2100)], [(1, 6000), *[(1, 300)] * 9]):
        step = make_step(3, lengths, 64, (6, 2), (64, 64), torch.float32, ("across", "rows"))
        with threads(1):
            alone = attend(step)
        with threads(3):
            assert all(torch.equal(a, b) for a, b in zip(attend(step), alone, strict=True)), lengths


def test_what_lies_on_a_page_behind_the_last_key_reaches_nobody():
    """Vectors of keys that lie across are read past the last one."""
    step = make_step(4, [(1, 70)], 64, (3, 1), (64, 64), torch.float32, ("across", "rows"))
    expected = attend(step)
    last = int(step.pages.block_table[0, 1])
    step.k[last, :, 6:], step.v[last, :, 6:] = torch.nan, torch.inf
    assert all(torch.equal(a, b) for a, b in zip(attend(step), expected, strict=True))


# The later layers of a step: tensors laid out like those of the first are not looked at again.


def test_later_layers_get_the_same_bits_without_a_second_look(monkeypatch):
    steps = [make_step(5, LENGTHS, 64, (6, 2), (64, 96), torch.float32, ("across", "rows")) for _ in range(3)]
    for layer, step in enumerate(steps):
        step.k.mul_(layer + 1)  # other keys
    expected = [attend(step)[0] for step in steps]
    looked = []
    check = paged._check
    monkeypatch.setattr(paged, "_check", lambda *args, **named: (looked.append(1), check(*args, **named)))
    for layer, step in enumerate(steps):
        for run in (
            lambda out, s=step: paged.attend(s.q, s.k, s.v, None, steps[0].pages, backend="cpu", out=out),
            lambda out, s=step: paged.attention(s.q, s.k, s.v, "dense", steps[0].pages, backend="cpu", out=out),
        ):
            out = torch.full_like(expected[layer], torch.nan)
            assert run(out) is out
            assert torch.equal(out, expected[layer])
    assert len(looked) == 1


def test_a_layer_that_differs_from_the_first_is_looked_at():
    step = make_step(6, LENGTHS, 64, (6, 2), (64, 64), torch.float32, ("across", "rows"))
    pages, out = step.pages, torch.empty(step.q.shape[0], 6, 64)

    def attend_into(out, q=step.q, k=step.k, v=step.v, **how):
        return paged.attend(q, k, v, None, pages, backend="cpu", out=out, **how).clone()

    first = attend_into(out)
    rows = make_step(6, LENGTHS, 64, (6, 2), (64, 64), torch.float32, ("rows", "rows"))  # another layout
    assert torch.equal(attend_into(out, k=rows.k), first)
    assert not torch.equal(attend_into(out, scale=0.5), first)
    assert not torch.equal(attend_into(out, softcap=1.0), first)
    wide = torch.full((step.q.shape[0], 12, 64), torch.nan)
    assert torch.equal(attend_into(wide[:, ::2]), first)  # other strides
    assert wide[:, 1::2].isnan().all()
    fewer = make_step(6, LENGTHS, 64, (4, 2), (64, 64), torch.float32, ("across", "rows"))  # heads
    assert torch.equal(
        attend_into(torch.empty(fewer.q.shape), q=fewer.q), attend(dataclasses.replace(fewer, k=step.k, v=step.v))[0]
    )
    with pytest.raises(ValueError, match="out must be"):
        attend_into(out[:, :, ::2])
    with pytest.raises(TypeError, match="use one type"):
        attend_into(out, q=step.q.bfloat16())
    with pytest.raises(ValueError, match="v_pages must be"):
        attend_into(out, v=None)
    with pytest.raises(ValueError, match=r"scale must be a positive number .*, got \[1\]"):
        attend_into(out, scale=[1])
    with pytest.raises(TypeError, match="pages must be"):
        paged.attend(step.q, step.k, step.v, None, "pages", backend="cpu", out=out)


def test_later_layers_use_the_threads_and_instructions_of_now(monkeypatch):
    step = make_step(7, [(1, 5000)], 64, (6, 2), (64, 64), torch.float32, ("across", "rows"))
    out = torch.empty(1, 6, 64)
    seen = []
    native = cpu._native

    class Watched:
        def attend(self, packed):
            fields = memoryview(packed).cast("q")
            seen.append((fields[-6], fields[-5]))
            native.attend(packed)

    for count, name in ((1, cpu.tiers()[0]), (2, cpu.tiers()[-1])):
        with threads(count):
            monkeypatch.setenv("CLOSECALL_ISA", name)
            with monkeypatch.context() as patch:
                patch.setattr(cpu, "_native", Watched())
                patch.setattr(cpu, "tiers", lambda: list(native.tiers()))
                paged.attend(step.q, step.k, step.v, None, step.pages, backend="cpu", out=out)
    assert seen == [(1, 0), (2, len(cpu.tiers()) - 1)]


def test_steps_that_select_nothing_are_dense_and_complete_their_summaries():
    """As an engine decodes with our kernel: `attend`, and `update` where a block is complete."""
    policy = paged.chunk_proof(closecall.policy("quest", budget=2))
    step = make_step(8, [(1, 512)], 64, (6, 2), (64, 64), torch.float32, ("across", "rows"))
    pages = dataclasses.replace(step.pages, prompt_lens=torch.tensor([500]))
    by_attention, by_hand = paged.PageSummaries(policy, "cpu"), paged.PageSummaries(policy, "cpu")
    for summaries in (by_attention, by_hand):
        summaries.reserve(step.k, 6)
    out, made = paged.attention(
        step.q, step.k, step.v, policy, pages, backend="cpu", summaries=by_attention, return_selection=True
    )
    assert made is None
    into = torch.empty_like(out)
    paged.attend(step.q, step.k, step.v, None, pages, backend="cpu", out=into)
    by_hand.update(step.q, step.k, pages)
    assert torch.equal(out, into)
    assert by_attention._store.any()
    assert torch.equal(by_attention._store, by_hand._store)
