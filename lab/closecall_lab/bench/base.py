"""What a benchmark is, and how one is run: cell by cell, storing each, then the table and the plots."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from closecall import info
from closecall.api import attend, covers_everything, select
from closecall.backends import cpu
from closecall.geometry import plan
from closecall.policy import Policy
from closecall.summaries import Summaries

from ..spine import figure, files
from ..spine.interrupt import interruptible
from ..spine.numbers import plural, size, threads
from ..spine.progress import countdown, say, written
from ..spine.results import Facts, Measured, Store
from ..spine.table import Column, Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from .validate.device import Device


class Benchmark(ABC):
    """Cells and results are JSON values; a cell names everything its result depends on."""

    name: str  # of its files

    @property
    def warnings(self) -> list[str]:
        """What to know before the run: said first, and noted under the table."""
        return []

    @abstractmethod
    def cells(self) -> list[Facts]:
        """What to measure, in the order to do it."""

    @abstractmethod
    def label(self, cell: Facts) -> str:
        """The cell in a few words, for the progress line."""

    @abstractmethod
    def guess(self, cell: Facts) -> float:
        """About how many seconds measuring takes; only proportions matter once cells have finished."""

    @abstractmethod
    def measure(self, cell: Facts) -> Facts: ...

    @abstractmethod
    def table(self, machine: Facts, measured: Measured) -> Table: ...

    def figures(self, machine: Facts, measured: Measured) -> dict[str, Figure]:
        """Plots by file stem."""
        return {}


@dataclass(frozen=True)
class TensorBenchmark(Benchmark):
    """A benchmark on tensors of its own: every combination of contexts, types and dims is a cell.

    All thread counts take turns in a cell, or, if `threads_apart`, each has cells of its own.
    """

    threads_apart: ClassVar[bool] = False
    contexts: tuple[int, ...]
    dtypes: tuple[str, ...]
    dims: tuple[int, ...]
    threads: tuple[int, ...]
    heads: int
    kv_heads: int
    repeats: int
    seconds: float

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(f"--heads {self.heads} is not a multiple of --kv-heads {self.kv_heads}")

    def shared(self) -> Facts:
        """What all cells have in common."""
        return {
            "heads": self.heads,
            "kv_heads": self.kv_heads,
            "tier": tier(),
            "repeats": self.repeats,
            "seconds": self.seconds,
        }

    def cells(self) -> list[Facts]:
        shared = self.shared()
        return [
            {"context": n, "dtype": dtype, "dim": dim, "threads": t, **shared}
            for n in sorted(self.contexts)
            for t in (self.threads if self.threads_apart else [list(self.threads)])
            for dim in self.dims
            for dtype in self.dtypes
        ]

    def label(self, cell: Facts) -> str:
        about = f"{size(cell['context'])} {cell['dtype']} D={cell['dim']}"
        return f"{about}, {threads(cell['threads'])}" if self.threads_apart else about

    def guess(self, cell: Facts) -> float:
        """Guesses for one row over a cache; benchmarks of whole prompts guess themselves."""
        return float(cell["seconds"] + cell["context"] * cell["kv_heads"] * cell["dim"] / 1e8)


def where(machine: Facts, cell: Facts) -> str:
    """The machine and the shape of the tensors, for headings."""
    heads = f"{plural(cell['heads'], 'query head')} on {plural(cell['kv_heads'], 'key head')}"
    return f"{machine['cpu']}, {cell['tier'] or 'no native code'}, torch {machine['torch']}, {heads}"


def cell_columns(context: str = "context") -> tuple[Column, ...]:
    """The columns that name a cell of a `TensorBenchmark`."""
    length = Column(context, lambda r: size(r["context"]))
    return length, Column("type", "dtype", left=True), Column("D", "dim"), Column("threads")


def medians_note(measured: Measured) -> str:
    return f"Medians of at least {min(r['rounds'] for _, r in measured)} interleaved rounds; standard normal q, k, v."


def select_then_attend(
    q: Tensor, k: Tensor, v: Tensor, policy: Policy, summaries: Summaries | None = None
) -> dict[str, Callable[[Any], Any]]:
    """The two steps of sparse attention, to be timed apart."""
    return {
        "select": lambda _: select(q, k, policy, summaries=summaries),
        "attend": lambda selection: attend(q, k, v, selection),
    }


def check_memory(what: str, needed: int, device: Device, remedy: str) -> None:
    """Refuses a measurement for which the device has too little free memory, before anything is allocated."""
    free = device.free_bytes()
    if free is not None and needed > free:
        raise ValueError(f"{what} needs about {needed:,} bytes of memory and {free:,} are there: {remedy}")


def tier() -> str | None:
    """The instruction set of the native code, if it is built."""
    return cpu.tier() if cpu.tiers() else None


def label(cell: Facts) -> str:
    return f"{size(cell['context'])} {cell['dtype']}, {threads(cell['threads'])}"


def uncut(policies: Iterable[tuple[str, Policy]], contexts: Sequence[int]) -> list[str]:
    """A warning for every policy that keeps all blocks at some of the contexts, and so is dense there."""
    warnings = []
    for name, policy in policies:
        whole = [n for n in contexts if covers_everything(policy, plan(1, n, n, policy.block, policy.tile))]
        if whole and policy.rule is not None and name != "dense":
            warnings.append(
                f"{name} cuts nothing at {', '.join(map(size, sorted(whole)))}: its budget covers every block there. "
                "Longer contexts or a smaller --budget show what it does."
            )
    return warnings


def run(bench: Benchmark, out: Path, *, fresh: bool = False) -> None:
    """Measures what is not there yet, prints the table, and leaves `NAME.json`, `.md`, `.png` and `.svg` in `out`."""
    for warning in bench.warnings:
        say(f"warning: {warning}")
    machine = info.machine()
    store = Store(out / f"{bench.name}.json", fresh=fresh)
    cells = bench.cells()
    todo = [cell for cell in cells if store.find(machine, cell) is None]
    if len(todo) < len(cells):
        say(f"{len(cells) - len(todo)} of {len(cells)} cells are in {store.path} already (--fresh measures them again)")
    with interruptible(
        f"closecall: interrupted; finished cells are in {store.path}: the same command goes on from there"
    ):
        for cell in countdown(todo, bench.label, bench.guess):
            store.add(machine, cell, bench.measure(cell))
    measured = [(cell, result) for cell in cells if (result := store.find(machine, cell)) is not None]
    table = bench.table(machine, measured)
    page = files.write(out / f"{bench.name}.md", table.markdown())
    written([store.path, page, *figure.save(bench.figures(machine, measured), out)])
    print(table.text())
