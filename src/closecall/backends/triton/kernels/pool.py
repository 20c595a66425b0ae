# mypy: ignore-errors
# ruff: noqa: N803, N806
# (Triton's language has no types, and its constants are capitals.)
"""Means of runs of rows, for policies that score them instead of the rows."""

import triton.language as tl

import triton


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
