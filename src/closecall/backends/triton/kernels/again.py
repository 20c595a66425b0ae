# mypy: ignore-errors
# ruff: noqa: N803, N806
# (Triton's language has no types, and its constants are capitals.)
"""Scores of candidates: what every row of a tile thinks of the blocks that its means and outlying rows liked best."""

import triton.language as tl

import triton

from .scores import NEVER, facing, norms_of, turn_scores, write
from .steps import count_listed, list_of


@triton.jit(
    do_not_specialize=["n_tiles", "first_pack", "first_tile", "first_head", "n_heads", "some_tiles", "q_len",
                       "together", "n_listed", "n_slots", "sinks"]
)  # fmt: skip
def again_kernel(
    q, summaries, plan, packs, sums, listed, out, q_b, q_h, q_n, q_d, n_tiles, first_pack, first_tile, first_head,
    n_heads, some_tiles, q_len, group, together, n_listed, n_slots, sinks, scale,
    RUNS: tl.constexpr, TILES: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    DIM: tl.constexpr, WIDTH: tl.constexpr, SLICE: tl.constexpr, BOX: tl.constexpr, MASS: tl.constexpr,
    SOFTMAX: tl.constexpr, MEAN: tl.constexpr, VECTORS: tl.constexpr, PLANES: tl.constexpr, SHIFT: tl.constexpr,
    PRECISION: tl.constexpr, WIDE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The scores kernel of one tile (a pack of TILES = 1) over nothing but `listed [B, H, n_tiles, n_listed]`, a list
    for every `together` heads. It writes one `ascending` number per candidate into `[B, heads, some_tiles, n_listed]`,
    NEVER behind the last.

    Candidates come KEYS a turn, gathered by their indices. These are looked up one turn ahead: looked up in their own
    turn they would hold up its copies. They are not masked: behind a list there is memory, two turns of it.
    """
    PARTS: tl.constexpr = (RUNS + ROWS - 1) // ROWS
    entry = packs + (first_pack + tl.program_id(0)) * 3
    b, tile = tl.load(entry), tl.load(entry + 1)
    h = first_head + tl.program_id(1)
    entry = plan + (b * n_tiles + tile) * 5
    row, rows, own, slot = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 4)
    q += b.to(tl.int64) * q_b + h.to(tl.int64) * q_h + row.to(tl.int64) * q_n
    plane = n_slots.to(tl.int64) * WIDTH
    summaries += (h // group).to(tl.int64) * (PLANES + VECTORS - 1) * plane + slot.to(tl.int64) * WIDTH
    sums += ((b.to(tl.int64) * n_heads + h) * q_len + row) * (2 if MASS else 1)
    listed = list_of(listed, b, h, tile, n_heads, n_tiles, together, n_listed)
    count = count_listed(own, sinks, n_listed)
    line = (b.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * some_tiles + tile - first_tile
    out += line * n_listed
    piece = tl.arange(0, KEYS)
    for part in range(PARTS):
        at = part * ROWS + tl.arange(0, ROWS)
        if not MEAN:  # in the place of rows that are not there the last one again, as in scores.py
            at = tl.minimum(at, tl.maximum(rows, 1) - 1)
        real = at < rows
        x, low, high = facing(q, at, real, q_n, q_d, SLICE, DIM, BOX, WIDE)
        top, share = norms_of(sums, at, real, MASS, SOFTMAX)
        coming = tl.load(listed + piece)
        for start in tl.range(0, count, KEYS, num_stages=STAGES):
            block = tl.minimum(coming, own)  # what stands behind the last candidate becomes a block that is there
            coming = tl.load(listed + (start + KEYS) + piece)
            score = turn_scores(q, at, real, q_n, q_d, x, low, high, top, share, summaries, block, plane, start, scale,
                                KEYS, ROWS, RUNS, TILES, BLOCK, DIM, WIDTH, SLICE, BOX, MASS, SOFTMAX, MEAN, VECTORS,
                                PLANES, SHIFT, PRECISION, WIDE)  # fmt: skip
            place = start + piece
            write(out, score, place, place < n_listed, place < count, rows, part, PARTS, MEAN)
        if PARTS > 1 and not WIDE:
            tl.debug_barrier()  # the next rows read what these wrote
    for start in range((count + KEYS - 1) // KEYS * KEYS, n_listed, KEYS):
        place = start + piece
        tl.store(out + place, tl.full([KEYS], NEVER, tl.int32), mask=place < n_listed)
