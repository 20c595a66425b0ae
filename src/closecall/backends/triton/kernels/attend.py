# mypy: ignore-errors
# ruff: noqa: N803, N806
# (Triton's language has no types, and its constants are capitals.)
"""Exact attention of a tile's rows over its kept blocks."""

import triton.language as tl

import triton

from .steps import (
    LN_2,
    LOWEST,
    bounded,
    box_of,
    nothing_yet,
    on_page,
    rows_of,
    settle,
    sliced,
    soften,
    weighed,
    weighed_boxes,
)


@triton.jit(do_not_specialize=["n_tiles", "q_len", "width"])
def attend_kernel(
    q, k, v, k_box, v_box, out, lse, kept, counts, ordinals, plan, table,
    q_b, q_h, q_n, q_d, k_b, k_h, k_n, k_d, v_b, v_h, v_n, v_d, out_h, out_n,
    kept_b, kept_h, kept_t, counts_b, counts_h, counts_t, n_tiles, q_len, group, width, inner, outer,
    TILE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr,
    HEAD: tl.constexpr, TAIL: tl.constexpr, V_DIM: tl.constexpr, V_PART: tl.constexpr, V_PARTS: tl.constexpr,
    V_TAIL: tl.constexpr, LISTED: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr,
    STAGES: tl.constexpr, SLICE: tl.constexpr, HEADS: tl.constexpr, PAGED: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """One program does ROWS rows of one tile: of one head, or ROWS // HEADS of each of HEADS heads that read one key
    head and keep the same blocks. Keys and values are then loaded once for all of them. (Where the heads of a key head
    are no multiple of HEADS, the last program has rows to spare.)

    PAGED is how many blocks a page holds: then block i of a sequence lies on page `table[i // PAGED]`, and k_b and v_b
    are from page to page. 0 means that a sequence's keys follow each other.

    TMA has the first loop's keys and values brought by the copy engine, a box of KEYS rows each: k_box and v_box are
    descriptors of `k [B, H, N, D]` and of `v`. They are not read otherwise.

    Kept blocks ascend, so those that even the first row sees whole come first. The first loop runs over them, without a
    mask or a branch, and with the next block known one turn ahead: that is what lets the compiler overlap its copies
    with its products. The second runs over the few blocks that cross the rows' own positions. A count beyond `width`,
    what a list of kept blocks holds, means every block: then the list is `ordinals`, 0, 1, ...
    """
    SPAN: tl.constexpr = ROWS // HEADS
    PARTS: tl.constexpr = (TILE + SPAN - 1) // SPAN
    PIECES: tl.constexpr = (BLOCK + KEYS - 1) // KEYS
    # The second loop holds masks too: smaller steps keep it in registers.
    NEAR: tl.constexpr = 16 if KEYS < 32 or V_PART * V_PARTS > 128 else 32
    STEPS: tl.constexpr = (BLOCK + NEAR - 1) // NEAR
    # Later tiles see more and start first, so that the device does not wait for them at the end.
    tile = n_tiles - 1 - tl.program_id(0) // PARTS
    part = tl.program_id(0) % PARTS
    n_heads = tl.num_programs(1)
    h = tl.program_id(1)  # the first head, if there are several
    if HEADS > 1:
        lots = (group + HEADS - 1) // HEADS
        n_heads = n_heads // lots * group
        left = group - h % lots * HEADS
        h = h // lots * group + h % lots * HEADS
    b = tl.program_id(2)
    entry = plan + (b * n_tiles + tile) * 5
    row, rows, key, pos = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)
    if part * SPAN >= rows:  # a tile that does not exist, or that ends before this part of it
        return

    if HEADS > 1:
        at = part * SPAN + tl.arange(0, ROWS) % SPAN
        mate = tl.arange(0, ROWS) // SPAN  # whose row it is: counted from the first head
        real = (at < rows) & (mate < left)
        q_at, q_step = mate.to(tl.int64) * q_h + at.to(tl.int64) * q_n, 1
    else:
        at = part * ROWS + tl.arange(0, ROWS)
        real = at < rows
        q_at, q_step = at, q_n
    mine = pos + at  # positions among the sequence's keys
    first = pos + part * SPAN
    q += b.to(tl.int64) * q_b + h.to(tl.int64) * q_h + row.to(tl.int64) * q_n
    if PAGED:
        table += key // (BLOCK * PAGED)
        k += (h // group).to(tl.int64) * k_h
        v += (h // group).to(tl.int64) * v_h
    else:
        k += b.to(tl.int64) * k_b + (h // group).to(tl.int64) * k_h + key.to(tl.int64) * k_n
        v += b.to(tl.int64) * v_b + (h // group).to(tl.int64) * v_h + key.to(tl.int64) * v_n
    if SLICE == 0:
        q0 = rows_of(q, q_at, real, q_step, q_d, 0, HEAD, DIM, True, WIDE)
    if SLICE == 0 and TAIL:
        q1 = rows_of(q, q_at, real, q_step, q_d, HEAD, TAIL, DIM, True, WIDE)

    # How many kept blocks there are, and how many of them the first row sees whole.
    whole = 0
    if LISTED:
        kept += b.to(tl.int64) * kept_b + h.to(tl.int64) * kept_h + tile.to(tl.int64) * kept_t
        count = tl.load(counts + b.to(tl.int64) * counts_b + h.to(tl.int64) * counts_h + tile.to(tl.int64) * counts_t)
        if count > width:
            kept = ordinals
        if BLOCK % KEYS == 0:
            whole = count
            if count > 0:  # at most as many cross the tile's rows as the tile has blocks of its own
                for _ in range((TILE + BLOCK - 2) // BLOCK + 1):
                    last = tl.load(kept + tl.maximum(whole - 1, 0))
                    whole -= ((whole > 0) & ((last + 1) * BLOCK > first + 1)).to(tl.int32)
    else:
        count = (pos + rows + BLOCK - 1) // BLOCK
        if BLOCK % KEYS == 0:
            whole = (first + 1) // BLOCK

    top = tl.full([ROWS], LOWEST, tl.float32)
    mass = tl.full([ROWS], 0.0, tl.float32)
    acc = nothing_yet(ROWS, V_PART, V_PARTS, V_TAIL)
    piece = tl.arange(0, KEYS)

    # The next block is looked up one turn ahead. Looked up in its own turn it would hold up every copy of that turn:
    # the compiler then gives keys and values no turn of their own to arrive in.
    # A page is looked up one turn ahead as well, and so its block two turns.
    coming = 0
    if LISTED:
        coming = tl.load(kept, mask=whole > 0, other=0)
    if PAGED:
        spot = (coming % PAGED) * BLOCK  # of the block's keys on its page
        page = tl.load(table + coming // PAGED, mask=whole > 0, other=0)
        if LISTED:
            coming = tl.load(kept + tl.minimum(1 // PIECES, whole - 1), mask=whole > 0, other=0)
    for i in tl.range(0, whole * PIECES, num_stages=STAGES):
        if PAGED:
            start = spot + (i % PIECES) * KEYS
            here, there = on_page(k, page, k_b), on_page(v, page, v_b)
            if not LISTED:
                coming = tl.minimum((i + 1) // PIECES, whole - 1)
            # The block itself must not be handed on to the turn after: what is handed on twice ends pipelining.
            spot = (coming % PAGED) * BLOCK
            page = tl.load(table + coming // PAGED)
            if LISTED:
                coming = tl.load(kept + tl.minimum((i + 2) // PIECES, whole - 1))
        else:
            here, there = k, v
            if LISTED:
                start = coming * BLOCK + (i % PIECES) * KEYS
                coming = tl.load(kept + tl.minimum((i + 1) // PIECES, whole - 1))
            else:
                start = i * KEYS
        here += start.to(tl.int64) * k_n
        if SLICE:
            s = sliced(q, q_at, real, q_step, q_d, here, piece, piece, k_n, k_d, ROWS, KEYS, DIM, SLICE, False,
                       PRECISION, WIDE)  # fmt: skip
        else:
            if TMA:
                k0 = box_of(k_box, b, h // group, key + start, 0, KEYS, HEAD, WIDE)
            else:
                k0 = rows_of(here, piece, piece, k_n, k_d, 0, HEAD, DIM, False, WIDE)
            s = tl.dot(q0, tl.trans(k0), input_precision=PRECISION)
            if TAIL:
                k1 = rows_of(here, piece, piece, k_n, k_d, HEAD, TAIL, DIM, False, WIDE)
                s = tl.dot(q1, tl.trans(k1), s, input_precision=PRECISION)
        weights, top, mass, shrink = soften(bounded(s, inner, outer, SOFTCAP), top, mass)
        if TMA:
            acc = weighed_boxes(weights, v_box, b, h // group, key + start, acc, shrink, KEYS, V_PART, V_PARTS,
                                PRECISION, WIDE)  # fmt: skip
        else:
            there += start.to(tl.int64) * v_n
            acc = weighed(weights, there, piece, piece, v_n, v_d, acc, shrink, weights, V_DIM, V_PART, V_PARTS, V_TAIL,
                          False, PRECISION, WIDE)  # fmt: skip

    end = pos + rows
    step = tl.arange(0, NEAR)
    for i in tl.range(whole * STEPS, count * STEPS, num_stages=1):
        within = (i % STEPS) * NEAR + step
        near = i // STEPS
        if LISTED:
            near = tl.load(kept + near)
        there = near * BLOCK + within  # their positions; `place` is where they lie from `keys` and `values` on
        ok = (there < end) & (within < BLOCK)
        keys, values, place = k, v, there
        if PAGED:
            sheet = tl.load(table + near // PAGED)
            keys, values, place = on_page(k, sheet, k_b), on_page(v, sheet, v_b), (near % PAGED) * BLOCK + within
        if SLICE:
            s = sliced(q, q_at, real, q_step, q_d, keys, place, ok, k_n, k_d, ROWS, NEAR, DIM, SLICE, True, PRECISION,
                       WIDE)  # fmt: skip
        else:
            k0 = rows_of(keys, place, ok, k_n, k_d, 0, HEAD, DIM, True, WIDE)
            s = tl.dot(q0, tl.trans(k0), input_precision=PRECISION)
            if TAIL:
                k1 = rows_of(keys, place, ok, k_n, k_d, HEAD, TAIL, DIM, True, WIDE)
                s = tl.dot(q1, tl.trans(k1), s, input_precision=PRECISION)
        sees = (there[None, :] <= mine[:, None]) & ok[None, :]
        s = tl.where(sees, bounded(s, inner, outer, SOFTCAP), -float("inf"))
        weights, top, mass, shrink = soften(s, top, mass)
        acc = weighed(weights, values, place, ok, v_n, v_d, acc, shrink, sees, V_DIM, V_PART, V_PARTS, V_TAIL, True,
                      PRECISION, WIDE)  # fmt: skip

    line = (b.to(tl.int64) * n_heads + h) * q_len + row + at  # of the output, which is contiguous but on pages
    if HEADS > 1:
        line += mate.to(tl.int64) * q_len
    tl.store(lse + line, tl.where(mass == 0.0, -float("inf"), (top + tl.log2(mass)) * LN_2), mask=real)
    out_at = line * V_DIM
    if PAGED:
        out += h.to(tl.int64) * out_h + row.to(tl.int64) * out_n
        out_at = at.to(tl.int64) * out_n
        if HEADS > 1:
            out_at += mate.to(tl.int64) * out_h
    for j in tl.static_range(V_PARTS + (V_TAIL > 0)):
        column = j * V_PART + tl.arange(0, V_PART if j < V_PARTS else V_TAIL)
        tl.store(out + out_at[:, None] + column[None, :], settle(acc[j], mass).to(out.dtype.element_ty),
                 mask=real[:, None] & (column < V_DIM)[None, :])  # fmt: skip
