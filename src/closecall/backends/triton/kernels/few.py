# mypy: ignore-errors
# ruff: noqa: N803, N806
# (Triton's language has no types, and its constants are capitals.)
"""Decode: the few rows of all query heads that share a key head in one tile, their blocks split over programs."""

import triton.language as tl

import triton

from .steps import LN_2, LOWEST, bounded, largest, nothing_yet, on_page, rows_of, settle, sliced, soften, total, weighed


@triton.jit(do_not_specialize=["q_len", "n_blocks"])
def few_kernel(
    q, k, v, out, lse, blocks, counts, members, plan, table,
    q_b, q_h, q_n, q_d, k_b, k_h, k_n, k_d, v_b, v_h, v_n, v_d, q_len, group, n_blocks, inner, outer,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr, HEAD: tl.constexpr,
    TAIL: tl.constexpr, V_DIM: tl.constexpr, V_PART: tl.constexpr, V_PARTS: tl.constexpr, V_TAIL: tl.constexpr,
    SPLITS: tl.constexpr, LISTED: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr,
    STAGES: tl.constexpr, SLICE: tl.constexpr, PAGED: tl.constexpr,
):  # fmt: skip
    """One program does one split of the blocks that any of the heads keeps, for ROWS of the group's rows.

    `blocks [B, Hkv, n_blocks]` lists those blocks and `members [B, H, n_blocks]` says which head keeps which. Results
    are partial, `[B, H, q_len, SPLITS, ...]` in float32: the merge kernel joins them by their log-sum-exp.

    PAGED as in `attend_kernel`, without a list of blocks. Then the sequences are the B tiles of a plan, which has at
    most q_len rows in each and all in one buffer.
    """
    PIECES: tl.constexpr = (BLOCK + KEYS - 1) // KEYS
    split = tl.program_id(0)
    chunks = (group * q_len + ROWS - 1) // ROWS
    shared = tl.program_id(1) // chunks
    b = tl.program_id(2)
    kv_heads = tl.num_programs(1) // chunks
    entry = plan + b * 5
    row, rows, key, pos = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)
    packed = (tl.program_id(1) % chunks) * ROWS + tl.arange(0, ROWS)
    head = shared * group + packed // q_len
    line = ((b.to(tl.int64) * (kv_heads * group) + head) * q_len + packed % q_len) * SPLITS + split
    at = packed % q_len
    if PAGED:
        at += row
    inside = packed < group * q_len
    real = inside & (at >= row) & (at < row + rows)
    mine = pos + at - row
    if not PAGED:
        q += b.to(tl.int64) * q_b
    q_at = head.to(tl.int64) * q_h + at.to(tl.int64) * q_n
    if SLICE == 0:
        q0 = rows_of(q, q_at, real, 1, q_d, 0, HEAD, DIM, True, WIDE)
    if SLICE == 0 and TAIL:
        q1 = rows_of(q, q_at, real, 1, q_d, HEAD, TAIL, DIM, True, WIDE)
    k += shared.to(tl.int64) * k_h
    v += shared.to(tl.int64) * v_h
    if PAGED:
        table += key // (BLOCK * PAGED)
    else:
        k += b.to(tl.int64) * k_b + key.to(tl.int64) * k_n
        v += b.to(tl.int64) * v_b + key.to(tl.int64) * v_n

    if LISTED:
        blocks += (b.to(tl.int64) * kv_heads + shared) * n_blocks
        members += (b.to(tl.int64) * (kv_heads * group) + head) * n_blocks
        count = tl.load(counts + b * kv_heads + shared)
    else:
        count = tl.where(rows > 0, (pos + rows + BLOCK - 1) // BLOCK, 0)
    each = (count + SPLITS - 1) // SPLITS
    last = tl.minimum(count, (split + 1) * each)

    top = tl.full([ROWS], LOWEST, tl.float32)
    mass = tl.full([ROWS], 0.0, tl.float32)
    acc = nothing_yet(ROWS, V_PART, V_PARTS, V_TAIL)
    piece = tl.arange(0, KEYS)
    end = pos + rows
    coming = 0  # the next block, looked up one turn ahead so that no copy waits for it
    if LISTED:
        coming = tl.load(blocks + split * each, mask=split * each < last, other=0)
    if PAGED:  # and so is the next page
        coming = tl.load(table + split * each // PAGED, mask=split * each < last, other=0)
    for i in tl.range(split * each * PIECES, last * PIECES, num_stages=STAGES):
        if LISTED:
            block = coming
            coming = tl.load(blocks + tl.minimum((i + 1) // PIECES, last - 1))
        else:
            block = i // PIECES
        within = (i % PIECES) * KEYS + piece
        there = block * BLOCK + within
        ok = (there < end) & (within < BLOCK)
        keys, values, place = k, v, there
        if PAGED:
            keys, values, place = on_page(k, coming, k_b), on_page(v, coming, v_b), (block % PAGED) * BLOCK + within
            coming = tl.load(table + tl.minimum((i + 1) // PIECES, last - 1) // PAGED)
        if SLICE:
            s = sliced(q, q_at, real, 1, q_d, keys, place, ok, k_n, k_d, ROWS, KEYS, DIM, SLICE, True, PRECISION,
                       WIDE)  # fmt: skip
        else:
            k0 = rows_of(keys, place, ok, k_n, k_d, 0, HEAD, DIM, True, WIDE)
            s = tl.dot(q0, tl.trans(k0), input_precision=PRECISION)
            if TAIL:
                k1 = rows_of(keys, place, ok, k_n, k_d, HEAD, TAIL, DIM, True, WIDE)
                s = tl.dot(q1, tl.trans(k1), s, input_precision=PRECISION)
        sees = (there[None, :] <= mine[:, None]) & ok[None, :] & real[:, None]
        if LISTED:
            sees = sees & (tl.load(members + block, mask=inside, other=0) != 0)[:, None]
        s = tl.where(sees, bounded(s, inner, outer, SOFTCAP), -float("inf"))
        weights, top, mass, shrink = soften(s, top, mass)
        acc = weighed(weights, values, place, ok, v_n, v_d, acc, shrink, sees, V_DIM, V_PART, V_PARTS, V_TAIL, True,
                      PRECISION, WIDE)  # fmt: skip

    tl.store(lse + line, tl.where(mass == 0.0, -float("inf"), (top + tl.log2(mass)) * LN_2), mask=inside)
    for j in tl.static_range(V_PARTS + (V_TAIL > 0)):
        column = j * V_PART + tl.arange(0, V_PART if j < V_PARTS else V_TAIL)
        tl.store(out + line[:, None] * V_DIM + column[None, :], settle(acc[j], mass),
                 mask=inside[:, None] & (column < V_DIM)[None, :])  # fmt: skip


@triton.jit
def merge_kernel(parts, sums, out, lse, SPLITS: tl.constexpr, WAYS: tl.constexpr, V_DIM: tl.constexpr,
                 WIDTH: tl.constexpr):  # fmt: skip
    """One program joins the SPLITS partial results of one row: their mean, weighted by exp(log-sum-exp)."""
    line = tl.program_id(0).to(tl.int64)
    way = tl.arange(0, WAYS)
    column = tl.arange(0, WIDTH)
    each = tl.load(sums + line * SPLITS + way, mask=way < SPLITS, other=-float("inf"))
    top = tl.maximum(largest(each, 0), LOWEST)
    weights = tl.exp(each - top)
    mass = total(weights, 0)
    where = (line * SPLITS + way)[:, None] * V_DIM + column[None, :]
    # A part without weight is 0, not NaN: a row that sees nothing of a split never saw its values either.
    x = tl.load(parts + where, mask=(way < SPLITS)[:, None] & (column < V_DIM)[None, :], other=0.0)
    joined = total(x * weights[:, None], 0) / tl.where(mass == 0.0, 1.0, mass)
    tl.store(lse + line, tl.where(mass == 0.0, -float("inf"), top + tl.log(mass)))
    tl.store(out + line * V_DIM + column, joined.to(out.dtype.element_ty), mask=column < V_DIM)
