"""Decoding steps over vLLM's pages: vLLM's own kernel and ours, turn by turn in one process.

Runs where vLLM is installed (docs/vllm.md): `python -m closecall_lab.bench.vllm_decode`. No engine is started.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import closecall
from closecall import paged

from ..spine.table import Column, Table

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
COLUMNS = (
    Column("type", "dtype", left=True),
    Column("sequences"),
    Column("keys"),
    Column("vLLM ms", "vllm_ms", ".3f"),
    Column("closecall ms", "ours_ms", ".3f"),
    Column("of vLLM's", "share", ".2f"),
    Column("rounds"),
)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m closecall_lab.bench.vllm_decode", description=__doc__)
    made.add_argument("--heads", type=int, default=9, help="query heads (%(default)s)")
    made.add_argument("--kv-heads", type=int, default=3, help="key heads (%(default)s)")
    made.add_argument("--dim", type=int, default=64, help="(%(default)s)")
    made.add_argument("--page", type=int, default=128, help="tokens of a page (%(default)s, vLLM's own)")
    made.add_argument("--keys", type=int, nargs="+", default=[512, 2048, 8192], help="of each sequence (%(default)s)")
    made.add_argument("--sequences", type=int, nargs="+", default=[1, 4], help="in a step (%(default)s)")
    made.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["fp32"], help="(%(default)s)")
    made.add_argument("--threads", type=int, default=torch.get_num_threads(), help="(all)")
    made.add_argument("--mib", type=int, default=128, help="of cache: as many layers, so that none stays in the CPU's")
    made.add_argument("--seconds", type=float, default=4.0, help="for each row of the table (%(default)s)")
    made.add_argument("--busy", action="store_true", help="CPU time of one thread: for a machine that others use too")
    return made


def layers(args: argparse.Namespace, keys: int, sequences: int, dtype: torch.dtype) -> list[Tensor]:
    """Caches `[pages, kv heads, page, 2 dim]`, as vLLM lays them out, with the pages of each sequence in them."""
    pages = sequences * -(-keys // args.page)
    shape = (pages, args.kv_heads, args.page, 2 * args.dim)
    one = torch.Size(shape).numel() * dtype.itemsize
    return [torch.randn(shape).to(dtype) for _ in range(max(2, args.mib * 2**20 // one))]


def steps(
    args: argparse.Namespace, keys: int, sequences: int, dtype: torch.dtype
) -> tuple[Callable[[], Tensor], Callable[[], Tensor], int]:
    """One decoding step over all layers, by vLLM and by us, and how many layers that is."""
    from vllm import _custom_ops as ops

    from closecall.vllm.backend import key_pages

    caches = layers(args, keys, sequences, dtype)
    table = torch.randperm(caches[0].shape[0]).to(torch.int32).view(sequences, -1)
    starts, lengths = torch.arange(sequences + 1, dtype=torch.int32), torch.full((sequences,), keys, dtype=torch.int32)
    q, scale = torch.randn(sequences, args.heads, args.dim).to(dtype), args.dim**-0.5
    dense = closecall.policy("dense")
    isa = "vec" if args.dim % 32 == 0 else "vec16"
    out = torch.empty_like(q)
    views: list[Any] = [(*c.view(*c.shape[:2], 2 * args.page, -1).chunk(2, dim=2), *key_pages(c)) for c in caches]

    def theirs() -> Tensor:
        plan = ops.cpu_attn_get_scheduler_metadata(
            sequences, args.heads, args.kv_heads, args.dim, lengths, dtype, starts, True, -1, isa, True
        )  # once for all layers, like our pages below
        for k, v, *_ in views:
            ops.cpu_attention_with_kv_cache(
                q, k, v, out, starts, lengths, scale, True, None, -1, table, 0.0, plan, None
            )
        return out.clone()

    def ours() -> Tensor:
        pages = paged.Pages(table, starts, lengths, lengths - 1)
        for *_, k, v in views:
            paged.attention(q, k, v, dense, pages, scale=scale, out=out, backend="cpu")
        return out.clone()

    return theirs, ours, len(caches)


def interleaved(
    theirs: Callable[[], Tensor], ours: Callable[[], Tensor], seconds: float, clock: Callable[[], float]
) -> list[tuple[float, float]]:
    """What both took in each round, at least three of them."""
    rounds: list[tuple[float, float]] = []
    begin = clock()
    while len(rounds) < 3 or clock() - begin < seconds:
        start = clock()
        theirs()
        between = clock()
        ours()
        rounds.append((between - start, clock() - between))
    return rounds


def main(argv: list[str] | None = None) -> None:
    args = parser().parse_args(argv)
    threads, clock = (1, time.process_time) if args.busy else (args.threads, time.perf_counter)
    torch.set_num_threads(threads)
    rows = []
    for name, sequences, keys in itertools.product(args.dtypes, args.sequences, args.keys):
        theirs, ours, count = steps(args, keys, sequences, DTYPES[name])
        torch.testing.assert_close(theirs(), ours(), atol=2e-2, rtol=2e-2)
        took = interleaved(theirs, ours, args.seconds, clock)
        vllm_ms, ours_ms = (1000 * statistics.median(one) / count for one in zip(*took, strict=True))
        share = statistics.median(b / a for a, b in took)
        shape = {"dtype": name, "sequences": sequences, "keys": keys}
        rows.append(shape | {"vllm_ms": vllm_ms, "ours_ms": ours_ms, "share": share, "rounds": len(took)})
    heads = f"{args.heads} heads over {args.kv_heads} of {args.dim}, pages of {args.page}"
    what = "CPU time, one thread" if args.busy else f"{threads} threads"
    notes = ["Milliseconds of one layer; medians of interleaved rounds, and the median of the rounds' ratios."]
    print(Table(f"Decoding: {heads}, {what}", COLUMNS, rows, notes).markdown())


if __name__ == "__main__":
    main()
