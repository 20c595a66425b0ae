"""The compile report on one page: a line for every kernel, head dim and type, a column for every target."""

from __future__ import annotations

from . import devices
from .facts import Facts
from .report import COMMAND, NOTES, Report, version_of

LEGEND = (
    "Of the hot loop: `w3` copies that a wait leaves on their way (`w0`: it waits for all; no `w`: no copies), `b2` "
    "turns that the buffers hold, `4x1` warps over rows and columns, `2bar` barriers and `604i` instructions a turn. "
    "AMD: `2/2 ahead`, wide loads in flight while products are made.",
    "Of the kernel: `250r` registers a thread, `8st` bytes of stack (left out where there is none), `80K` shared "
    "memory, `x2` thread blocks on a multiprocessor. Bold: it breaks an aim.",
)


def _kernel(name: str) -> str:
    """A variant's name up to its head dim."""
    return name.split(" D")[0]


def cell(f: Facts) -> str:
    """All that matters of a variant, in a few letters."""
    parts = []
    if f.loop:
        if devices.target(f.arch).backend != "cuda":
            parts.append(f"{f.loads_ahead}/{f.wide_loads} ahead")
        elif f.copies:
            parts.append(f"w{min(f.waits, default=0)}")
        parts += [f"b{f.buffers}"] if f.buffers else []
        parts += [f.warps.replace(" x ", "x").replace(", ", "+")] if f.warps else []
        parts += [f"{f.barriers}bar", f"{f.instructions}i"]
    parts.append(f"{f.registers}r")
    parts += [f"{f.stack + f.spills}st"] if f.stack + f.spills else []
    parts += [f"{f.shared / devices.KIB:.3g}K", f"x{f.resident_blocks}"]
    words = " ".join(parts)
    return f"**{words}**" if f.problems() else words


def _table(report: Report) -> list[str]:
    archs = list(dict.fromkeys(f.arch for f in report.facts))
    found = {(f.name, f.arch): cell(f) for f in report.facts}
    lines = [f"| variant | {' | '.join(archs)} |", f"|---|{'---|' * len(archs)}"]
    names = dict.fromkeys(f.name for f in report.facts)
    return lines + [f"| {n} | {' | '.join(found.get((n, arch), '-') for arch in archs)} |" for n in names]


def _verdict(report: Report) -> list[str]:
    broken = report.problems()
    said = (
        [f"{len(broken)} of {len(report.facts) + len(report.failures)} break an aim:", "", *(f"- {b}" for b in broken)]
        if broken
        else [
            f"All {len(report.facts)} variants meet the aims: no spills to memory, no stack, shared memory within the",
            "target's limit, and copies of later turns on their way in every attention loop. The tests check the same.",
        ]
    )
    if parked := [f for f in report.facts if f.scalar_spills]:
        most = max(f.scalar_spills or 0 for f in parked)
        names = ", ".join(dict.fromkeys(f"{_kernel(f.name)} on {f.arch}" for f in parked))
        said += ["", f"{len(parked)} ({names}) park up to {most} scalar registers in lanes of vector registers."]
    return said


def markdown(report: Report, file: str) -> str:
    """The whole page that `--markdown FILE` writes."""
    return "\n".join(
        [
            "# What the GPU kernels compile to",
            "",
            f"Written by `{COMMAND}{report.selected} --markdown {file}` (triton {version_of('triton')}), which needs",
            "no GPU: Triton compiles for a target that is not here, and registers, stack and shared memory are read",
            "from the binary, loops and their instructions from the emitted PTX or AMD assembly.",
            "What it cannot tell is speed: that takes a GPU.",
            "",
            *report.unfinished(),
            *_verdict(report),
            "",
            *(f"- {line}" for line in LEGEND),
            f"- {NOTES[-1]}",
            "",
            *(_table(report) if report.facts else []),
        ]
    )
