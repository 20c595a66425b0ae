# mypy: ignore-errors
# ruff: noqa: N803, N806
# (Triton's language has no types, and its constants are capitals.)
"""Block summaries over the real keys of each block: the mean key, the (shrunk) box, or the outlying keys.

The results `[Hkv, planes, slots, WIDTH]` are in the keys' own type, because that is what tensor cores multiply.
Coordinates of keys are exact in it, and what stands for keys is defined to be rounded to it, but for a mean without
outlying keys: that is split into parts, each what the ones before left over (times 2^SHIFT, so that float16 does not
lose it below its range), and the parts' scores add up.
"""

import triton.language as tl

import triton

from .steps import largest, largest_int, smallest, total


@triton.jit
def left_over(x, part, SHIFT: tl.constexpr):
    return tl.where(tl.abs(x) < float("inf"), (x - part.to(tl.float32)) * (2.0**SHIFT), 0.0)


@triton.jit
def between(a, b, weight):
    """From a to b, exact at both ends."""
    return tl.where(weight < 0.5, a + weight * (b - a), b - (b - a) * (1.0 - weight))


@triton.jit(do_not_specialize=["n_slots"])
def summaries_kernel(
    k, out, blocks, k_b, k_h, k_n, k_d, n_slots, shrink,
    KEYS: tl.constexpr, STEPS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, BOX: tl.constexpr,
    SHRUNK: tl.constexpr, PLANES: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """One program does one block of one key head; `blocks` holds (batch row, first key, keys) of each.

    A box's two planes are the largest coordinates and the smallest ones. SHRUNK draws both towards the mean, as far as
    `shrink` of 1 leaves them where they are. A mean has PLANES parts.
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
    if BOX:
        high = tl.full([WIDTH], -float("inf"), tl.float32)
        low = tl.full([WIDTH], float("inf"), tl.float32)
    sums = tl.full([WIDTH], 0.0, tl.float32)
    for i in range(STEPS):
        at = i * KEYS + tl.arange(0, KEYS)
        ok = (at < count)[:, None] & (column < DIM)[None, :]
        x = tl.load(k + at.to(tl.int64)[:, None] * k_n + k_at, mask=ok, other=0.0).to(tl.float32)
        if BOX:
            high = tl.maximum(high, largest(tl.where(ok, x, -float("inf")), 0))
            low = tl.minimum(low, smallest(tl.where(ok, x, float("inf")), 0))
        if BOX and not SHRUNK:
            sums += total(tl.where(x != x, x, 0.0), 0)  # NaN where a key is: a maximum would pass over it
        else:
            sums += total(x, 0)
    if BOX:
        inside = column < DIM
        if SHRUNK:
            mean = tl.div_rn(sums, count.to(tl.float32))
            high = tl.where(inside, between(mean, high, shrink), 0.0)
            low = tl.where(inside, between(mean, low, shrink), 0.0)
        else:
            high = tl.where(inside, high + sums, 0.0)
            low = tl.where(inside, low + sums, 0.0)
        tl.store(out, high.to(out.dtype.element_ty))
        tl.store(out + plane, low.to(out.dtype.element_ty))
    else:
        rest = tl.div_rn(sums, count.to(tl.float32))
        for i in tl.static_range(PLANES):
            part = rest.to(out.dtype.element_ty)
            tl.store(out + i * plane, part)
            rest = left_over(rest, part, SHIFT)


@triton.jit
def distances(k, at, k_n, k_at, count, column, mean, DIM: tl.constexpr):
    """Some of a block's keys, and their distances from the mean as integers: larger for the more distant, and for the
    earlier of equally distant keys; -1 for those that do not exist. NaN is as far away as can be."""
    ok = (at < count)[:, None] & (column < DIM)[None, :]
    x = tl.load(k + at.to(tl.int64)[:, None] * k_n + k_at, mask=ok, other=0.0).to(tl.float32)
    apart = tl.where(ok, x - mean[None, :], 0.0)
    apart = total(apart * apart, 1)
    bits = tl.where(apart == apart, apart, float("inf")).to(tl.int32, bitcast=True)
    return x, tl.where(at < count, (bits.to(tl.int64) << 32) | (0x7FFFFFFF - at).to(tl.int64), -1)


@triton.jit(do_not_specialize=["n_slots"])
def outliers_kernel(
    k, out, blocks, k_b, k_h, k_n, k_d, n_slots, shrink,
    KEYS: tl.constexpr, STEPS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, BOX: tl.constexpr,
    VECTORS: tl.constexpr,
):  # fmt: skip
    """One program does one block of one key head. Plane 0 is the mean of the keys that have no plane of their own, or
    planes 0 and 1 the two sides of their BOX, as far as `shrink` leaves them from that mean. The others are the
    VECTORS - 1 keys most distant from the mean of all, the most distant first.

    Distances are computed anew to find each: what was found before is what is no less distant, and a block of any size
    needs no more registers than KEYS of its keys. A block with a NaN in it is NaN in all planes. A short block that has
    too few keys repeats its least distant one.
    """
    PLANES: tl.constexpr = 2 if BOX else 1  # of the first vector
    slot = tl.program_id(0)
    h = tl.program_id(1)
    b = tl.load(blocks + slot * 3).to(tl.int64)
    first = tl.load(blocks + slot * 3 + 1).to(tl.int64)
    count = tl.load(blocks + slot * 3 + 2)
    k += b * k_b + h.to(tl.int64) * k_h + first * k_n
    column = tl.arange(0, WIDTH)
    k_at = column.to(tl.int64)[None, :] * k_d
    out += ((h.to(tl.int64) * (PLANES + VECTORS - 1)) * n_slots + slot) * WIDTH + column
    plane = n_slots.to(tl.int64) * WIDTH
    sums = tl.full([WIDTH], 0.0, tl.float32)
    for i in range(STEPS):
        at = i * KEYS + tl.arange(0, KEYS)
        ok = (at < count)[:, None] & (column < DIM)[None, :]
        sums += total(tl.load(k + at.to(tl.int64)[:, None] * k_n + k_at, mask=ok, other=0.0).to(tl.float32), 0)
    mean = tl.div_rn(sums, count.to(tl.float32))
    spoilt = total(tl.where(mean != mean, mean, 0.0), 0)  # NaN or 0
    last = (count * 0).to(tl.int64) + 0x7FFFFFFFFFFFFFFF  # more distant than any
    for vector in range(1, VECTORS):
        best = (count * 0).to(tl.int64) - 1
        for i in range(STEPS):
            _, order = distances(k, i * KEYS + tl.arange(0, KEYS), k_n, k_at, count, column, mean, DIM)
            best = tl.maximum(best, largest_int(tl.where(order < last, order, -1), 0))
        best = tl.where(best < 0, last, best)  # none is left
        last = best
        place = 0x7FFFFFFF - (best & 0xFFFFFFFF)
        x = tl.load(k + place * k_n + column.to(tl.int64) * k_d, mask=column < DIM, other=0.0)
        x = tl.where(spoilt == spoilt, x.to(tl.float32), spoilt)
        tl.store(out + (PLANES - 1 + vector) * plane, tl.where(column < DIM, x, 0.0).to(out.dtype.element_ty))
    last += tl.where(count < VECTORS, 1, 0)  # where none is left over, the last one is
    sums = tl.full([WIDTH], 0.0, tl.float32)
    if BOX:
        high = tl.full([WIDTH], -float("inf"), tl.float32)
        low = tl.full([WIDTH], float("inf"), tl.float32)
    for i in range(STEPS):
        x, order = distances(k, i * KEYS + tl.arange(0, KEYS), k_n, k_at, count, column, mean, DIM)
        other = ((order >= 0) & (order < last))[:, None]
        sums += total(tl.where(other, x, 0.0), 0)
        if BOX:
            high = tl.maximum(high, largest(tl.where(other, x, -float("inf")), 0))
            low = tl.minimum(low, smallest(tl.where(other, x, float("inf")), 0))
    rest = tl.div_rn(sums, tl.maximum(count - (VECTORS - 1), 1).to(tl.float32))
    for side in tl.static_range(PLANES):
        x = rest
        if BOX:
            x = between(rest, low if side else high, shrink)
        x = tl.where(column < DIM, tl.where(spoilt == spoilt, x, spoilt), 0.0)
        tl.store(out + side * plane, x.to(out.dtype.element_ty))
