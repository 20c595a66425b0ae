# mypy: ignore-errors
# ruff: noqa: N803, N806
# (Triton's language has no types, and its constants are capitals.)
"""Means of runs of rows, and outlying rows, for policies that score these instead of the rows."""

import triton.language as tl

import triton

from .steps import largest, largest_int, total


@triton.jit(do_not_specialize=["n_tiles", "q_len"])
def pool_kernel(
    q, plan, forced, out, means, q_b, q_h, q_n, q_d, n_tiles, q_len,
    POOL: tl.constexpr, RUNS: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    FORCED: tl.constexpr,
):  # fmt: skip
    """One program does ROWS of the RUNS runs of a tile of a head: means of POOL rows, the last of those that there are.

    They are summed in float32 and written to `out [B, H, n_tiles * RUNS, DIM]`; of runs that have no rows nothing is.
    FORCED does the same with one number a row, from `forced [B, H, q_len]` to `means [B, H, n_tiles * RUNS]`.
    """
    PARTS: tl.constexpr = (RUNS + ROWS - 1) // ROWS
    tile, part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    h, b = tl.program_id(1), tl.program_id(2)
    entry = plan + (b * n_tiles + tile) * 5
    row, rows = tl.load(entry), tl.load(entry + 1)
    run = part * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    head = b.to(tl.int64) * tl.num_programs(1) + h
    q += b.to(tl.int64) * q_b + h.to(tl.int64) * q_h + row.to(tl.int64) * q_n
    q_at = column.to(tl.int64)[None, :] * q_d
    forced += head * q_len + row
    sums = tl.full([ROWS, WIDTH], 0.0, tl.float32)
    mass = tl.full([ROWS], 0.0, tl.float32)
    for i in range(POOL):
        at = run * POOL + i
        ok = (at < rows) & (run < RUNS)
        x = tl.load(q + at.to(tl.int64)[:, None] * q_n + q_at, mask=ok[:, None] & (column < DIM)[None, :], other=0.0)
        sums += x.to(tl.float32)
        if FORCED:
            mass += tl.load(forced + at, mask=ok, other=0.0)
    there = (run * POOL < rows) & (run < RUNS)
    n = tl.maximum(tl.minimum(rows - run * POOL, POOL), 1).to(tl.float32)
    line = (head * n_tiles + tile) * RUNS + run
    mean = tl.div_rn(sums, tl.broadcast_to(n[:, None], sums.shape)).to(out.dtype.element_ty)
    tl.store(out + line[:, None] * DIM + column[None, :], mean, mask=there[:, None] & (column < DIM)[None, :])
    if FORCED:
        tl.store(means + line, tl.div_rn(mass, n), mask=there)


@triton.jit(do_not_specialize=["n_tiles", "q_len"])
def outlying_kernel(
    q, plan, forced, out, masses, q_b, q_h, q_n, q_d, n_tiles, q_len,
    POOL: tl.constexpr, RUNS: tl.constexpr, OUTLYING: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr,
    WIDTH: tl.constexpr, FORCED: tl.constexpr,
):  # fmt: skip
    """One program finds the OUTLYING rows of a tile of a head that are most distant from the mean of all, of equally
    distant ones the earlier (`outlying_rows` in scorers/base.py), and writes them behind the means of `pool_kernel`.

    ROWS is a power of two that the tile's rows fit in. FORCED does the same with one number a row.
    """
    tile, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    entry = plan + (b * n_tiles + tile) * 5
    first, rows = tl.load(entry), tl.load(entry + 1)
    row = tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    head = b.to(tl.int64) * tl.num_programs(1) + h
    q += b.to(tl.int64) * q_b + h.to(tl.int64) * q_h + first.to(tl.int64) * q_n
    columns = column.to(tl.int64) * q_d
    there = (row < rows)[:, None] & (column < DIM)[None, :]
    x = tl.load(q + row.to(tl.int64)[:, None] * q_n + columns[None, :], mask=there, other=0.0).to(tl.float32)
    apart = tl.where(there, x - total(x, 0)[None, :] / tl.maximum(rows, 1).to(tl.float32), 0.0)
    far = total(apart * apart, 1)
    far = tl.where(row < rows, tl.where(far == far, far, 0.0), -1.0)
    line = (head * n_tiles + tile) * RUNS + (rows + POOL - 1) // POOL
    for i in range(OUTLYING):
        as_far = far >= largest(far, 0) * (1 - 1 / 4096)
        found = ROWS - largest_int(tl.where(as_far, ROWS - row, 0), 0)
        ok = i < rows
        values = tl.load(q + found.to(tl.int64) * q_n + columns, mask=(column < DIM) & ok, other=0.0)
        tl.store(out + (line + i) * DIM + column, values.to(out.dtype.element_ty), mask=(column < DIM) & ok)
        if FORCED:
            mass = tl.load(forced + head * q_len + first + found, mask=ok, other=0.0)
            tl.store(masses + line + i, mass, mask=ok)
        far = tl.where(row == found, -1.0, far)
