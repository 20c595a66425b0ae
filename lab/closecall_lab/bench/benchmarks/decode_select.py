"""Times a sparse decoding step when its selection reads every key, and when it continues from kept summaries."""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass
from typing import Any

from closecall.backends import cpu
from closecall.policy import policy
from closecall.summaries import Summaries

from ...spine import inputs
from ...spine.numbers import three_digits
from ...spine.results import Facts, Measured
from ...spine.table import Column, Table
from ...spine.timing import Contender, Samples, interleave
from ..base import Benchmark, TensorBenchmark, cell_columns, medians_note, select_then_attend, uncut, where

HELP = "what a decoding step's selection costs, from scratch and from kept summaries"
FULL = {"contexts": "32k", "dims": "128", "threads": "1", "heads": "32", "kv_heads": "8", "budget": "33",
        "seconds": 6.0, "repeats": "15"}  # fmt: skip
QUICK = FULL | {"contexts": "8k", "seconds": 1.0}
POLICIES = ("quest", "auto")
COLUMNS = (
    *cell_columns("cache"),
    Column("policy", left=True),
    Column("select ms", lambda r: three_digits(r["select_ms"])),
    Column("kept", lambda r: three_digits(r["kept_select_ms"])),
    Column("times", "select_ratio", ".1f"),
    Column("step ms", lambda r: three_digits(r["step_ms"])),
    Column("kept", lambda r: three_digits(r["kept_step_ms"])),
    Column("times", "step_ratio", ".2f"),
    Column("kept MiB", "kept_mib", ".1f"),
)


def options(parser: argparse.ArgumentParser) -> None:
    """It has none of its own."""


def make(args: argparse.Namespace, shared: dict[str, Any]) -> Benchmark:
    if not cpu.tiers():
        raise ValueError("the native module is not built, so no summaries are kept: see `closecall info`")
    bench = DecodeSelectBench(**shared)
    if whole := uncut([("quest", policy("quest", budget=bench.budget))], bench.contexts):
        raise ValueError(f"there is nothing to select: {whole[0]}")
    return bench


@dataclass(frozen=True)
class DecodeSelectBench(TensorBenchmark):
    """All policies and thread counts take turns in a cell."""

    budget: int
    name = "decode_select"

    def shared(self) -> Facts:
        return super().shared() | {"policies": [policy(name, budget=self.budget).to_json() for name in POLICIES]}

    def measure(self, cell: Facts) -> Facts:
        q, k, v = inputs.qkv(cell["heads"], cell["kv_heads"], 1, cell["context"], cell["dim"], cell["dtype"])
        contenders, kept = [], {}
        for name in POLICIES:
            tried = policy(name, budget=self.budget)
            now = k.shape[2] - tried.block // 2  # the last block is half full, as it is on average
            tensors = (q, k[:, :, :now], v[:, :, :now])
            for threads in cell["threads"]:
                summaries = kept[name, threads] = Summaries()
                again, goes_on = select_then_attend(*tensors, tried), select_then_attend(*tensors, tried, summaries)
                contenders.append(Contender(_label(name, threads), again, threads))
                contenders.append(Contender(_label(name, threads, kept=True), goes_on, threads))
        samples = interleave(contenders, seconds=cell["seconds"], most_rounds=cell["repeats"])
        return {"rounds": samples.rounds, "rows": [_row(samples, *key, summaries) for key, summaries in kept.items()]}

    def table(self, machine: Facts, measured: Measured) -> Table:
        notes = [
            "select: of one query row; step: with its attention over the kept blocks. kept: the same going on from",
            "summaries of an earlier step. times: how much longer it takes without.",
            *(str(policy(name, budget=self.budget)) for name in POLICIES),
            medians_note(measured),
        ]
        rows = [cell | row for cell, result in measured for row in result["rows"]]
        return Table(f"Sparse decoding: {where(machine, measured[0][0])}", COLUMNS, rows, notes, keys=5)


def _label(name: str, threads: int, *, kept: bool = False) -> str:
    return f"{name} {threads}" + (" kept" if kept else "")


def _row(samples: Samples, name: str, threads: int, summaries: Summaries) -> Facts:
    without, kept = _label(name, threads), _label(name, threads, kept=True)
    pairs = zip(samples.seconds(without, "select"), samples.seconds(kept, "select"), strict=True)
    return {
        "policy": name,
        "threads": threads,
        "select_ms": 1000 * samples.median(without, "select"),
        "kept_select_ms": 1000 * samples.median(kept, "select"),
        "select_ratio": statistics.median(a / b for a, b in pairs),
        "step_ms": 1000 * samples.median(without),
        "kept_step_ms": 1000 * samples.median(kept),
        "step_ratio": samples.ratio(without, kept),
        "kept_mib": summaries.nbytes / 2**20,
    }
