# mypy: ignore-errors
# ruff: noqa: N803, N806
# (Triton's language has no types, and its constants are capitals.)
"""What each row's estimated masses, or its scores' exponentials, add up to: what row-normalised scores are divided by.

Rows that fit into registers stay there while blocks stream past, a turn's copies on their way beside the one before
it. Longer ones are read anew, SLICE columns at a time. There, masses of vectors that are all of one kind are added up
in one loop: with the first taken out of it, as a box beside keys must be, some variants have no registers left.
"""

import triton.language as tl

import triton

from .steps import (
    HUGE,
    LARGEST,
    LN_2,
    LOG2_E,
    LOWEST,
    count_listed,
    larger,
    largest,
    largest_int,
    list_of,
    rows_of,
    sides_of,
    summary_of,
    total,
)


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
            low, high = sides_of(x)
            s = tl.dot(high if i else low, tl.trans(y), s, input_precision=PRECISION)
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
    """The largest over the vectors; a NaN has no say."""
    s = row_scores(q, at, real, q_n, q_d, summary, block, ok, plane, ROWS, KEYS, DIM, WIDTH, SLICE, BOX, PLANES, SHIFT,
                   PRECISION, WIDE)  # fmt: skip
    for vector in range(1, VECTORS):
        one = key_scores(q, at, real, q_n, q_d, summary, vector, block, ok, plane, ROWS, KEYS, DIM, WIDTH, SLICE,
                         PLANES, PRECISION, WIDE)  # fmt: skip
        s = larger(one, s)
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
def whole_scores(x, low, high, summaries, block, plane, vector: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
                 WIDTH: tl.constexpr, BOX: tl.constexpr, PLANES: tl.constexpr, SHIFT: tl.constexpr,
                 PRECISION: tl.constexpr, WIDE: tl.constexpr):  # fmt: skip
    """Products `[ROWS, KEYS]` of whole rows, or of what meets a box's sides, with one of the blocks' vectors."""
    s = tl.full([ROWS, KEYS], 0.0, tl.float32)
    if vector > 0:  # a key as it is
        y = summary_of(summaries + (PLANES - 1 + vector) * plane, block, 0, WIDTH, WIDTH, WIDE)
        return tl.dot(x, tl.trans(y), s, input_precision=PRECISION)
    for i in tl.static_range(PLANES):  # the smallest parts first, as above
        y = summary_of(summaries + (PLANES - 1 - i) * plane, block, 0, WIDTH, WIDTH, WIDE)
        if SHIFT:
            s *= 2.0**-SHIFT
        if BOX and i == 0:
            s = tl.dot(low, tl.trans(y), s, input_precision=PRECISION)
        else:
            s = tl.dot(high, tl.trans(y), s, input_precision=PRECISION)
    return s


@triton.jit
def named(listed, place, found):
    """The blocks at those places of a list of `found`."""
    return tl.load(listed + place, mask=(place >= 0) & (place < found), other=0)


@triton.jit
def seen(place, listed, nth, near, found, SOFTMAX: tl.constexpr):
    """The nth blocks of a tile that sees sinks, those `listed`, which have `place`s in a list of `found`, and its own,
    from `near` on. Without SOFTMAX, of the list alone."""
    if SOFTMAX:
        listed = tl.where(place < 0, nth, tl.where(place < found, listed, near + place - found))
    return listed


@triton.jit
def keys_behind(vector, BLOCK: tl.constexpr, VECTORS: tl.constexpr):
    """How many keys of a whole block a vector stands for; only whole blocks are ever ranked."""
    return tl.where(vector == 0, BLOCK - VECTORS + 1.0, 1.0)


@triton.jit
def added(s, ok, top, mass, keys, scale, most, UNIT: tl.constexpr):
    """An online sum, in the largest logit and the mass relative to it, with products that count for `keys` keys each
    where they are `ok`.

    Times `scale` they are logits, and these times UNIT in base 2. NaN counts for nothing, infinity as `most`.
    """
    s = tl.where(ok, larger(s, -float("inf")), -float("inf"))
    higher = tl.maximum(top, tl.minimum(largest(s, 1) * scale, most))
    found = total(tl.exp2(tl.minimum(s * scale - higher[:, None], 0.0) * UNIT), 1) * keys
    return higher, mass * tl.exp2((top - higher) * UNIT) + found


