# mypy: ignore-errors
# ruff: noqa: N803, N806, SIM108
# (Triton's language has no types, and its constants are capitals.)
"""Tile scores: how well a tile's rows match each block, reduced over the rows as they are computed.

A block is summarised by VECTORS vectors. The first stands for all keys that have no vector of their own and lies in
PLANES planes: its parts, or those of the two sides of a box. Each of the others is a key, in one plane. A row's score
of a block is the largest of its products with the vectors; its estimated mass, in units of the softmax, the sum of
their exponentials, of which the first vector's counts for all keys that it stands for.

Masses of vectors that are all of one kind are added up in one loop: with the first taken out of it, as a box beside
keys must be, some variants have no registers left.
"""

import triton.language as tl

import triton

from .steps import HUGE, LARGEST, LN_2, LOG2_E, LOWEST, largest, rows_of, total

# Below every score, even -inf: blocks that may not be ranked because the tile does not see them or must keep them.
NEVER = tl.constexpr(-(2**63))


@triton.jit
def sortable(score, block):
    """Score and block as one int64: larger for larger scores, and for the lower block where scores are equal."""
    score = tl.where(score == score, score, -float("inf"))
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)  # -0 equals 0
    ascending = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ascending.to(tl.int64) << 32) | (0x7FFFFFFF - block).to(tl.int64)


@triton.jit
def products(q, at, real, q_n, q_d, summary, block, ok, plane, left, ROWS: tl.constexpr, KEYS: tl.constexpr,
             DIM: tl.constexpr, WIDTH: tl.constexpr, SLICE: tl.constexpr, BOX: tl.constexpr, PLANES: tl.constexpr,
             SHIFT: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr):  # fmt: skip
    """The products of the rows with the blocks' summaries over SLICE columns, of which `left` are still the head's."""
    column = tl.arange(0, SLICE)
    x_at = q + at.to(tl.int64)[:, None] * q_n + column.to(tl.int64)[None, :] * q_d
    if DIM % SLICE:
        x = tl.load(x_at, mask=real[:, None] & (column < left)[None, :], other=0.0)
    else:
        x = tl.load(x_at, mask=real[:, None], other=0.0)
    if WIDE:
        x = x.to(tl.float32)
    s = tl.full([ROWS, KEYS], 0.0, tl.float32)
    for i in tl.static_range(PLANES):
        # The last plane holds the smallest parts: added up first, they are not lost beside the larger ones.
        y = rows_of(summary + (PLANES - 1 - i) * plane, block, ok, WIDTH, 1, 0, SLICE, SLICE, True, WIDE)
        if BOX:
            if SHIFT and i % 2 == 0:  # both sides' next larger parts
                s *= 2.0**-SHIFT
            # max(q high, q low) is q high where q > 0 and q low elsewhere. NaN must stay NaN in both.
            own = tl.where(x < 0.0, 0.0, x) if i % 2 else tl.where(x > 0.0, 0.0, x)
            s = tl.dot(own.to(x.dtype), tl.trans(y), s, input_precision=PRECISION)
        else:
            s = tl.dot(x, tl.trans(y), s * (2.0**-SHIFT), input_precision=PRECISION)
    return s


@triton.jit
def row_scores(q, at, real, q_n, q_d, summary, block, ok, plane, ROWS: tl.constexpr, KEYS: tl.constexpr,
               DIM: tl.constexpr, WIDTH: tl.constexpr, SLICE: tl.constexpr, BOX: tl.constexpr, PLANES: tl.constexpr,
               SHIFT: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr):  # fmt: skip
    """The same over all columns, SLICE at a time."""
    stride_d = tl.cast(q_d, tl.int64)
    s = tl.full([ROWS, KEYS], 0.0, tl.float32)
    for c in range(0, DIM, SLICE):
        s += products(q + c * stride_d, at, real, q_n, q_d, summary + c, block, ok, plane, DIM - c, ROWS, KEYS, DIM,
                      WIDTH, SLICE, BOX, PLANES, SHIFT, PRECISION, WIDE)  # fmt: skip
    return s


@triton.jit
def key_scores(q, at, real, q_n, q_d, summary, vector, block, ok, plane, ROWS: tl.constexpr, KEYS: tl.constexpr,
               DIM: tl.constexpr, WIDTH: tl.constexpr, SLICE: tl.constexpr, PLANES: tl.constexpr,
               PRECISION: tl.constexpr, WIDE: tl.constexpr):  # fmt: skip
    """The same with a vector after the first: keys as they are, whatever the first is made of."""
    return row_scores(q, at, real, q_n, q_d, summary + (PLANES - 1 + vector) * plane, block, ok, plane, ROWS, KEYS, DIM,
                      WIDTH, SLICE, False, 1, 0, PRECISION, WIDE)  # fmt: skip


