# mypy: ignore-errors
# ruff: noqa: N803
# (Triton's language has no types, and its constants are capitals.)
"""The best blocks of a tile without a sort: a threshold is found bit by bit in the scores, what lies above it is kept
in the order of the blocks, and of the blocks on it the first ones.

One program does one tile of one head and holds its row of scores, SPAN at most, in registers until the threshold is
known. What is kept is then written CHUNK blocks at a time, from scores read anew: places and addresses of a long row
would not fit beside it. Scores are the `ascending` numbers of scores.py.
"""

import triton.language as tl

import triton

from .scores import NEVER
from .steps import running, total


@triton.jit
def nth(x, n):
    """The n-th largest of x, n from 1: the largest number that at least n of x reach; NEVER if there are fewer."""
    found = n * 0
    for i in tl.static_range(32):
        # In unsigned order, so that each bit halves what is left: flipping the sign bit goes there and back.
        tried = found | (-(2**31) if i == 0 else 1 << (31 - i))
        reach = total((x >= (tried ^ -(2**31))).to(tl.int32), 0)
        found = tl.where(reach >= n, tried, found)
    return tl.where(n > 0, found ^ -(2**31), 2**31 - 1)


@triton.jit
def taken(x, n):
    """bool: the n largest of x, of equal ones the first."""
    edge = nth(x, n)
    above = x > edge
    level = (x == edge) & (n > 0)
    spare = n - total(above.to(tl.int32), 0)
    return above | (level & (running(level.to(tl.int32), 0) <= spare))


@triton.jit
def of_heads(scores, line, step, block, n_blocks, GROUP: tl.constexpr):
    """The largest that any of GROUP heads, whose rows of scores are `step` apart, gives each block."""
    x = tl.load(scores + line * n_blocks + block, mask=block < n_blocks, other=NEVER)
    for i in range(1, GROUP):
        x = tl.maximum(x, tl.load(scores + (line + i * step) * n_blocks + block, mask=block < n_blocks, other=NEVER))
    return x


@triton.jit(do_not_specialize=["n_tiles", "first_tile", "first_head", "n_heads", "n_blocks", "width", "sentinel"])
def best_kernel(
    scores, listed, order, best, n_tiles, first_tile, first_head, n_heads, n_blocks, width, sentinel,
    SPAN: tl.constexpr, SLOTS: tl.constexpr, CHUNK: tl.constexpr, GROUP: tl.constexpr, LISTED: tl.constexpr,
):  # fmt: skip
    """The `width` best blocks of a row of `scores [B, heads, tiles, n_blocks]`, ascending, and their scores. Where
    GROUP heads decide together, programs and outputs count those who decide, and scores have a row for every head.

    LISTED has a row's scores be of the blocks `listed [B, n_heads, n_tiles, n_blocks]`, which ascend."""
    t, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    step = tl.num_programs(0)
    line = (b.to(tl.int64) * tl.num_programs(1) + h) * GROUP * step + t
    x = of_heads(scores, line, step, tl.arange(0, SPAN), n_blocks, GROUP)
    n = tl.minimum(width, total((x != NEVER).to(tl.int32), 0))
    edge = nth(x, n)
    spare = n - total((x > edge).to(tl.int32), 0)  # blocks on the edge that are kept: the first ones
    cell = (b.to(tl.int64) * n_heads + first_head + h) * n_tiles + first_tile + t
    there = cell * width
    levels = n * 0  # blocks on the edge, and kept ones, of the chunks before
    kept = n * 0
    for start in tl.range(0, n_blocks, CHUNK, num_stages=1):
        block = start + tl.arange(0, CHUNK)
        score = of_heads(scores, line, step, block, n_blocks, GROUP)
        level = ((score == edge) & (n > 0)).to(tl.int32)
        keep = (score > edge) | ((level > 0) & (levels + running(level, 0) <= spare))
        place = there + kept + running(keep.to(tl.int32), 0) - 1
        if LISTED:
            block = tl.load(listed + cell * n_blocks + block, mask=keep, other=0)
        tl.store(order + place, block, mask=keep)
        tl.store(best + place, score, mask=keep)
        levels += total(level, 0)
        kept += total(keep.to(tl.int32), 0)
    slot = tl.arange(0, SLOTS)
    rest = (slot >= n) & (slot < width)
    tl.store(order + there + slot, tl.full([SLOTS], 0, tl.int32) + sentinel, mask=rest)
    tl.store(best + there + slot, tl.full([SLOTS], NEVER, tl.int32), mask=rest)


@triton.jit(do_not_specialize=["n_tiles", "n_blocks", "width", "room", "sinks"])
def keep_kernel(
    order, best, counts, plan, kept, n_tiles, n_blocks, width, room, sinks, SPAN: tl.constexpr, SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """kv_idx of one tile: the sinks, as many of the best as `counts [B, H, T]` leaves room for, and the tile's own
    blocks, which is already their order; then the sentinel, up to `room`. A tile that keeps more than `room` keeps all
    it sees, and the first of them are written."""
    t, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    entry = plan + (b * n_tiles + t) * 5
    rows, pos = tl.load(entry + 1), tl.load(entry + 3)
    there = rows > 0
    own = tl.where(there, pos // BLOCK, 0)
    seen = tl.where(there, (pos + rows + BLOCK - 1) // BLOCK, 0)
    first = tl.minimum(sinks, own)
    cell = (b.to(tl.int64) * tl.num_programs(1) + h) * n_tiles + t
    count = tl.load(counts + cell).to(tl.int32)
    n = tl.where(count > room, 0, tl.maximum(count - first - (seen - own), 0))
    at = tl.arange(0, SPAN)
    x = tl.load(best + cell * width + at, mask=at < width, other=NEVER)
    n = tl.minimum(n, total((x != NEVER).to(tl.int32), 0))
    keep = taken(x, n)
    kept += cell * room
    block = tl.load(order + cell * width + at, mask=keep, other=0)
    tl.store(kept + first + running(keep.to(tl.int32), 0) - 1, block, mask=keep)
    slot = tl.arange(0, SLOTS)
    forced = tl.where(slot < first, slot, own + slot - first - n)
    value = tl.where(count > room, slot, tl.where(slot < first + n + seen - own, forced, n_blocks))
    tl.store(kept + slot, value, mask=(slot < room) & ((slot < first) | (slot >= first + n)))


@triton.jit(do_not_specialize=["width"])
def nth_kernel(best, ranks, out, width, SPAN: tl.constexpr, RANKS: tl.constexpr):
    """The scores at RANKS ranks of one tile of one head, the best at rank 0; -inf behind the last."""
    cell = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, SPAN)
    x = tl.load(best + cell * width + at, mask=at < width, other=NEVER)
    for i in tl.static_range(RANKS):
        found = nth(x, tl.load(ranks + cell * RANKS + i).to(tl.int32) + 1)
        score = (found ^ ((found >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
        tl.store(out + cell * RANKS + i, tl.where(found == NEVER, -float("inf"), score))
