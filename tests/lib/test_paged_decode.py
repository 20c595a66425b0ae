"""Decoding over pages: query heads that share keys are worked on together, and no bit shows it."""

from __future__ import annotations

import pytest
import torch

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
    step = make_step(3, [(1, 3000), (1, 2100)], 64, (6, 2), (64, 64), torch.float32, ("across", "rows"))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = attend(step)
        torch.set_num_threads(3)
        assert all(torch.equal(a, b) for a, b in zip(attend(step), alone, strict=True))
    finally:
        torch.set_num_threads(before)


def test_what_lies_on_a_page_behind_the_last_key_reaches_nobody():
    """Vectors of keys that lie across are read past the last one."""
    step = make_step(4, [(1, 70)], 64, (3, 1), (64, 64), torch.float32, ("across", "rows"))
    expected = attend(step)
    last = int(step.pages.block_table[0, 1])
    step.k[last, :, 6:], step.v[last, :, 6:] = torch.nan, torch.inf
    assert all(torch.equal(a, b) for a, b in zip(attend(step), expected, strict=True))
