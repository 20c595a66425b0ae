"""The compile report: every kernel variant for every target, as a table, JSON and Markdown."""

from __future__ import annotations

import dataclasses
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

    def problems(self) -> list[str]:
        """A line for each variant that does not compile or breaks an aim."""
        broken = [f"{f.name} for {f.arch}: {', '.join(f.problems())}" for f in self.facts if f.problems()]
        return broken + [f.error for f in self.failures]

    def to_dict(self) -> dict[str, Any]:
        return {
            "closecall_gpu_report": JSON_VERSION,
            "closecall": _version("closecall"),
            "triton": _version("triton"),
            "variants": [f.to_dict() for f in self.facts],
            "failures": [{"arch": f.arch, "name": f.name, "error": f.error} for f in self.failures],
        }


def _version(package: str) -> str | None:
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
        names = {arch: [name for name in found if kernel.lower() in name.lower()] for arch, found in names.items()}
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
    """Compiles what `archs` and `kernel`, a part of variants' names, select, in `jobs` processes (one per core)."""
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
            for job, result in zip(todo, pool.map(one, todo), strict=True):
                results.append(result)
                progress(len(results), len(todo), job)
    finally:
        for worker in workers:
            worker.close()
    options = [f"--arch {','.join(archs)}"] if tuple(archs) != tuple(devices.TARGETS) else []
    options += [f"--kernel '{kernel}'"] if kernel is not None else []
    return Report(
        [r for r in results if isinstance(r, Facts)],
        [r for r in results if isinstance(r, Failure)],
        " ".join(["", *options]),
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
    title = f"What the GPU kernels compile to: {len(rows)} variants, triton {_version('triton')}"
    return Table(title, COLUMNS, rows, NOTES, keys=2)


def _kernel(name: str) -> str:
    """A variant's name up to its head dim."""
    return name.split(" D")[0]


def _span(values: Sequence[int]) -> str:
    return f"{min(values)}" if min(values) == max(values) else f"{min(values)} to {max(values)}"


def _summary(report: Report) -> list[str]:
    """A line for each kernel and target."""
    lines = ["| kernel | target | variants | registers | stack and spills | most shared memory | resident warps |"]
    lines.append("|---|---|---:|---:|---:|---:|---:|")
    for kernel, arch in dict.fromkeys((_kernel(f.name), f.arch) for f in report.facts):
        mine = [f for f in report.facts if (_kernel(f.name), f.arch) == (kernel, arch)]
        target = devices.target(arch)
        lines.append(
            f"| {kernel} | {arch} | {len(mine)} | {_span([f.registers for f in mine])} "
            f"| {sum(f.stack + f.spills for f in mine)} | {max(f.shared for f in mine) / devices.KIB:.1f} "
            f"of {target.shared_per_block // devices.KIB} KiB | {_span([f.resident_warps for f in mine])} |"
        )
    return lines


def text(report: Report) -> str:
    """For a terminal."""
    shown = table(report).text() if report.facts else "No variant compiled."
    return "\n".join([shown, *(f"does not compile: {f.error}" for f in report.failures)])


def markdown(report: Report, file: str) -> str:
    """The whole page that `--markdown FILE` writes."""
    broken = report.problems()
    verdict = (
        [f"{len(broken)} of {len(report.facts) + len(report.failures)} break an aim:", "", *(f"- {b}" for b in broken)]
        if broken
        else [
            "Every variant meets the aims: no spills to memory, no stack, shared memory within the target's limit, and",
            "copies of later turns on their way in every attention loop. The tests check the same.",
        ]
    )
    if parked := [f for f in report.facts if f.scalar_spills]:
        most = max(f.scalar_spills or 0 for f in parked)
        names = ", ".join(dict.fromkeys(f"{_kernel(f.name)} on {f.arch}" for f in parked))
        verdict.append(f"{len(parked)} ({names}) park up to {most} scalar registers in lanes of vector registers.")
    # Of hundreds of variants the page lists one by one those with a loop to pipeline, and those that break an aim.
    shown = [f for f in report.facts if f.must_pipeline or f.problems()] or report.facts
    full = table(dataclasses.replace(report, facts=shown)).markdown().split("\n", 2)[2] if shown else ""
    return "\n".join(
        [
            "# What the GPU kernels compile to",
            "",
            f"Written by `{COMMAND}{report.selected} --markdown {file}` (triton {_version('triton')}), which needs no",
            "GPU: Triton compiles for a target that is not here, and registers, stack and shared memory are read from",
            "the binary, loops and their instructions from the emitted PTX or AMD assembly.",
            "What it cannot tell is speed: that takes a GPU.",
            "",
            *verdict,
            "",
            *(_summary(report) if report.facts else []),
            "",
            "## The attention kernel",
            "",
            f"All {len(report.facts)} variants one by one: `{COMMAND}{report.selected}`.",
            "",
            full,
        ]
    )
