# mypy: ignore-errors
# ruff: noqa: N803, RUF005, SIM108
# (Triton's language has no types, and its constants are capitals.)
"""What the kernels have in common: loading rows of q, k or v, the two products, and one step of the online softmax.

Head dims that are no power of two but a sum of two (96, 192) are worked on as two slices, HEAD and TAIL wide, so that
nothing is spent on padding; the tail's tensors are ignored where TAIL is 0. Any other head dim is padded and masked.
Value dims are PARTS slices that are PART wide, and one of TAIL.

WIDE computes in float32 whatever the inputs: Triton's interpreter multiplies bfloat16 as if it were integers.
"""

import triton.language as tl

import triton

LN_2 = tl.constexpr(0.6931471805599453)
LOG2_E = tl.constexpr(1.4426950408889634)
# Where the running maximum starts: finite, so that a row which has seen nothing yet never computes inf - inf.
LOWEST = tl.constexpr(-1.0e38)
HUGE = tl.constexpr(1.0e38)
LARGEST = tl.constexpr(3.4028234663852886e38)  # of all float32


@triton.jit
def largest(x, AXIS: tl.constexpr):
    return tl.max(x, AXIS)


@triton.jit
def smallest(x, AXIS: tl.constexpr):
    return tl.min(x, AXIS)


@triton.jit
def largest_int(x, AXIS: tl.constexpr):
    return tl.max(x, AXIS)


@triton.jit
def total(x, AXIS: tl.constexpr):
    return tl.sum(x, AXIS)


@triton.jit
def running(x, AXIS: tl.constexpr):
    return tl.cumsum(x, AXIS)


@triton.jit
def on_page(base, page, stride_page):
    return base + page.to(tl.int64) * stride_page


@triton.jit
def rows_of(base, at, ok, stride_row, stride_dim, START: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr,
            CHECK_ROWS: tl.constexpr, WIDE: tl.constexpr):  # fmt: skip
    """`[len(at), WIDTH]` from column START on. Rows that are not `ok`, and columns past DIM, are 0."""
    column = START + tl.arange(0, WIDTH)
    where = base + at.to(tl.int64)[:, None] * stride_row + column.to(tl.int64)[None, :] * stride_dim
    if CHECK_ROWS:
        if START + WIDTH > DIM:
            x = tl.load(where, mask=ok[:, None] & (column < DIM)[None, :], other=0.0)
        else:
            x = tl.load(where, mask=ok[:, None], other=0.0)
    else:
        if START + WIDTH > DIM:
            x = tl.load(where, mask=(column < DIM)[None, :], other=0.0)
        else:
            x = tl.load(where)
    if WIDE:
        x = x.to(tl.float32)
    return x


@triton.jit
def box_of(box, b, h, row, START: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, WIDE: tl.constexpr):
    """`[ROWS, WIDTH]` from column START on, by the copy engine (TMA): `box` is a descriptor of `[B, H, N, D]`."""
    x = tl.reshape(box.load([b, h, row, START]), [ROWS, WIDTH])
    if WIDE:
        x = x.to(tl.float32)
    return x


@triton.jit
def sliced(q, q_at, q_ok, q_n, q_d, k, k_at, k_ok, k_n, k_d, ROWS: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr,
           SLICE: tl.constexpr, CHECK_KEYS: tl.constexpr, PRECISION: tl.constexpr,
           WIDE: tl.constexpr):  # fmt: skip
    """Products of rows and keys, SLICE columns at a time with the rows read anew for each: for head dims whose rows do
    not fit into registers beside the rest. DIM is a multiple of SLICE. Written out, not a loop of its own: only an
    innermost loop overlaps its copies with its products."""
    s = tl.full([ROWS, KEYS], 0.0, tl.float32)
    q_step = tl.cast(q_d, tl.int64)
    k_step = tl.cast(k_d, tl.int64)
    for start in tl.static_range(0, DIM, SLICE):
        x = rows_of(q + start * q_step, q_at, q_ok, q_n, q_d, 0, SLICE, SLICE, True, WIDE)
        y = rows_of(k + start * k_step, k_at, k_ok, k_n, k_d, 0, SLICE, SLICE, CHECK_KEYS, WIDE)
        s = tl.dot(x, tl.trans(y), s, input_precision=PRECISION)
    return s


@triton.jit
def bounded(s, inner, outer, SOFTCAP: tl.constexpr):
    """Products as logits in base 2: scaled, and flattened to outer * tanh(scaled) where there is a softcap."""
    if SOFTCAP:
        # inner holds 2 log2(e) scale / softcap, so that this is tanh(x) = 1 - 2 / (exp(2 x) + 1).
        return outer * (1.0 - 2.0 / (tl.exp2(s * inner) + 1.0))
    return s * inner


