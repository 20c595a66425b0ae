"""How time and memory grow with context, from 8K to a million tokens, on one group of heads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from closecall.api import attend, attention, select
from closecall.backends import cpu
from closecall.info import DTYPES
from closecall.policy import Policy

from ..spine import inputs
from ..spine.results import Facts
from ..spine.table import Table
from ..spine.timing import LEAST_ROUNDS, Contender, interleave
from . import growth_report
from .profile.variants import Variant
from .validate.device import Cpu

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WHOLE = 16 * 1024  # tokens up to which dense attention runs whole; beyond, on so many rows that it costs as much


def dense_rows(context: int) -> int:
    """On how many rows dense attention is measured: as many (row, key) pairs as at 16K, in whole tiles."""
    return context if context <= WHOLE else max(64, WHOLE * WHOLE // context // 64 * 64)


@dataclass(frozen=True)
class GrowthBench:
    """Every context, type and thread count is a cell; all policies and the two dense baselines take turns in it.

    Dense attention of a long prompt would take hours. It runs on rows from the middle, which see half of the keys as
    rows do on average, and its time is multiplied by context / rows.
    """

    contexts: tuple[int, ...]
    dtypes: tuple[str, ...]
    dims: tuple[int, ...]
    threads: tuple[int, ...]
    variants: tuple[Variant, ...]
    heads: int
    kv_heads: int
    repeats: int
    seconds: float
    name: str = "growth"

    def __post_init__(self) -> None:
        there = Cpu().free_bytes()
        for cell in self.cells():
            needed = bytes_needed(cell, [v.policy for v in self.variants])
            if there is not None and needed > there:
                raise ValueError(
                    f"{self.label(cell)} needs about {needed:,} bytes of memory and {there:,} are there: use shorter "
                    "--contexts, fewer --heads, or --dtypes bf16"
                )

    def cells(self) -> list[Facts]:
        shared = {
            "what": "growth",
            "heads": self.heads,
            "kv_heads": self.kv_heads,
            "variants": [v.to_json() for v in self.variants],
            "tier": cpu.tier() if cpu.tiers() else None,
            "repeats": self.repeats,
            "seconds": self.seconds,
        }
        return [
            {"context": n, "dtype": dtype, "dim": dim, "threads": t, **shared}
            for n in sorted(self.contexts)
            for t in self.threads
            for dim in self.dims
            for dtype in self.dtypes
        ]

    def label(self, cell: Facts) -> str:
        return f"{inputs.size(cell['context'])} {cell['dtype']} D={cell['dim']}, {inputs.threads(cell['threads'])}"

    def guess(self, cell: Facts) -> float:
        n, dense = cell["context"], WHOLE**2 / 2
        pairs = 2 * dense + len(self.variants) * n * min(n / 2, 6000 + n / 64)
        once = 4 * cell["heads"] * pairs * cell["dim"] / (80e9 * cell["threads"])
        return float(5 + max(cell["seconds"], LEAST_ROUNDS * once))

    def measure(self, cell: Facts) -> Facts:
        torch.set_num_threads(cell["threads"])
        n, threads = cell["context"], cell["threads"]
        q, k, v = inputs.qkv(cell["heads"], cell["kv_heads"], n, n, cell["dim"], cell["dtype"])
        form, sdpa, dense = baselines(q, k, v)
        contenders = [Contender.of("sdpa", sdpa, threads), Contender.of("dense", dense, threads)]
        contenders += [_ours(variant, q, k, v, threads) for variant in self.variants]
        samples = interleave(contenders, seconds=cell["seconds"], most_rounds=cell["repeats"])
        kept = {variant.name: select(q, k, variant.policy).effective_budget for variant in self.variants}
        return {
            "rounds": samples.rounds,
            "laps": samples.laps,
            "dense_rows": dense_rows(n),
            "sdpa_form": form,
            "kept": kept,
            "extra_mib": {name: None if x is None else x / 2**20 for name, x in samples.extra_bytes.items()},
        }

    def table(self, machine: Facts, measured: list[tuple[Facts, Facts]]) -> Table:
        return growth_report.table(machine, measured)

    def figures(self, machine: Facts, measured: list[tuple[Facts, Facts]]) -> dict[str, Figure]:
        return {self.name: growth_report.figure(machine, measured)}


def _ours(variant: Variant, q: Tensor, k: Tensor, v: Tensor, threads: int) -> Contender:
    steps: dict[str, Callable[..., object]] = {
        "select": lambda _: select(q, k, variant.policy),
        "attend": lambda selection: attend(q, k, v, selection),
    }
    return Contender(variant.name, steps, threads)


def baselines(q: Tensor, k: Tensor, v: Tensor) -> tuple[str, Callable[[], Tensor], Callable[[], Tensor]]:
    """torch's SDPA, the form of it, and our own kernel run dense: whole, or on rows from the middle."""
    n = q.shape[2]
    rows = dense_rows(n)
    if rows == n:
        form, sdpa = inputs.sdpa(q, k, v)
        return form, sdpa, lambda: attention(q, k, v, "dense")
    middle = slice((n - rows) // 2, (n + rows) // 2)
    some, keys, values = q[:, :, middle], k[:, :, : middle.stop], v[:, :, : middle.stop]
    # torch aligns causality to the start: to give each row half of the keys, none is masked.
    form, sdpa = inputs.sdpa(some, k[:, :, : n // 2], v[:, :, : n // 2], causal=False)
    return form, sdpa, lambda: attention(some, keys, values, "dense")


def bytes_needed(cell: Facts, policies: list[Policy]) -> int:
    """q, k, v and the output, queries once more while they are made, and the largest selection with its ranking."""
    n, wide = cell["context"], DTYPES[cell["dtype"]].itemsize
    tensors = n * cell["dim"] * (2 * cell["heads"] + 2 * cell["kv_heads"]) * wide + n * cell["dim"] * cell["heads"] * 4
    widths = [p.rule.limit(-(-n // p.block)) / p.tile for p in policies]
    return int(tensors + n * cell["heads"] * 12 * max(widths, default=0))
