# mypy: ignore-errors
# ruff: noqa: N803, N806
# (Triton's language has no types, and its constants are capitals.)
"""Tile scores: how well a tile's rows match each block, reduced over the rows as they are computed.

A block is summarised by VECTORS vectors. The first stands for all keys that have no vector of their own and lies in
PLANES planes: its parts, or the two sides of a box. Each of the others is a key, in one plane. A row's score
of a block is the largest of its products with the vectors; its estimated mass, in units of the softmax, the sum of
their exponentials, of which the first vector's counts for all keys that it stands for.

Products are blocks by rows. The rows stay where they are and blocks stream past, one contiguous copy a turn, and a
block's maximum over the rows is taken inside a warp.
"""

import triton.language as tl

import triton

from .steps import larger, largest, largest_int, rows_of, sides_of, summary_of, total

# Below every score, even -inf: blocks that may not be ranked because the tile does not see them or must keep them.
NEVER = tl.constexpr(-(2**31))


@triton.jit
def ascending(score):
    """A score as an integer that is larger for larger scores. NaN counts as -inf, and -0 as 0."""
    score = tl.where(score == score, score, -float("inf"))
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def facing(q, at, real, q_n, q_d, SLICE: tl.constexpr, DIM: tl.constexpr, BOX: tl.constexpr, WIDE: tl.constexpr):
    """Rows as products take them, `[SLICE, ROWS]`: as they are, and what of them meets a box's low and high side."""
    x = rows_of(q, at, real, q_n, q_d, 0, SLICE, DIM, True, WIDE)
    if BOX:
        low, high = sides_of(x)
        return tl.trans(x), tl.trans(low), tl.trans(high)
    return tl.trans(x), tl.trans(x), tl.trans(x)


@triton.jit
def first_scores(low, high, summaries, block, plane, s, START: tl.constexpr, SLICE: tl.constexpr, WIDTH: tl.constexpr,
                 BOX: tl.constexpr, PLANES: tl.constexpr, SHIFT: tl.constexpr, PRECISION: tl.constexpr,
                 WIDE: tl.constexpr):  # fmt: skip
    """`s [KEYS, ROWS]` and the products with the first vector over SLICE columns."""
    new = tl.full(s.shape, 0.0, tl.float32)  # parts are added up by themselves
    for i in tl.static_range(PLANES):
        # The last plane holds the smallest parts: added up first, they are not lost beside the larger ones.
        y = summary_of(summaries + (PLANES - 1 - i) * plane, block, START, SLICE, WIDTH, WIDE)
        if SHIFT:
            new *= 2.0**-SHIFT
        if BOX and i == 0:
            new = tl.dot(y, low, new, input_precision=PRECISION)
        else:
            new = tl.dot(y, high, new, input_precision=PRECISION)
    if START:
        return s + new
    return new  # `s` is 0 before the first columns


@triton.jit
def block_scores(q, at, real, q_n, q_d, x, low, high, summaries, block, plane, vector: tl.constexpr,
                 KEYS: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, SLICE: tl.constexpr,
                 BOX: tl.constexpr, PLANES: tl.constexpr, SHIFT: tl.constexpr, PRECISION: tl.constexpr,
                 WIDE: tl.constexpr):  # fmt: skip
    """Products `[KEYS, ROWS]` with one of the blocks' vectors. Rows that do not fit into registers whole are read anew,
    SLICE columns at a time."""
    s = tl.full([KEYS, ROWS], 0.0, tl.float32)
    stride_d = tl.cast(q_d, tl.int64)
    for c in tl.static_range(0, DIM, SLICE):
        if SLICE < WIDTH:
            x, low, high = facing(q + c * stride_d, at, real, q_n, q_d, SLICE, DIM - c, BOX, WIDE)
        if vector == 0:
            s = first_scores(low, high, summaries, block, plane, s, c, SLICE, WIDTH, BOX, PLANES, SHIFT, PRECISION,
                             WIDE)  # fmt: skip
        else:  # a key as it is
            y = summary_of(summaries + (PLANES - 1 + vector) * plane, block, c, SLICE, WIDTH, WIDE)
            s = tl.dot(y, x, s, input_precision=PRECISION)
    return s


@triton.jit
def reduced(s, KEYS: tl.constexpr, RUNS: tl.constexpr, TILES: tl.constexpr, MEAN: tl.constexpr):
    """`s [KEYS, ROWS]` over the rows: one number a block, or `[KEYS, TILES]` where the rows are several tiles'.

    Of these the first rows of all tiles come first, then the second ones: a thread then holds all rows of a tile.
    """
    if TILES > 1:
        s = tl.reshape(s, [KEYS, RUNS, TILES])
    return total(s, 1) if MEAN else largest(s, 1)