@triton.jit
def best_scores(q, at, real, q_n, q_d, summary, block, ok, plane, ROWS: tl.constexpr, KEYS: tl.constexpr,
                DIM: tl.constexpr, WIDTH: tl.constexpr, SLICE: tl.constexpr, BOX: tl.constexpr, VECTORS: tl.constexpr,
                PLANES: tl.constexpr, SHIFT: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr):  # fmt: skip
    """The largest over the vectors; NaN if one is."""
    s = row_scores(q, at, real, q_n, q_d, summary, block, ok, plane, ROWS, KEYS, DIM, WIDTH, SLICE, BOX, PLANES, SHIFT,
                   PRECISION, WIDE)  # fmt: skip
    for vector in range(1, VECTORS):
        one = key_scores(q, at, real, q_n, q_d, summary, vector, block, ok, plane, ROWS, KEYS, DIM, WIDTH, SLICE,
                         PLANES, PRECISION, WIDE)  # fmt: skip
        s = tl.where((one > s) | (one != one), one, s)
    return s


@triton.jit
def nth_scores(q, at, real, q_n, q_d, summary, vector, block, ok, plane, ROWS: tl.constexpr, KEYS: tl.constexpr,
               DIM: tl.constexpr, WIDTH: tl.constexpr, SLICE: tl.constexpr, BOX: tl.constexpr, APART: tl.constexpr,
               PLANES: tl.constexpr, SHIFT: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr):  # fmt: skip
    """Those of any vector where all are of one kind, and of a key where the first, a box, is taken APART."""
    if APART:
        s = key_scores(q, at, real, q_n, q_d, summary, vector, block, ok, plane, ROWS, KEYS, DIM, WIDTH, SLICE, PLANES,
                       PRECISION, WIDE)  # fmt: skip
    else:
        s = row_scores(q, at, real, q_n, q_d, summary + vector * PLANES * plane, block, ok, plane, ROWS, KEYS, DIM,
                       WIDTH, SLICE, BOX, PLANES, SHIFT, PRECISION, WIDE)  # fmt: skip
    return s


@triton.jit
def keys_behind(vector, BLOCK: tl.constexpr, VECTORS: tl.constexpr):
    """How many keys of a whole block a vector stands for; only whole blocks are ever ranked."""
    return tl.where(vector == 0, BLOCK - VECTORS + 1.0, 1.0)


@triton.jit
def added(s, ok, top, mass, keys, most, UNIT: tl.constexpr):
    """An online sum, in the largest logit and the mass relative to it, with logits that count for `keys` keys each.

    Times UNIT, logits are in base 2. NaN counts for nothing, infinity as `most`.
    """
    s = tl.where(ok[None, :] & (s == s), tl.minimum(s, most), -float("inf"))
    higher = tl.maximum(top, largest(s, 1))
    found = total(tl.exp2((s - higher[:, None]) * UNIT), 1) * keys
    return higher, mass * tl.exp2((top - higher) * UNIT) + found


@triton.jit
def relative(s, tops, at, real, keys):
    """Masses relative to the rows' largest logits in `tops`; NaN stays."""
    s = tl.where(s > HUGE, HUGE, s)
    top = tl.load(tops + 2 * at, mask=real, other=0.0)
    return tl.exp2(s - top[:, None]) * keys


