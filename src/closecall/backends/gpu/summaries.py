# mypy: ignore-errors
# ruff: noqa: N803
# (Triton's language has no types, and its constants are capitals.)
"""Block summaries: the mean key, or the smallest and largest coordinates, over the real keys of each block."""

import triton
import triton.language as tl

from .steps import largest, smallest, total


@triton.jit(do_not_specialize=["n_slots"])
def summaries_kernel(
    k, out, blocks, k_b, k_h, k_n, k_d, n_slots,
    KEYS: tl.constexpr, STEPS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, QUEST: tl.constexpr,
    PLANES: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """One program does one block of one key head; `blocks` holds (batch row, first key, keys) of each.

    The result `[Hkv, PLANES, slots, WIDTH]` is in the keys' own type, because that is what tensor cores multiply.
    Largest and smallest coordinates are exact in it. A mean is not: it is split into PLANES parts, each what the ones
    before left over (times 2^SHIFT, so that float16 does not lose it below its range), and the parts' scores add up.
    """
    slot = tl.program_id(0)
    h = tl.program_id(1)
    b = tl.load(blocks + slot * 3).to(tl.int64)
    first = tl.load(blocks + slot * 3 + 1).to(tl.int64)
    count = tl.load(blocks + slot * 3 + 2)
    k += b * k_b + h.to(tl.int64) * k_h + first * k_n
    column = tl.arange(0, WIDTH)
    k_at = column.to(tl.int64)[None, :] * k_d
    out += ((h.to(tl.int64) * PLANES) * n_slots + slot) * WIDTH + column
    plane = n_slots.to(tl.int64) * WIDTH
    if QUEST:
        high = tl.full([WIDTH], -float("inf"), tl.float32)
        low = tl.full([WIDTH], float("inf"), tl.float32)
    sums = tl.full([WIDTH], 0.0, tl.float32)
    for i in range(STEPS):
        at = i * KEYS + tl.arange(0, KEYS)
        ok = (at < count)[:, None] & (column < DIM)[None, :]
        x = tl.load(k + at.to(tl.int64)[:, None] * k_n + k_at, mask=ok, other=0.0).to(tl.float32)
        if QUEST:
            high = tl.maximum(high, largest(tl.where(ok, x, -float("inf")), 0))
            low = tl.minimum(low, smallest(tl.where(ok, x, float("inf")), 0))
            sums += total(tl.where(x != x, x, 0.0), 0)  # NaN where a key is: a maximum would pass over it
        else:
            sums += total(x, 0)
    if QUEST:
        inside = column < DIM
        tl.store(out, tl.where(inside, high + sums, 0.0).to(out.dtype.element_ty))
        tl.store(out + plane, tl.where(inside, low + sums, 0.0).to(out.dtype.element_ty))
    else:
        rest = tl.div_rn(sums, count.to(tl.float32))
        for i in tl.static_range(PLANES):
            part = rest.to(out.dtype.element_ty)
            tl.store(out + i * plane, part)
            rest = tl.where(tl.abs(rest) < float("inf"), (rest - part.to(tl.float32)) * (2.0**SHIFT), 0.0)
