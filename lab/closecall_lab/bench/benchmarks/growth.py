"""Times selection and attention over whole prompts, from 8K to a million tokens, measures their memory, and fits
exponents. Dense attention of long prompts would take hours: it is measured on fewer rows, multiplied, and marked as
such. Finished cells are kept: run the same command again to continue."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from closecall.api import attention, select
from closecall.info import DTYPES
from closecall.policy import Policy

from ...spine import inputs
from ...spine.numbers import mebibytes
from ...spine.results import Facts, Measured
from ...spine.table import Table
from ...spine.timing import LEAST_ROUNDS, Contender, interleave
from .. import growth_report
from ..base import Benchmark, TensorBenchmark, check_memory, select_then_attend
from ..profile.policies import ProfiledPolicy, read
from ..validate.device import Cpu

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HELP = "time, memory and selection's share from 8K to a million tokens"
FULL = {"contexts": "8k,16k,32k,64k,128k,256k,512k,1024k", "dims": "128", "threads": "1", "heads": "4", "kv_heads": "1",
        "budget": "33", "seconds": 20.0, "repeats": "15"}  # fmt: skip
QUICK = FULL | {"contexts": "8k,16k,32k", "seconds": 4.0}
WHOLE = 16 * 1024  # tokens up to which dense attention runs whole; beyond, on so many rows that it costs as much


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--policies", metavar="NAME,...", default="router-on-quest:pool=16,auto:pool=16", help="(%(default)s)"
    )


def make(args: argparse.Namespace, shared: dict[str, Any]) -> Benchmark:
    return GrowthBench(policies=read(args.policies, (shared.pop("budget"),), dense=False), **shared)


def dense_rows(context: int) -> int:
    """On how many rows dense attention is measured: as many (row, key) pairs as at 16K, in whole tiles."""
    return context if context <= WHOLE else max(64, WHOLE * WHOLE // context // 64 * 64)


@dataclass(frozen=True)
class GrowthBench(TensorBenchmark):
    """Every context, type and thread count is a cell; all policies and the two dense baselines take turns in it.

    Dense attention of a long prompt would take hours. It runs on rows from the middle, which see half of the keys as
    rows do on average, and its time is multiplied by context / rows.
    """

    policies: tuple[ProfiledPolicy, ...]
    name = "growth"
    threads_apart = True

    def __post_init__(self) -> None:
        super().__post_init__()
        remedy = "use shorter --contexts, fewer --heads, or --dtypes bf16"
        for cell in self.cells():
            check_memory(self.label(cell), bytes_needed(cell, [p.policy for p in self.policies]), Cpu(), remedy)

    def shared(self) -> Facts:
        return super().shared() | {"what": "growth", "variants": [p.to_json() for p in self.policies]}

    def guess(self, cell: Facts) -> float:
        n, dense = cell["context"], WHOLE**2 / 2
        pairs = 2 * dense + len(self.policies) * n * min(n / 2, 6000 + n / 64)
        once = 4 * cell["heads"] * pairs * cell["dim"] / (80e9 * cell["threads"])
        return float(5 + max(cell["seconds"], LEAST_ROUNDS * once))

    def measure(self, cell: Facts) -> Facts:
        torch.set_num_threads(cell["threads"])
        n, count = cell["context"], cell["threads"]
        q, k, v = inputs.qkv(cell["heads"], cell["kv_heads"], n, n, cell["dim"], cell["dtype"])
        form, sdpa, dense = baselines(q, k, v)
        contenders = [Contender.of("sdpa", sdpa, count), Contender.of("dense", dense, count)]
        contenders += [Contender(p.name, select_then_attend(q, k, v, p.policy), count) for p in self.policies]
        samples = interleave(contenders, seconds=cell["seconds"], most_rounds=cell["repeats"])
        kept = {profiled.name: select(q, k, profiled.policy).effective_budget for profiled in self.policies}
        return {
            "rounds": samples.rounds,
            "laps": samples.laps,
            "dense_rows": dense_rows(n),
            "sdpa_form": form,
            "kept": kept,
            "extra_mib": {name: mebibytes(x) for name, x in samples.extra_bytes.items()},
        }

    def table(self, machine: Facts, measured: Measured) -> Table:
        return growth_report.table(machine, measured)

    def figures(self, machine: Facts, measured: Measured) -> dict[str, Figure]:
        return {self.name: growth_report.figure(machine, measured)}


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
