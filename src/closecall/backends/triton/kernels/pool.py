# mypy: ignore-errors
# ruff: noqa: N803, N806
# (Triton's language has no types, and its constants are capitals.)
"""Means of runs of rows, and the rows most distant from them, for policies that score these instead of the rows."""

import triton.language as tl

import triton

from .steps import total


@triton.jit
def some_rows(q, q_at, q_n, at, ok, columns):
    """The rows `at`, in float32; 0 where not `ok`."""
    return tl.load(q + at.to(tl.int64)[:, None] * q_n + q_at, mask=ok[:, None] & columns, other=0.0).to(tl.float32)


@triton.jit
def distance(x, mean, ok):
    """Squared, of each row from its mean; -1 where not `ok`."""
    apart = x - mean
    return tl.where(ok, total(apart * apart, 1), -1.0)


@triton.jit(do_not_specialize=["n_tiles", "q_len"])
def pool_kernel(
    q, plan, forced, out, means, q_b, q_h, q_n, q_d, n_tiles, q_len,
    POOL: tl.constexpr, RUNS: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    FORCED: tl.constexpr, OUTLYING: tl.constexpr,
):  # fmt: skip
    """One program does ROWS of the runs of a tile of a head: means of POOL rows, the last of those that there are.

    They are summed in float32 and written to `out [B, H, n_tiles * RUNS, DIM]`; of runs that have no rows nothing is.
    FORCED does the same with one number a row, from `forced [B, H, q_len]` to `means [B, H, n_tiles * RUNS]`.
    OUTLYING writes behind every mean, so that RUNS has room for both, the row most distant from it: the first of
    equally distant ones (see `outlying_rows` in scorers/base.py); the run's first where a distance is no number.
    """
    EACH: tl.constexpr = 2 if OUTLYING else 1
    PARTS: tl.constexpr = (RUNS // EACH + ROWS - 1) // ROWS
    tile, part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    h, b = tl.program_id(1), tl.program_id(2)
    entry = plan + (b * n_tiles + tile) * 5
    row, rows = tl.load(entry), tl.load(entry + 1)
    run = part * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    head = b.to(tl.int64) * tl.num_programs(1) + h
    q += b.to(tl.int64) * q_b + h.to(tl.int64) * q_h + row.to(tl.int64) * q_n
    q_at = column.to(tl.int64)[None, :] * q_d
    columns = (column < DIM)[None, :]
    forced += head * q_len + row
    sums = tl.full([ROWS, WIDTH], 0.0, tl.float32)
    mass = tl.full([ROWS], 0.0, tl.float32)
    for i in range(POOL):
        at = run * POOL + i
        ok = (at < rows) & (run < RUNS // EACH)
        sums += some_rows(q, q_at, q_n, at, ok, columns)
        if FORCED:
            mass += tl.load(forced + at, mask=ok, other=0.0)
    there = (run * POOL < rows) & (run < RUNS // EACH)
    n = tl.maximum(tl.minimum(rows - run * POOL, POOL), 1).to(tl.float32)
    line = (head * n_tiles + tile) * RUNS + run * EACH
    mean = tl.div_rn(sums, tl.broadcast_to(n[:, None], sums.shape))
    to = out + line[:, None] * DIM + column[None, :]
    tl.store(to, mean.to(out.dtype.element_ty), mask=there[:, None] & columns)
    if FORCED:
        tl.store(means + line, tl.div_rn(mass, n), mask=there)
    if OUTLYING:
        most = tl.full([ROWS], 0.0, tl.float32)
        odd = tl.full([ROWS], 0, tl.int32)
        for i in range(POOL):
            at = run * POOL + i
            ok = (at < rows) & there
            far = distance(some_rows(q, q_at, q_n, at, ok, columns), mean, ok)
            odd = tl.where(far == far, odd, 1)
            most = tl.maximum(most, far)
        found = tl.full([ROWS], POOL, tl.int32)
        for i in range(POOL):
            at = run * POOL + i
            ok = (at < rows) & there
            far = distance(some_rows(q, q_at, q_n, at, ok, columns), mean, ok)
            found = tl.where((far >= most * (1 - 1 / 4096)) & (found == POOL), i, found)
        at = run * POOL + tl.where((odd == 0) & (found < POOL), found, 0)
        row_there = some_rows(q, q_at, q_n, at, there, columns)
        tl.store(to + DIM, row_there.to(out.dtype.element_ty), mask=there[:, None] & columns)
        if FORCED:
            tl.store(means + line + 1, tl.load(forced + at, mask=there, other=0.0), mask=there)