@triton.jit
def soften(s, top, mass):
    """One step of the online softmax over logits in base 2: weights, new maximum and sum, and the old ones' factor."""
    higher = tl.maximum(top, largest(s, 1))
    weights = tl.exp2(s - higher[:, None])
    shrink = tl.exp2(top - higher)
    return weights, higher, mass * shrink + total(weights, 1), shrink


@triton.jit
def weigh(weights, values, acc, sees, PRECISION: tl.constexpr, WIDE: tl.constexpr):
    """acc + weights @ values in which a value that is NaN or infinite makes the rows that see its key infinite.

    Left in the product it would reach all rows, as 0 times NaN. So it is taken out, and put back as a product of two
    numbers too large for float32, or of 0 and one of them: `settle` makes NaN of what became infinite.
    """
    good = tl.abs(values.to(tl.float32)) < float("inf")
    acc = tl.dot(weights.to(values.dtype), tl.where(good, values, 0.0), acc, input_precision=PRECISION)
    mark = tl.float32 if WIDE else tl.bfloat16  # wide enough for HUGE, and one tensor-core product for every type
    return tl.dot(tl.where(sees, HUGE, 0.0).to(mark), tl.where(good, 0.0, HUGE).to(mark), acc)


@triton.jit
def nothing_yet(ROWS: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr, TAIL: tl.constexpr):
    """The weighted sums of no values: PARTS slices that are PART wide, and one of TAIL."""
    acc = ()
    for _ in tl.static_range(PARTS):
        acc = acc + (tl.full([ROWS, PART], 0.0, tl.float32),)
    if TAIL:
        acc = acc + (tl.full([ROWS, TAIL], 0.0, tl.float32),)
    return acc


@triton.jit
def weighed(weights, v, at, ok, stride_row, stride_dim, acc, shrink, sees, DIM: tl.constexpr, PART: tl.constexpr,
            PARTS: tl.constexpr, TAIL: tl.constexpr, CHECK: tl.constexpr, PRECISION: tl.constexpr,
            WIDE: tl.constexpr):  # fmt: skip
    """acc * shrink + weights @ values, slice by slice. CHECK minds rows that are not `ok` and values no number."""
    new = ()
    for j in tl.static_range(PARTS + (TAIL > 0)):
        x = rows_of(v, at, ok, stride_row, stride_dim, j * PART, PART if j < PARTS else TAIL, DIM, CHECK, WIDE)
        if CHECK:
            new = new + (weigh(weights, x, acc[j] * shrink[:, None], sees, PRECISION, WIDE),)
        else:
            new = new + (tl.dot(weights.to(x.dtype), x, acc[j] * shrink[:, None], input_precision=PRECISION),)
    return new


@triton.jit
def weighed_boxes(weights, box, b, h, row, acc, shrink, KEYS: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr,
                  PRECISION: tl.constexpr, WIDE: tl.constexpr):  # fmt: skip
    """`weighed` of values that the copy engine brings, without CHECK."""
    new = ()
    for j in tl.static_range(PARTS):
        x = box_of(box, b, h, row, j * PART, KEYS, PART, WIDE)
        new = new + (tl.dot(weights.to(x.dtype), x, acc[j] * shrink[:, None], input_precision=PRECISION),)
    return new


@triton.jit
def settle(acc, mass):
    """The weighted sums over their total; 0 for rows that saw nothing."""
    share = 1.0 / tl.where(mass == 0.0, 1.0, mass)
    return tl.where(tl.abs(acc) == float("inf"), float("nan"), acc * share[:, None])


@triton.jit
def count_listed(own, sinks, n_listed):
    """How many candidates a tile has whose first own block is `own`: blocks before it that are no sinks, or as many of
    these as a list holds."""
    return tl.minimum(tl.maximum(own - sinks, 0), n_listed)


@triton.jit
def list_of(listed, b, h, tile, n_heads, n_tiles, together, n_listed):
    """Where a tile's candidates are in `listed [B, n_heads // together, n_tiles, n_listed]`."""
    line = (b.to(tl.int64) * (n_heads // together) + h // together) * n_tiles + tile
    return listed + line * n_listed


@triton.jit
def sides_of(x):
    """What of rows meets a box's low and high side: max(q high, q low) is q high where q > 0 and q low elsewhere. NaN
    must stay NaN in both."""
    return tl.where(x > 0.0, 0.0, x).to(x.dtype), tl.where(x < 0.0, 0.0, x).to(x.dtype)


@triton.jit
def summary_of(summaries, block, START: tl.constexpr, SLICE: tl.constexpr, WIDTH: tl.constexpr, WIDE: tl.constexpr):
    """`[len(block), SLICE]`. Not masked: behind the last block there is memory, and what it holds is never ranked."""
    column = START + tl.arange(0, SLICE)
    y = tl.load(summaries + block[:, None] * WIDTH + column[None, :])
    if WIDE:
        y = y.to(tl.float32)
    return y


@triton.jit
def larger(x, y):
    """The larger of the two, which is the other one where one is NaN."""
    return tl.maximum(x, y)