@triton.jit
def norms_of(sums, at, real, MASS: tl.constexpr, SOFTMAX: tl.constexpr):
    """What the sums kernel wrote of the rows: the largest logit and one over the mass, or the log-sum-exp."""
    top, share = at, at  # not read
    if MASS:
        top = tl.load(sums + 2 * at, mask=real, other=0.0)
        share = tl.load(sums + 2 * at + 1, mask=real, other=0.0)
    if SOFTMAX:
        top = tl.load(sums + at, mask=real, other=0.0)
    return top, share


@triton.jit
def turn_scores(q, at, real, q_n, q_d, x, low, high, top, share, summaries, block, plane, start, scale,
                KEYS: tl.constexpr, ROWS: tl.constexpr, RUNS: tl.constexpr, TILES: tl.constexpr, BLOCK: tl.constexpr,
                DIM: tl.constexpr, WIDTH: tl.constexpr, SLICE: tl.constexpr, BOX: tl.constexpr, MASS: tl.constexpr,
                SOFTMAX: tl.constexpr, MEAN: tl.constexpr, VECTORS: tl.constexpr, PLANES: tl.constexpr,
                SHIFT: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr):  # fmt: skip
    """The scores of one turn's blocks, whichever they are: the largest over the rows, or their sum."""
    s = tl.full([KEYS, ROWS], 0.0, tl.float32)
    spots = at
    if VECTORS > 1 and SLICE < WIDTH:
        # 0 more, which the compiler does not see: it would keep the rows in registers, for which it needs a stack,
        # instead of reading them anew.
        spots = at + tl.minimum(start, 0)
    for vector in tl.static_range(VECTORS):
        one = block_scores(q, spots, real, q_n, q_d, x, low, high, summaries, block, plane, vector, KEYS, ROWS, DIM,
                           WIDTH, SLICE, BOX, PLANES, SHIFT, PRECISION, WIDE)  # fmt: skip
        if MASS:  # relative to the row's largest logit, which only infinities exceed: these then share; NaN stays
            one = tl.exp2(tl.minimum(one * scale - top[None, :], 0.0, propagate_nan=tl.PropagateNan.ALL))
            s = one if vector == 0 else s * ((BLOCK - VECTORS + 1.0) if vector == 1 else 1.0) + one
        else:
            s = one if vector == 0 else larger(one, s)
    if MASS:
        # Of one vector all keys of a block have the mass, which is then a matter of the row.
        s = larger(s, 0.0) * (share * BLOCK if VECTORS == 1 else share)[None, :]  # NaN becomes 0
    elif SOFTMAX:
        s = s * scale - top[None, :]
    if MEAN and not MASS:  # whose shares of rows that are not there are 0
        s = tl.where(real[None, :], s, 0.0)
    score = reduced(s, KEYS, RUNS, TILES, MEAN)
    if SOFTMAX:  # the share of an infinite score is 1, or what is left of it among several
        score = tl.minimum(score, 0.0, propagate_nan=tl.PropagateNan.ALL)
    if not (MASS or SOFTMAX):  # once a block instead of once a row: the sign of `scale` is positive
        score *= scale
    return score


@triton.jit
def write(out, score, place, there, ranked, rows, part, PARTS: tl.constexpr, MEAN: tl.constexpr):
    """Writes one tile's scores by one of PARTS parts of its rows. The last part makes `ascending` numbers of what all
    came to; the ones before leave theirs as they are, for it to read."""
    if PARTS > 1 and part > 0:
        before = tl.load(out + place, mask=there, other=0).to(tl.float32, bitcast=True)
        score = score + before if MEAN else tl.maximum(score, before)
    number = score.to(tl.int32, bitcast=True)
    if part == PARTS - 1:
        if MEAN:
            score = tl.div_rn(score, tl.maximum(rows, 1).to(tl.float32))
        number = tl.where(ranked, ascending(score), NEVER)
    tl.store(out + place, number, mask=there)


