"""The compile report: every kernel variant for every target, as a table and JSON. `page` makes one page of it."""

from __future__ import annotations

import os
import queue
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from closecall.registry import unknown

from ..spine.table import Column, Table
from . import devices
from .compile import CompileError, Compiler
from .facts import Facts

JSON_VERSION = 1
COMMAND = "closecall gpu-report"
Job = tuple[str, str]  # target, variant


@dataclass(frozen=True)
class Failure:
    arch: str
    name: str
    error: str


@dataclass(frozen=True)
class Report:
    """In the order of targets and variants, whoever finished first."""

    facts: Sequence[Facts]
    failures: Sequence[Failure]
    selected: str  # the options that chose what is in it
    left: int = 0  # variants that an interruption left out

    def unfinished(self) -> list[str]:
        """A line if something is left out."""
        if not self.left:
            return []
        total = self.left + len(self.facts) + len(self.failures)
        return [f"Interrupted: {self.left} of {total} variants are left out; the same command goes on from here."]

    def problems(self) -> list[str]:
        """A line for each variant that does not compile or breaks an aim."""
        broken = [f"{f.name} for {f.arch}: {', '.join(f.problems())}" for f in self.facts if f.problems()]
        return broken + [f.error for f in self.failures]

    def to_dict(self) -> dict[str, Any]:
        return {
            "closecall_gpu_report": JSON_VERSION,
            "closecall": version_of("closecall"),
            "triton": version_of("triton"),
            "variants": [f.to_dict() for f in self.facts],
            "failures": [{"arch": f.arch, "name": f.name, "error": f.error} for f in self.failures],
        }


def version_of(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _jobs(archs: Sequence[str], kernel: str | None, compiler: Compiler) -> list[Job]:
    names = {arch: compiler.names(arch) for arch in archs}
    if kernel is not None:
        every = sorted({name for found in names.values() for name in found})
        parts = [part.strip().lower() for part in kernel.split(",") if part.strip()]
        names = {a: [name for name in found if any(p in name.lower() for p in parts)] for a, found in names.items()}
        if not any(names.values()):
            raise unknown("kernel", kernel, every)
    return [(arch, name) for arch in archs for name in names[arch]]


def gather(
    archs: Sequence[str] = tuple(devices.TARGETS),
    *,
    kernel: str | None = None,
    jobs: int | None = None,
    compiler: Callable[[], Compiler] | None = None,
    progress: Callable[[int, int, Job], None] = lambda done, total, job: None,
) -> Report:
    """Compiles what `archs` and `kernel` select, in `jobs` processes (one per core). `kernel` is a part of variants'
    names, or several with commas between. An interruption (control-C) ends it early, with what is done by then."""
    for arch in archs:
        devices.target(arch)
    count = cores() if jobs is None else jobs
    if count < 1:
        raise ValueError(f"jobs must be at least 1, got {count}")
    free: queue.SimpleQueue[Compiler] = queue.SimpleQueue()
    workers = [(compiler or Compiler)() for _ in range(count)]
    try:
        todo = _jobs(archs, kernel, workers[0])
        for worker in workers:
            free.put(worker)

        def one(job: Job) -> Facts | Failure:
            mine = free.get()
            try:
                return mine.facts(*job)
            except CompileError as error:
                return Failure(*job, str(error))
            finally:
                free.put(mine)

        results: list[Facts | Failure] = []
        with ThreadPoolExecutor(count) as pool:
            made = [pool.submit(one, job) for job in todo]
            try:
                for job, future in zip(todo, made, strict=True):
                    results.append(future.result())
                    progress(len(results), len(todo), job)
            except KeyboardInterrupt:
                pool.shutdown(wait=False, cancel_futures=True)
    finally:
        for worker in workers:
            worker.close()
    options = [f"--arch {','.join(archs)}"] if tuple(archs) != tuple(devices.TARGETS) else []
    options += [f"--kernel '{kernel}'"] if kernel is not None else []
    return Report(
        [r for r in results if isinstance(r, Facts)],
        [r for r in results if isinstance(r, Failure)],
        " ".join(["", *options]),
        left=len(todo) - len(results),
    )


def _tensor(row: dict[str, Any]) -> str | None:
    if not row["loop"]:
        return None
    whole = row["tensor_per_block"]
    many = f"{row['tensor'] if whole is None else whole} {row['tensor_kind'] or ''}".rstrip()
    return many if whole is not None else f"{many} a turn"


COLUMNS = (
    Column("variant", lambda r: r["name"], left=True),
    Column("target", lambda r: r["arch"], left=True),
    Column("warps", lambda r: r["num_warps"]),
    Column("stages", lambda r: r["num_stages"]),
    Column("registers", lambda r: r["registers"]),
    Column("stack", lambda r: r["stack"]),
    Column("spills", lambda r: r["spills"]),
    Column("scalar spills", lambda r: r["scalar_spills"]),
    Column("shared KiB", lambda r: r["shared"] / devices.KIB, ".1f"),
    Column("resident blocks", lambda r: r["resident_blocks"]),
    Column("limited by", lambda r: r["limit"], left=True),
    Column("overlap", lambda r: r["overlap"], left=True),
    Column("warps over", lambda r: r["warps"], left=True),
    Column("barriers", lambda r: r["barriers"] if r["loop"] else None),
    Column("shared stores", lambda r: r["shared_stores"] if r["loop"] else None),
    Column("instructions", lambda r: r["instructions"] if r["loop"] else None),
    Column("tensor-core", _tensor, left=True),
    Column("broken aims", lambda r: ", ".join(r["problems"]) or None, left=True),
)

NOTES = (
    "Compiled ahead of time without a GPU; nothing here was run or timed.",
    "registers: per thread (AMD: vector and accumulation registers). stack, spills: bytes; AMD: spilled registers. "
    "NVIDIA keeps spills on the stack, so 0 there means none.",
    "scalar spills: AMD's scalar registers parked in lanes of vector registers. They cost instructions but no memory, "
    "so they are shown and do not count as a broken aim.",
    "resident blocks: thread blocks that registers, shared memory, tensor memory and the target's limits let one "
    "multiprocessor (AMD: compute unit) hold.",
    "overlap: of the hot loop, found by its products. NVIDIA: 16-byte or bulk copies, how many groups of copies each "
    "wait leaves on their way (0: it waits for all, so nothing overlaps), and turns that the buffers hold. AMD: wide "
    "loads of device memory still in flight when tensor-core work is issued.",
    "warps over: rows x columns of the products; with one column a row's softmax stays inside a warp. Blank where "
    "products are a warp group's own (tcgen05).",
    "barriers, shared stores, instructions: of one turn of that loop, in PTX or AMD assembly.",
    "tensor-core: instructions that each warp (wgmma, tcgen05: warp group) issues per key block, counted in the main "
    "loop; of kernels that do not go through key blocks, per turn of the loop.",
    "sm_80: A100; sm_86: RTX 30; sm_89: RTX 40, L4, L40S; sm_90: H100, H200; sm_100: B200; sm_120: RTX 50; gfx942: "
    "MI300.",
)


def table(report: Report) -> Table:
    rows = [f.to_dict() for f in report.facts]
    title = f"What the GPU kernels compile to: {len(rows)} variants, triton {version_of('triton')}"
    return Table(title, COLUMNS, rows, NOTES, keys=2)


def text(report: Report) -> str:
    """For a terminal."""
    shown = table(report).text() if report.facts else "No variant compiled."
    return "\n".join([shown, *(f"does not compile: {f.error}" for f in report.failures), *report.unfinished()])
