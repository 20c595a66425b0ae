"""Runs a validation: every check, then every timing, storing each; then the report."""

from __future__ import annotations

import hashlib
import importlib.metadata
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

import closecall
from closecall import backends, info

from ...spine.interrupt import interruptible
from ...spine.results import Facts, Store
from . import engine, report, speed, verdict
from .behaviour import Behaviour
from .cases import Case
from .check import WrongAnswerError, check
from .device import Device
from .graphs import first_line

GIB = 2**30


@dataclass(frozen=True)
class Job:
    """Something to do once. Its cell names all that its result depends on, beside the machine."""

    cell: Facts
    label: str
    run: Callable[[], Facts]


def _log(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def fingerprint() -> str:
    """Of the package's own sources, so that results of different code are told apart."""
    root = Path(str(closecall.__file__)).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def _triton() -> str | None:
    found = {d.metadata["Name"]: d.version for d in importlib.metadata.distributions()}
    return next((found[name] for name in ("triton", "pytorch-triton-rocm") if name in found), None)


def machine(device: Device) -> Facts:
    """What a result depends on."""
    return device.facts() | info.machine() | {"triton": _triton(), "sources": fingerprint()}


def resolve(backend: str, device: Device, settings: speed.Speed | None = None) -> str:
    """The backend to validate: on a GPU, `auto` means the kernels written for it, not what one falls back to. Raises
    ValueError where it cannot run here, or not on the tensors that are to be timed."""
    probes = [torch.empty(1, 1, 1, 64, device=device.place)]
    if settings is not None:
        probes.append(torch.empty(1, 1, 1, settings.dim, device=device.place, dtype=info.DTYPES[settings.dtype]))
    if backend == "auto":
        backend = backends.explain(probes[0]).name if not device.is_gpu else "triton"
    for probe in probes:
        backends.choose(backend, probe)
    return backend


def refuse_what_does_not_fit(cells: Sequence[Facts], device: Device, backend: str) -> None:
    """Before anything is allocated."""
    there = device.free_bytes()
    for cell in cells:
        needed = speed.bytes_needed(cell, backend, graphs=device.is_gpu)
        if there is not None and needed > there:
            raise ValueError(
                f"--contexts {cell['context']} needs up to {needed:,} bytes ({needed / GIB:.1f} GiB) on "
                f"{device.place}, and {there:,} ({there / GIB:.1f} GiB) are free: leave it out, or take fewer --heads"
            )


def _check_job(what: Case | Behaviour, device: Device, backend: str) -> Job:
    def run() -> Facts:
        if isinstance(what, Behaviour):
            return what.run(device, backend)
        needed, there = what.bytes_needed(), device.free_bytes()
        if there is not None and needed > there:
            return {"skipped": f"needs {needed / GIB:.1f} GiB, {there / GIB:.1f} GiB are free"}
        return check(what, device, backend)

    return Job({"kind": "check", "case": what.name, "backend": backend}, what.name, run)


def check_jobs(cases: Sequence[Case | Behaviour], device: Device, backend: str) -> list[Job]:
    possible = [c for c in cases if not isinstance(c, Behaviour) or c.possible(device, backend)]
    return [_check_job(what, device, backend) for what in possible]


def speed_jobs(settings: speed.Speed | None, device: Device, backend: str) -> list[Job]:
    if settings is None:
        return []

    def job(cell: Facts) -> Job:
        return Job(
            {"kind": "timing", "backend": backend} | cell,
            speed.label(cell),
            lambda: speed.measure(cell, settings, device, backend),
        )

    return [job(cell) for cell in settings.cells()]


def _attempt(job: Job, device: Device) -> tuple[Facts, bool]:
    """The result, and whether the device is still there. Whatever goes wrong is a result too: the rest must run."""
    try:
        return {"problem": None} | job.run(), True
    except WrongAnswerError as error:
        return {"problem": str(error)}, True
    except Exception as error:
        said = first_line(error)
        if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(error):
            return {"problem": None, "no_memory": said}, not device.is_lost()
        return {"problem": said}, not device.is_lost()


def _run_all(jobs: Sequence[Job], store: Store, here: Facts, device: Device) -> bool:
    """Whether all were tried. What failed before comes last, so that one crash does not hide the others for good."""
    known = {job.label: store.find(here, job.cell) for job in jobs}
    failed = [job for job in jobs if (result := known[job.label]) is not None and not report.done(result)]
    todo = [job for job in jobs if known[job.label] is None] + failed
    if len(todo) < len(jobs):
        _log(f"{len(jobs) - len(todo)} of {len(jobs)} are in {store.path} already (--fresh does them again)")
    for number, job in enumerate(todo, 1):
        result, alive = _attempt(job, device)
        store.records = [r for r in store.records if (r["machine"], r["cell"]) != (here, job.cell)]
        store.add(here, job.cell, result)
        said = report.why(result) or ""
        _log(f"[{number}/{len(todo)}] {job.label}: {report.verdict(result)}{': ' if said else ''}{said}")
        if not alive:
            _log("the device does not answer after that: the same command goes on with the rest")
            return False
    return True


def run(
    device: Device,
    backend: str,
    cases: Sequence[Case | Behaviour],
    settings: speed.Speed | None,
    out: Path,
    *,
    fresh: bool = False,
    vllm_model: str | None = None,
) -> bool:
    """Checks and times what is not there yet, prints the report and leaves `validate.json` and `validate.md` in `out`.
    Whether everything was tried and right."""
    backend = resolve(backend, device, settings)
    if settings is not None:
        settings.check()
    here = machine(device)
    print("\n".join(report.environment(here | {"backend": backend})), flush=True)
    store = Store(out / "validate.json", fresh=fresh)
    checks, timings = check_jobs(cases, device, backend), speed_jobs(settings, device, backend)
    if vllm_model is not None:
        engine.require()
        cell: Facts = {"kind": "check", "case": engine.CASE, "backend": backend, "model": vllm_model}
        checks.append(Job(cell, engine.CASE, lambda: engine.check(vllm_model, device.is_gpu)))
    refuse_what_does_not_fit([j.cell for j in timings if store.find(here, j.cell) is None], device, backend)
    with (
        torch.no_grad(),
        interruptible(f"closecall: interrupted; what is done is in {store.path}: the same command goes on from there"),
    ):
        complete = _run_all([*checks, *timings], store, here, device)
    done = [[(j.cell, r) for j in jobs if (r := store.find(here, j.cell)) is not None] for jobs in (checks, timings)]
    tables = [report.checks(done[0], backend)] if done[0] else []
    if settings is not None and done[1]:
        tables.append(report.times(here, done[1], settings, backend))
        tables += [launches] if (launches := report.kernels(done[1])).rows else []
    page = out / "validate.md"
    said = verdict.sentences(done[0], done[1], complete, store.path)
    page.write_text(report.page(here | {"backend": backend}, said, tables))
    _log(f"written: {store.path} {page}")
    for table in tables:
        print(f"\n{table.text()}")
    print("\n" + "\n".join(said))
    return complete and all(report.done(result) for part in done for _, result in part)