@triton.jit(do_not_specialize=["n_tiles", "q_len", "n_slots", "sinks", "together", "n_listed"])
def sums_kernel(
    q, summaries, plan, packs, forced, sums, listed, q_b, q_h, q_n, q_d, n_tiles, q_len, group, n_slots, sinks,
    together, n_listed, scale,
    RUNS: tl.constexpr, TILES: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    DIM: tl.constexpr, WIDTH: tl.constexpr, SLICE: tl.constexpr, BOX: tl.constexpr, SOFTMAX: tl.constexpr,
    VECTORS: tl.constexpr, PLANES: tl.constexpr, SHIFT: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr,
    LISTED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """What each row's masses add up to: one program does ROWS rows of one head, of one tile or of a pack (scores.py).

    `forced [B, H, q_len]` is the log-sum-exp over the row's forced blocks; those that may be ranked are estimated.
    `scale` makes logits in base 2. Written are, to `sums [B, H, q_len, 2]`, the largest logit and one over the sum of
    the masses relative to it, which is 0 for a row whose forced mass is not a number: it has no say.

    SOFTMAX adds up the exponentials of the scores of all blocks that the tile sees instead, and reads nothing of
    `forced`. `scale` is then the plain one, and `sums [B, H, q_len]` gets the log-sum-exp, 0 if there is nothing to add
    up. Not in base 2, so that infinite scores become float32's largest number, as in the reference.

    LISTED lets a tile see no blocks but the forced ones and those `listed`, as in again.py. A pack is then a tile.
    """
    PARTS: tl.constexpr = (TILES * RUNS + ROWS - 1) // ROWS
    APART: tl.constexpr = 1 if BOX and VECTORS > 1 else 0
    pack = tl.num_programs(0) // PARTS - 1 - tl.program_id(0) // PARTS  # later tiles see more and start first
    part = tl.program_id(0) % PARTS
    b, tile, n_here = tl.load(packs + pack * 3), tl.load(packs + pack * 3 + 1), tl.load(packs + pack * 3 + 2)
    h = tl.program_id(1)
    entry = plan + (b * n_tiles + tile) * 5
    row, slot = tl.load(entry), tl.load(entry + 4)
    at = part * ROWS + tl.arange(0, ROWS)
    # Blocks that count: those before the tile's own, which are forced, or all that it sees.
    if TILES > 1:
        mine = at // RUNS
        real = at % RUNS < tl.load(entry + mine * 5 + 1, mask=mine < n_here, other=0)
        ends = tl.load(entry + mine * 5 + (3 if SOFTMAX else 2), mask=mine < n_here, other=0)
        stop = largest_int(ends, 0)
    else:
        rows = tl.load(entry + 1)
        if part * ROWS >= rows:
            return
        real = at < rows
        stop = tl.load(entry + (3 if SOFTMAX else 2))
    q += b.to(tl.int64) * q_b + h.to(tl.int64) * q_h + row.to(tl.int64) * q_n
    plane = n_slots.to(tl.int64) * WIDTH
    summaries += (h // group).to(tl.int64) * (PLANES + VECTORS - 1) * plane + slot.to(tl.int64) * WIDTH
    ahead = 0  # blocks before those listed
    if LISTED:
        near = tl.load(entry + 2)  # the first of the tile's own blocks
        found = count_listed(near, sinks, n_listed)
        listed = list_of(listed, b, h, tile, tl.num_programs(1), n_tiles, together, n_listed)
        if SOFTMAX:
            ahead = tl.minimum(sinks, near)
            stop += ahead + found - near
        else:
            stop = found
    line = (b.to(tl.int64) * tl.num_programs(1) + h) * q_len + row + at
    if SOFTMAX:
        top = tl.full([ROWS], -LARGEST, tl.float32)
        mass = tl.full([ROWS], 0.0, tl.float32)
    else:
        own = tl.load(forced + line, mask=real, other=0.0) * LOG2_E
        known = own == own
        own = tl.where(known, own, -float("inf"))
        top = tl.maximum(own, LOWEST)
        mass = tl.exp2(own - top)
    first = 0 if SOFTMAX or LISTED else sinks
    piece = tl.arange(0, KEYS)
    if SLICE == WIDTH:
        x = rows_of(q, at, real, q_n, q_d, 0, WIDTH, DIM, True, WIDE)
        low, high = x, x
        if BOX:
            low, high = sides_of(x)
        coming = piece
        if LISTED:  # looked up one turn ahead: in its own turn an index would hold up the copies
            coming = named(listed, piece - ahead, found)
        for start in tl.range(first, stop, KEYS, num_stages=STAGES):
            block = start + piece
            counts = (block < stop)[None, :]
            if LISTED:
                block = seen(block - ahead, coming, block, near, found, SOFTMAX)
                coming = named(listed, start + KEYS + piece - ahead, found)
            if TILES > 1:
                counts = counts & (block[None, :] < ends[:, None])
            s = whole_scores(x, low, high, summaries, block, plane, 0, ROWS, KEYS, WIDTH, BOX, PLANES, SHIFT, PRECISION,
                             WIDE)  # fmt: skip
            if not SOFTMAX:
                top, mass = added(s, counts, top, mass, BLOCK - VECTORS + 1.0, scale, HUGE, 1.0)
            for vector in tl.static_range(1, VECTORS):
                one = whole_scores(x, low, high, summaries, block, plane, vector, ROWS, KEYS, WIDTH, BOX, PLANES, SHIFT,
                                   PRECISION, WIDE)  # fmt: skip
                if SOFTMAX:
                    s = larger(one, s)
                else:
                    top, mass = added(one, counts, top, mass, 1.0, scale, HUGE, 1.0)
            if SOFTMAX:
                top, mass = added(s, counts, top, mass, 1.0, scale, LARGEST, LOG2_E)
    else:
        for start in range(first, stop, KEYS):
            block = start + piece
            ok = block < stop
            if LISTED:
                place = block - ahead
                block = seen(place, named(listed, place, found), block, near, found, SOFTMAX)
            counts = ok[None, :]
            if TILES > 1:
                counts = counts & (block[None, :] < ends[:, None])
            if SOFTMAX:
                s = best_scores(q, at, real, q_n, q_d, summaries, block, ok, plane, ROWS, KEYS, DIM, WIDTH, SLICE, BOX,
                                VECTORS, PLANES, SHIFT, PRECISION, WIDE)  # fmt: skip
                top, mass = added(s, counts, top, mass, 1.0, scale, LARGEST, LOG2_E)
            else:
                if APART:
                    s = row_scores(q, at, real, q_n, q_d, summaries, block, ok, plane, ROWS, KEYS, DIM, WIDTH, SLICE,
                                   BOX, PLANES, SHIFT, PRECISION, WIDE)  # fmt: skip
                    top, mass = added(s, counts, top, mass, BLOCK - VECTORS + 1.0, scale, HUGE, 1.0)
                for vector in range(APART, VECTORS):
                    s = nth_scores(q, at, real, q_n, q_d, summaries, vector, block, ok, plane, ROWS, KEYS, DIM, WIDTH,
                                   SLICE, BOX, APART, PLANES, SHIFT, PRECISION, WIDE)  # fmt: skip
                    top, mass = added(s, counts, top, mass, keys_behind(vector, BLOCK, VECTORS), scale, HUGE, 1.0)
    if SOFTMAX:
        tl.store(sums + line, tl.where(mass > 0.0, top + tl.log2(mass) * LN_2, 0.0), mask=real)
    else:
        tl.store(sums + 2 * line, top, mask=real)
        tl.store(sums + 2 * line + 1, tl.where(known & (mass > 0.0), 1.0 / mass, 0.0), mask=real)
