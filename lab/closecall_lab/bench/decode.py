"""One query row over a long cache: our kernel run dense against torch SDPA, on one thread and on all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from closecall import attention
from closecall.backends import cpu

from ..spine import inputs, plot
from ..spine.results import Facts
from ..spine.table import Column, Table
from ..spine.timing import Contender, interleave

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLUMNS = (
    Column("cache", lambda r: inputs.size(r["context"])),
    Column("type", lambda r: r["dtype"], left=True),
    Column("D", lambda r: r["dim"]),
    Column("threads", lambda r: r["threads"]),
    Column("SDPA ms", lambda r: inputs.three_digits(r["sdpa_ms"])),
    Column("ours ms", lambda r: inputs.three_digits(r["ours_ms"])),
    Column("vs SDPA", lambda r: r["vs_sdpa"], ".2f"),
    Column("GB/s", lambda r: r["gb_per_second"], ".1f"),
    Column("scaling", lambda r: r["one_thread_over_all"], ".2f"),
    Column("extra MiB", lambda r: r["extra_mib"], ".1f"),
    Column("SDPA form", lambda r: r["sdpa_form"], left=True),
)


@dataclass(frozen=True)
class DecodeBench:
    """Every combination of cache lengths, types and dims is a cell, and all thread counts take turns in it."""

    contexts: tuple[int, ...]
    dtypes: tuple[str, ...]
    dims: tuple[int, ...]
    threads: tuple[int, ...]
    heads: int
    kv_heads: int
    repeats: int
    seconds: float
    name: str = "decode"

    def cells(self) -> list[Facts]:
        shared = {
            "threads": list(self.threads),
            "heads": self.heads,
            "kv_heads": self.kv_heads,
            "tier": cpu.tier() if cpu.tiers() else None,
            "repeats": self.repeats,
            "seconds": self.seconds,
        }
        return [
            {"context": n, "dtype": dtype, "dim": dim, **shared}
            for n in sorted(self.contexts)
            for dim in self.dims
            for dtype in self.dtypes
        ]

    def label(self, cell: Facts) -> str:
        return f"cache of {inputs.size(cell['context'])} {cell['dtype']} D={cell['dim']}"

    def guess(self, cell: Facts) -> float:
        return float(cell["seconds"] + cell["context"] * cell["kv_heads"] * cell["dim"] / 1e8)

    def measure(self, cell: Facts) -> Facts:
        q, k, v = inputs.qkv(cell["heads"], cell["kv_heads"], 1, cell["context"], cell["dim"], cell["dtype"])
        contenders, forms = [], {}
        for threads in cell["threads"]:
            torch.set_num_threads(threads)
            forms[threads], call = inputs.sdpa(q, k, v)
            contenders += [
                Contender.of(f"sdpa {threads}", call, threads),
                Contender.of(f"ours {threads}", lambda: attention(q, k, v, "dense"), threads),
            ]
        samples = interleave(contenders, seconds=cell["seconds"], most_rounds=cell["repeats"])
        rows = []
        for threads in cell["threads"]:
            ours, theirs = f"ours {threads}", f"sdpa {threads}"
            extra = samples.extra_bytes[ours]
            rows.append(
                {
                    "threads": threads,
                    "sdpa_form": forms[threads],
                    "sdpa_ms": 1000 * samples.median(theirs),
                    "ours_ms": 1000 * samples.median(ours),
                    "vs_sdpa": samples.ratio(theirs, ours),
                    "gb_per_second": (k.nbytes + v.nbytes) / samples.median(ours) / 1e9,
                    "one_thread_over_all": samples.ratio("ours 1", ours) if threads > 1 else None,
                    "extra_mib": None if extra is None else extra / 2**20,
                }
            )
        return {"rounds": samples.rounds, "rows": rows}

    def table(self, machine: Facts, measured: list[tuple[Facts, Facts]]) -> Table:
        rounds = [r["rounds"] for _, r in measured]
        notes = [
            "vs SDPA: its time over ours on as many threads; above 1 we are faster. GB/s: of keys and values read.",
            "scaling: one thread's time over this row's.",
            f"Medians of at least {min(rounds)} interleaved rounds; standard normal q, k, v.",
            "SDPA is torch's flash kernel, in the faster of its forms for grouped heads.",
        ]
        return Table(f"Decode: {self._where(machine, measured[0][0])}", COLUMNS, _rows(measured), notes)

    def figures(self, machine: Facts, measured: list[tuple[Facts, Facts]]) -> dict[str, Figure]:
        by_cell: dict[tuple[object, ...], Facts] = {}
        for row in _rows(measured):
            panel = by_cell.setdefault((row["context"], row["dtype"], row["dim"]), dict(row))
            panel[f"vs_sdpa_{row['threads']}"] = row["vs_sdpa"]
        colours = ("#c2410c", "#1d4ed8", "#047857", "#6b7280")
        series = [
            plot.Series(f"vs_sdpa_{n}", inputs.threads(n), colours[i % len(colours)], "os^D"[i % 4])
            for i, n in enumerate(self.threads)
        ]
        figure = plot.speedups(
            title="Decode: how much faster than torch SDPA?",
            subtitle=f"one query row, every key; {self._where(machine, measured[0][0])}",
            rows=list(by_cell.values()),
            series=series,
            panels=("dtype", "dim"),
        )
        return {self.name: figure}

    def _where(self, machine: Facts, cell: Facts) -> str:
        tier = cell["tier"] or "no native code"
        return (
            f"{machine['cpu']}, {tier}, torch {machine['torch']}; {self.heads} query heads on {self.kv_heads} key heads"
        )


def _rows(measured: list[tuple[Facts, Facts]]) -> list[Facts]:
    return [cell | row for cell, result in measured for row in result["rows"]]
