"""Runs a benchmark: cell by cell, storing each, then the table and the plots."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from closecall import info

from ..spine.interrupt import interruptible
from ..spine.results import Facts, Store
from ..spine.table import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Bench(Protocol):
    """What a benchmark is. Cells and results are JSON values; a cell names everything its result depends on."""

    @property
    def name(self) -> str: ...

    def cells(self) -> list[Facts]:
        """What to measure, in the order to do it."""

    def label(self, cell: Facts) -> str:
        """The cell in a few words, for the progress line."""

    def guess(self, cell: Facts) -> float:
        """About how many seconds measuring takes; only proportions matter once cells have finished."""

    def measure(self, cell: Facts) -> Facts: ...

    def table(self, machine: Facts, measured: list[tuple[Facts, Facts]]) -> Table: ...

    def figures(self, machine: Facts, measured: list[tuple[Facts, Facts]]) -> dict[str, Figure]:
        """Plots by file stem. Only called where matplotlib is installed."""


def _log(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s" if minutes else f"{rest} s"


def _measure(bench: Bench, store: Store, machine: Facts) -> None:
    cells = bench.cells()
    todo = [cell for cell in cells if store.find(machine, cell) is None]
    if len(todo) < len(cells):
        _log(
            f"{len(cells) - len(todo)} of {len(cells)} cells are in {store.path} already (--fresh measures them again)"
        )
    guessed = spent = 0.0
    for number, cell in enumerate(todo, 1):
        left = sum(map(bench.guess, todo[number - 1 :])) * (spent / guessed if guessed else 1.0)
        _log(f"[{number}/{len(todo)}] {bench.label(cell)} ... about {_duration(left)} left")
        begin = time.perf_counter()
        store.add(machine, cell, bench.measure(cell))
        spent += time.perf_counter() - begin
        guessed += bench.guess(cell)


def _plot(bench: Bench, out: Path, machine: Facts, measured: list[tuple[Facts, Facts]]) -> list[Path]:
    try:
        figures = bench.figures(machine, measured)
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("matplotlib"):
            raise
        _log("no plot: matplotlib is not installed (pip install 'closecall[plot]')")
        return []
    written = []
    for stem, figure in figures.items():
        for suffix in ("png", "svg"):
            figure.savefig(out / f"{stem}.{suffix}")
            written.append(out / f"{stem}.{suffix}")
    return written


def run(bench: Bench, out: Path, *, fresh: bool = False) -> None:
    """Measures what is not there yet, prints the table, and leaves `NAME.json`, `.md`, `.png` and `.svg` in `out`."""
    machine = info.machine()
    store = Store(out / f"{bench.name}.json", fresh=fresh)
    with interruptible(
        f"closecall: interrupted; finished cells are in {store.path}: the same command goes on from there"
    ):
        _measure(bench, store, machine)
    measured = [(cell, result) for cell in bench.cells() if (result := store.find(machine, cell)) is not None]
    table = bench.table(machine, measured)
    page = out / f"{bench.name}.md"
    page.write_text(table.markdown())
    files = [store.path, page, *_plot(bench, out, machine, measured)]
    _log("written: " + " ".join(map(str, files)))
    print(table.text())
