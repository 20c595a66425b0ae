"""Times one query row over a long cache, every key read, against torch SDPA, on each number of threads."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from closecall import attention

from ...spine import inputs
from ...spine.numbers import mebibytes, threads, three_digits
from ...spine.results import Facts, Measured
from ...spine.table import Column, Table
from ...spine.timing import Contender, interleave
from .. import over_context
from ..base import Benchmark, TensorBenchmark, cell_columns, medians_note, where

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HELP = "one query row over a long cache"
FULL = {"contexts": "4k,16k,32k,64k,128k", "dims": "128", "threads": "1,all", "heads": "32", "kv_heads": "8",
        "seconds": 3.0, "repeats": "15"}  # fmt: skip
QUICK = FULL | {"contexts": "4k,16k", "seconds": 1.0}
COLOURS = ("#c2410c", "#1d4ed8", "#047857", "#6b7280")
COLUMNS = (
    *cell_columns("cache"),
    Column("SDPA ms", lambda r: three_digits(r["sdpa_ms"])),
    Column("ours ms", lambda r: three_digits(r["ours_ms"])),
    Column("vs SDPA", "vs_sdpa", ".2f"),
    Column("GB/s", "gb_per_second", ".1f"),
    Column("scaling", "one_thread_over_all", ".2f"),
    Column("extra MiB", "extra_mib", ".1f"),
    Column("SDPA form", "sdpa_form", left=True),
)


def options(parser: argparse.ArgumentParser) -> None:
    """It has none of its own."""


def make(args: argparse.Namespace, shared: dict[str, Any]) -> Benchmark:
    return DecodeBench(**shared)


@dataclass(frozen=True)
class DecodeBench(TensorBenchmark):
    """All thread counts take turns in a cell."""

    name = "decode"

    def measure(self, cell: Facts) -> Facts:
        q, k, v = inputs.qkv(cell["heads"], cell["kv_heads"], 1, cell["context"], cell["dim"], cell["dtype"])
        contenders, forms = [], {}
        for n in cell["threads"]:
            torch.set_num_threads(n)
            forms[n], call = inputs.sdpa(q, k, v)
            contenders += [
                Contender.of(f"sdpa {n}", call, n),
                Contender.of(f"ours {n}", lambda: attention(q, k, v, "dense"), n),
            ]
        samples = interleave(contenders, seconds=cell["seconds"], most_rounds=cell["repeats"])
        rows = []
        for n in cell["threads"]:
            ours, theirs = f"ours {n}", f"sdpa {n}"
            rows.append(
                {
                    "threads": n,
                    "sdpa_form": forms[n],
                    "sdpa_ms": 1000 * samples.median(theirs),
                    "ours_ms": 1000 * samples.median(ours),
                    "vs_sdpa": samples.ratio(theirs, ours),
                    "gb_per_second": (k.nbytes + v.nbytes) / samples.median(ours) / 1e9,
                    "one_thread_over_all": samples.ratio("ours 1", ours) if n > 1 else None,
                    "extra_mib": mebibytes(samples.extra_bytes[ours]),
                }
            )
        return {"rounds": samples.rounds, "rows": rows}

    def table(self, machine: Facts, measured: Measured) -> Table:
        notes = [
            "vs SDPA: its time over ours on as many threads; above 1 we are faster. GB/s: of keys and values read.",
            "scaling: one thread's time over this row's.",
            medians_note(measured),
            "SDPA is torch's flash kernel, in the faster of its forms for grouped heads.",
        ]
        return Table(f"Decode: {where(machine, measured[0][0])}", COLUMNS, _rows(measured), notes, keys=4)

    def figures(self, machine: Facts, measured: Measured) -> dict[str, Figure]:
        by_cell: dict[tuple[object, ...], Facts] = {}
        for row in _rows(measured):
            cell = by_cell.setdefault((row["context"], row["dtype"], row["dim"]), dict(row))
            cell[f"vs_sdpa_{row['threads']}"] = row["vs_sdpa"]
        series = [
            over_context.Series(f"vs_sdpa_{n}", threads(n), COLOURS[i % len(COLOURS)], "os^D"[i % 4])
            for i, n in enumerate(self.threads)
        ]
        figure = over_context.speedups(
            title="Decode: how much faster than torch SDPA?",
            subtitle=f"one query row, every key; {where(machine, measured[0][0])}",
            rows=list(by_cell.values()),
            series=series,
            panels=("dtype", "dim"),
        )
        return {self.name: figure}


def _rows(measured: Measured) -> list[Facts]:
    return [cell | row for cell, result in measured for row in result["rows"]]