@triton.jit(
    do_not_specialize=["n_tiles", "first_pack", "first_tile", "first_head", "n_heads", "some_tiles", "q_len",
                       "n_blocks", "n_slots", "sinks"]
)  # fmt: skip
def scores_kernel(
    q, summaries, plan, packs, sums, out, q_b, q_h, q_n, q_d, n_tiles, first_pack, first_tile, first_head, n_heads,
    some_tiles, q_len, group, n_blocks, n_slots, sinks, scale,
    RUNS: tl.constexpr, TILES: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    DIM: tl.constexpr, WIDTH: tl.constexpr, SLICE: tl.constexpr, BOX: tl.constexpr, MASS: tl.constexpr,
    SOFTMAX: tl.constexpr, MEAN: tl.constexpr, VECTORS: tl.constexpr, PLANES: tl.constexpr, SHIFT: tl.constexpr,
    PRECISION: tl.constexpr, WIDE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One program does one head of one of the `packs [n, 3]`: batch row, first tile, and how many tiles.

    It writes one `ascending` number per block into `[B, heads, some_tiles, n_blocks]`; no score of a single row ever
    leaves it. A tile has RUNS rows, of which `plan` says how many are real. Where they are few, as means of runs of
    rows are, TILES tiles that follow each other in a sequence see the blocks together, and ROWS is TILES * RUNS.
    Otherwise a pack is a tile, of which ROWS rows at a time see all blocks. Blocks come KEYS a turn.

    MASS turns a row's scores into shares of its mass before they are reduced, SOFTMAX into logs of shares of what its
    scores' exponentials add up to, both by what the sums kernel wrote.
    """
    PARTS: tl.constexpr = (TILES * RUNS + ROWS - 1) // ROWS
    entry = packs + (first_pack + tl.program_id(0)) * 3
    b, tile, n_here = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
    h = first_head + tl.program_id(1)
    entry = plan + (b * n_tiles + tile) * 5
    row, slot = tl.load(entry), tl.load(entry + 4)
    q += b.to(tl.int64) * q_b + h.to(tl.int64) * q_h + row.to(tl.int64) * q_n
    plane = n_slots.to(tl.int64) * WIDTH
    summaries += (h // group).to(tl.int64) * (PLANES + VECTORS - 1) * plane + slot.to(tl.int64) * WIDTH
    if MASS:
        sums += ((b.to(tl.int64) * n_heads + h) * q_len + row) * 2
    if SOFTMAX:
        sums += (b.to(tl.int64) * n_heads + h) * q_len + row
    line = (b.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * some_tiles + tile - first_tile
    out += line * n_blocks
    if TILES > 1:
        each = tl.arange(0, TILES)
        here = each < n_here
        rows = tl.load(entry + each * 5 + 1, mask=here, other=0)
        # The first block that overlaps a tile's rows: from there on blocks are forced or not visible.
        free = tl.load(entry + each * 5 + 2, mask=here, other=0)
        last = largest_int(free, 0)
        places = each[None, :] * n_blocks  # a pack is a few tiles: 32 bits do
        ends = tl.where(here, n_blocks, 0)[None, :]
    else:
        rows = tl.load(entry + 1)
        free = tl.load(entry + 2)
        last = free
    for part in range(PARTS):
        place = part * ROWS + tl.arange(0, ROWS)
        nth = place // TILES  # of its tile's rows
        there = rows
        if TILES > 1:
            there = tl.load(entry + place % TILES * 5 + 1, mask=place % TILES < n_here, other=0)
        if not MEAN:  # in the place of rows that are not there the last one again: no maximum changes or needs a mask
            nth = tl.minimum(nth, tl.maximum(there, 1) - 1)
        real = nth < there
        at = place % TILES * RUNS + nth
        x, low, high = facing(q, at, real, q_n, q_d, SLICE, DIM, BOX, WIDE)
        top, share = norms_of(sums, at, real, MASS, SOFTMAX)
        for start in tl.range(0, last, KEYS, num_stages=STAGES):
            block = start + tl.arange(0, KEYS)
            score = turn_scores(q, at, real, q_n, q_d, x, low, high, top, share, summaries, block, plane, start, scale,
                                KEYS, ROWS, RUNS, TILES, BLOCK, DIM, WIDTH, SLICE, BOX, MASS, SOFTMAX, MEAN, VECTORS,
                                PLANES, SHIFT, PRECISION, WIDE)  # fmt: skip
            if TILES > 1:
                if MEAN:
                    score = tl.div_rn(score, tl.broadcast_to(tl.maximum(rows, 1).to(tl.float32)[None, :], score.shape))
                ranked = (block >= sinks)[:, None] & (block[:, None] < free[None, :])
                ranked = tl.where(ranked, ascending(score), NEVER)
                tl.store(out + (places + block[:, None]), ranked, mask=block[:, None] < ends)
            else:
                ranked = (block >= sinks) & (block < free)
                write(out, score, block, block < n_blocks, ranked, rows, part, PARTS, MEAN)
        if PARTS > 1 and not WIDE:
            tl.debug_barrier()  # the next rows read what these wrote
    for start in range((last + KEYS - 1) // KEYS * KEYS, n_blocks, KEYS):
        block = start + tl.arange(0, KEYS)
        if TILES > 1:
            never = tl.full([KEYS, TILES], NEVER, tl.int32)
            tl.store(out + (places + block[:, None]), never, mask=block[:, None] < ends)
        else:
            tl.store(out + block, tl.full([KEYS], NEVER, tl.int32), mask=block < n_blocks)
