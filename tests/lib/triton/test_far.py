"""What kernels write for a later head of a long prompt lies past 2^31 numbers. A head's place follows from the sizes a
kernel is told, so two heads of one tile and a made-up length are enough; of the memory only the pages in use exist."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from closecall.backends.triton import device, launch
from engines import Engine

CPU = torch.device("cpu")
FAR = 2**31 + 2**20
DIM, ROWS, BLOCKS = 16, 16, 16
PLAN = torch.tensor([[[0, ROWS, BLOCKS, BLOCKS, 0]]], dtype=torch.int32)  # one tile that sees all blocks
PACKS = torch.tensor([[0, 0, 1]], dtype=torch.int32)
TOLD = {"RUNS": ROWS, "TILES": 1, "BLOCK": 8, "ROWS": ROWS, "KEYS": BLOCKS, "DIM": DIM, "WIDTH": DIM, "SLICE": DIM,
        "BOX": False, "VECTORS": 1, "PLANES": 1, "SHIFT": 0, "PRECISION": "ieee", "WIDE": True}  # fmt: skip


def ocean(n: int, dtype: torch.dtype) -> torch.Tensor:
    try:
        return torch.empty(n, dtype=dtype)
    except RuntimeError as error:
        pytest.skip(f"no address space for {n} numbers: {error}")


def tensors() -> tuple[torch.Tensor, torch.Tensor]:
    """q `[1, 2, rows, D]` and one plane of summaries, with what kernels read behind the last block."""
    generator = torch.Generator().manual_seed(0)
    summaries = torch.randn(1, 1, BLOCKS + launch.MOST_KEYS, DIM, generator=generator)
    return torch.randn(1, 2, ROWS, DIM, generator=generator), summaries


def pool(kernel: Any, n_tiles: int) -> tuple[torch.Tensor, int]:
    q, _ = tensors()
    runs = 4
    out = ocean((n_tiles + 1) * runs * DIM, torch.float16)
    kernel.pool_kernel[(1, 2, 1)](
        q, PLAN, q, out, out, *q.stride(), n_tiles, ROWS, POOL=4, RUNS=runs, ROWS=runs, DIM=DIM, WIDTH=DIM,
        FORCED=False,
    )  # fmt: skip
    return out, runs * DIM


def sums(kernel: Any, q_len: int) -> tuple[torch.Tensor, int]:
    q, summaries = tensors()
    out = ocean(q_len + ROWS, torch.float32)
    kernel.sums_kernel[(1, 2)](
        q, summaries, PLAN, PACKS, q, out, PLAN, *q.stride(), 1, q_len, 2, BLOCKS, 0, 1, BLOCKS, 0.3, SOFTMAX=True,
        LISTED=False, STAGES=1, **TOLD,
    )  # fmt: skip
    return out, ROWS


def scores(kernel: Any, some_tiles: int) -> tuple[torch.Tensor, int]:
    q, summaries = tensors()
    out = ocean((some_tiles + 1) * BLOCKS, torch.int32)
    kernel.scores_kernel[(1, 2)](
        q, summaries, PLAN, PACKS, q, out, *q.stride(), 1, 0, 0, 0, 2, some_tiles, ROWS, 2, BLOCKS, BLOCKS, 0, 0.3,
        MASS=False, SOFTMAX=False, MEAN=False, STAGES=1, **TOLD,
    )  # fmt: skip
    return out, BLOCKS


def again(kernel: Any, some_tiles: int) -> tuple[torch.Tensor, int]:
    q, summaries = tensors()
    out = ocean((some_tiles + 1) * BLOCKS, torch.int32)
    listed = torch.cat([torch.arange(BLOCKS).repeat(2), torch.zeros(2 * launch.MOST_KEYS)]).to(torch.int32)
    kernel.again_kernel[(1, 2)](
        q, summaries, PLAN, PACKS, q, listed, out, *q.stride(), 1, 0, 0, 0, 2, some_tiles, ROWS, 2, 1, BLOCKS, BLOCKS,
        0, 0.3, MASS=False, SOFTMAX=False, MEAN=False, STAGES=1, **TOLD,
    )  # fmt: skip
    return out, BLOCKS


def best(kernel: Any, n_tiles: int) -> tuple[torch.Tensor, int]:
    width = 8
    found = torch.arange(2 * BLOCKS, dtype=torch.int32)
    order, kept = (ocean((n_tiles + 1) * width, torch.int32) for _ in range(2))
    sizes = launch.select_sizes(BLOCKS, width, "sm_90")
    kernel.best_kernel[(1, 2, 1)](
        found, order, order, kept, n_tiles, 0, 0, 2, BLOCKS, width, BLOCKS, CHUNK=launch.select_chunk(BLOCKS), GROUP=1,
        LISTED=False, **sizes,
    )  # fmt: skip
    return order, width


@pytest.mark.parametrize(
    ("write", "unit"),
    [(pool, 4 * DIM), (sums, 1), (scores, BLOCKS), (again, BLOCKS), (best, 8)],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_the_second_head_of_a_long_prompt_is_written_where_it_belongs(write: Any, unit: int) -> None:
    """The length is one at which the second head begins past 2^31 numbers."""
    with Engine("triton")._forced(), device.running(CPU) as kernel:
        near, size = write(kernel, 1 if unit > 1 else ROWS)
        far, _ = write(kernel, FAR // unit)
    begin = FAR // unit * unit
    assert begin > 2**31
    assert torch.equal(far[:size], near[:size])
    assert torch.equal(far[begin : begin + size], near[size : 2 * size])