@triton.jit(do_not_specialize=["n_tiles", "q_len", "n_slots", "sinks"])
def sums_kernel(
    q, summaries, plan, forced, sums, q_b, q_h, q_n, q_d, n_tiles, q_len, group, n_slots, sinks, scale,
    TILE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr,
    WIDTH: tl.constexpr, SLICE: tl.constexpr, BOX: tl.constexpr, SOFTMAX: tl.constexpr, VECTORS: tl.constexpr,
    PLANES: tl.constexpr, SHIFT: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """What each row's masses add up to: one program does ROWS rows of one tile of one head.

    `forced [B, H, q_len]` is the log-sum-exp over the row's forced blocks; those that may be ranked are estimated.
    `scale` makes logits in base 2. Written are, to `sums [B, H, q_len, 2]`, the largest logit and one over the sum of
    the masses relative to it, which is 0 for a row whose forced mass is not a number: it has no say.

    SOFTMAX adds up the exponentials of the scores of all blocks that the tile sees instead, and reads nothing of
    `forced`. `scale` is then the plain one, and `sums [B, H, q_len]` gets the log-sum-exp, 0 if there is nothing to add
    up. Not in base 2, so that infinite scores become float32's largest number, as in the reference.
    """
    PARTS: tl.constexpr = (TILE + ROWS - 1) // ROWS
    APART: tl.constexpr = 1 if BOX and VECTORS > 1 else 0
    tile = n_tiles - 1 - tl.program_id(0) // PARTS  # later tiles see more and start first
    part = tl.program_id(0) % PARTS
    h = tl.program_id(1)
    b = tl.program_id(2)
    entry = plan + (b * n_tiles + tile) * 5
    row, rows, pos, slot = tl.load(entry), tl.load(entry + 1), tl.load(entry + 3), tl.load(entry + 4)
    if part * ROWS >= rows:
        return
    q += b.to(tl.int64) * q_b + h.to(tl.int64) * q_h + row.to(tl.int64) * q_n
    plane = n_slots.to(tl.int64) * WIDTH
    summaries += (h // group).to(tl.int64) * (PLANES + VECTORS - 1) * plane + slot.to(tl.int64) * WIDTH
    at = part * ROWS + tl.arange(0, ROWS)
    real = at < rows
    line = (b.to(tl.int64) * tl.num_programs(1) + h) * q_len + row + at
    if SOFTMAX:
        stop = (pos + rows - 1) // BLOCK + 1
        top = tl.full([ROWS], -LARGEST, tl.float32)
        mass = tl.full([ROWS], 0.0, tl.float32)
    else:
        stop = pos // BLOCK  # from the tile's first own block on, all are forced or not visible
        own = tl.load(forced + line, mask=real, other=0.0) * LOG2_E
        known = own == own
        own = tl.where(known, own, -float("inf"))
        top = tl.maximum(own, LOWEST)
        mass = tl.exp2(own - top)
    for start in range(0, stop, KEYS):
        block = start + tl.arange(0, KEYS)
        if SOFTMAX:
            ok = block < stop
            s = best_scores(q, at, real, q_n, q_d, summaries, block, ok, plane, ROWS, KEYS, DIM, WIDTH, SLICE, BOX,
                            VECTORS, PLANES, SHIFT, PRECISION, WIDE)  # fmt: skip
            top, mass = added(scale * s, ok, top, mass, 1.0, LARGEST, LOG2_E)
        else:
            ok = (block >= sinks) & (block < stop)
            if APART:
                s = row_scores(q, at, real, q_n, q_d, summaries, block, ok, plane, ROWS, KEYS, DIM, WIDTH, SLICE, BOX,
                               PLANES, SHIFT, PRECISION, WIDE)  # fmt: skip
                top, mass = added(scale * s, ok, top, mass, BLOCK - VECTORS + 1.0, HUGE, 1.0)
            for vector in range(APART, VECTORS):
                s = nth_scores(q, at, real, q_n, q_d, summaries, vector, block, ok, plane, ROWS, KEYS, DIM, WIDTH,
                               SLICE, BOX, APART, PLANES, SHIFT, PRECISION, WIDE)  # fmt: skip
                top, mass = added(scale * s, ok, top, mass, keys_behind(vector, BLOCK, VECTORS), HUGE, 1.0)
    if SOFTMAX:
        tl.store(sums + line, tl.where(mass > 0.0, top + tl.log2(mass) * LN_2, 0.0), mask=real)
    else:
        tl.store(sums + 2 * line, top, mask=real)
        tl.store(sums + 2 * line + 1, tl.where(known & (mass > 0.0), 1.0 / mass, 0.0), mask=real)


@triton.jit(
    do_not_specialize=["n_tiles", "first_tile", "first_head", "n_heads", "q_len", "n_blocks", "n_slots", "sinks"]
)
def scores_kernel(
    q, summaries, plan, sums, out, q_b, q_h, q_n, q_d, n_tiles, first_tile, first_head, n_heads, q_len, group, n_blocks,
    n_slots, sinks, scale,
    TILE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr,
    WIDTH: tl.constexpr, SLICE: tl.constexpr, BOX: tl.constexpr, MASS: tl.constexpr, SOFTMAX: tl.constexpr,
    MEAN: tl.constexpr, VECTORS: tl.constexpr, PLANES: tl.constexpr, SHIFT: tl.constexpr, PRECISION: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """One program does one tile of one head: KEYS blocks at a time, it multiplies, reduces over the rows and writes one
    sortable number per block into `[B, heads, tiles, n_blocks]`. No score of a single row ever leaves it.

    MASS turns a row's scores into shares of its mass before they are reduced, SOFTMAX into logs of shares of what its
    scores' exponentials add up to, both by the `sums` of the kernel above.
    """
    PARTS: tl.constexpr = (TILE + ROWS - 1) // ROWS
    APART: tl.constexpr = 1 if BOX and VECTORS > 1 else 0
    tile = first_tile + tl.program_id(0)
    h = first_head + tl.program_id(1)
    b = tl.program_id(2)
    entry = plan + (b * n_tiles + tile) * 5
    row, rows, pos, slot = tl.load(entry), tl.load(entry + 1), tl.load(entry + 3), tl.load(entry + 4)
    q += b.to(tl.int64) * q_b + h.to(tl.int64) * q_h + row.to(tl.int64) * q_n
    plane = n_slots.to(tl.int64) * WIDTH
    summaries += (h // group).to(tl.int64) * (PLANES + VECTORS - 1) * plane + slot.to(tl.int64) * WIDTH
    if MASS:
        sums += ((b.to(tl.int64) * n_heads + h) * q_len + row) * 2
    if SOFTMAX:
        sums += (b.to(tl.int64) * n_heads + h) * q_len + row
    line = (b.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * tl.num_programs(0) + tl.program_id(0)
    out += line * n_blocks
    own = pos // BLOCK  # the first block that overlaps the tile's rows: from here on blocks are forced or not visible
    free = tl.where(rows > 0, own, 0)
    for start in range(0, free, KEYS):
        block = start + tl.arange(0, KEYS)
        ok = block < free
        if MEAN:
            score = tl.full([KEYS], 0.0, tl.float32)
        else:
            score = tl.full([KEYS], -float("inf"), tl.float32)
        for part in range(PARTS):
            at = part * ROWS + tl.arange(0, ROWS)
            real = at < rows
            if MASS:
                s = tl.full([ROWS, KEYS], 0.0, tl.float32)
                if APART:
                    one = row_scores(q, at, real, q_n, q_d, summaries, block, ok, plane, ROWS, KEYS, DIM, WIDTH, SLICE,
                                     BOX, PLANES, SHIFT, PRECISION, WIDE)  # fmt: skip
                    s += relative(scale * one, sums, at, real, BLOCK - VECTORS + 1.0)
                for vector in range(APART, VECTORS):
                    one = nth_scores(q, at, real, q_n, q_d, summaries, vector, block, ok, plane, ROWS, KEYS, DIM, WIDTH,
                                     SLICE, BOX, APART, PLANES, SHIFT, PRECISION, WIDE)  # fmt: skip
                    s += relative(scale * one, sums, at, real, keys_behind(vector, BLOCK, VECTORS))
                s *= tl.load(sums + 2 * at + 1, mask=real, other=0.0)[:, None]
                s = tl.where(s == s, s, 0.0)
            else:
                s = best_scores(q, at, real, q_n, q_d, summaries, block, ok, plane, ROWS, KEYS, DIM, WIDTH, SLICE, BOX,
                                VECTORS, PLANES, SHIFT, PRECISION, WIDE)  # fmt: skip
                s *= scale
                if SOFTMAX:
                    s = tl.where(s > LARGEST, LARGEST, s)  # NaN stays
                    s -= tl.load(sums + at, mask=real, other=0.0)[:, None]
            if MEAN:
                score += total(tl.where(real[:, None], s, 0.0), 0)
            else:  # a row whose score is NaN has no say
                score = tl.maximum(score, largest(tl.where(real[:, None] & (s == s), s, -float("inf")), 0))
        if MEAN:
            score = tl.div_rn(score, tl.maximum(rows, 1).to(tl.float32))
        ranked = tl.where(ok & (block >= sinks), sortable(score, block), NEVER)
        tl.store(out + block, ranked, mask=block < n_blocks)
    for start in range((free + KEYS - 1) // KEYS * KEYS, n_blocks, KEYS):
        block = start + tl.arange(0, KEYS)
        tl.store(out + block, tl.full([KEYS], NEVER, tl.int64), mask=block < n_blocks)
