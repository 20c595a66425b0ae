"""What this installation runs on: the machine, the backends, and what `backend="auto"` takes and why."""

from __future__ import annotations

import hashlib
import os
import platform
import re
from pathlib import Path
from typing import Any

import torch

from . import __version__, backends
from .backends import cpu

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


def cpu_model() -> str:
    """The processor's own name for itself, as far as the system tells."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    found = re.search(r"^(?:model name|Model)\s*:\s*(.+)$", text, re.MULTILINE)
    return found.group(1).strip() if found else platform.processor() or platform.machine()


def _cores() -> int:
    """How many cores this process may use, which in a container is not how many there are."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def native_build() -> str | None:
    """A fingerprint of the native module, so that results of different builds are told apart; None if not built."""
    module = getattr(cpu, "_native", None)
    path = getattr(module, "__file__", None)
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:12] if path else None


def machine() -> dict[str, Any]:
    """The facts that a measurement depends on."""
    return {
        "closecall": __version__,
        "native_build": native_build(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": cpu_model(),
        "cores": _cores(),
    }


def _native() -> dict[str, Any]:
    tiers = cpu.tiers()
    forced = os.environ.get("CLOSECALL_ISA") or None
    facts: dict[str, Any] = {"built": bool(tiers), "tiers": tiers, "tier": None, "forced_by_CLOSECALL_ISA": forced}
    try:
        facts["tier"] = cpu.tier() if tiers else None
    except ValueError as error:  # CLOSECALL_ISA names a tier this machine lacks: say so here, where people look
        facts["problem"] = str(error)
    return facts


def _devices() -> list[str]:
    return ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def gather() -> dict[str, Any]:
    """Everything `closecall info` prints."""
    probes = {
        (device, name): torch.empty(1, 1, 1, 64, dtype=dtype, device=device)
        for device in _devices()
        for name, dtype in DTYPES.items()
    }
    cpu_float32 = probes["cpu", "fp32"]
    return {
        "machine": machine(),
        "threads": torch.get_num_threads(),
        "native": _native(),
        "backends": {name: backends.load(name).why_not(cpu_float32) for name in backends.NAMES},
        "auto": [
            {"device": device, "dtype": name, **backends.explain(probe)._asdict()}
            for (device, name), probe in probes.items()
        ],
    }


def render(facts: dict[str, Any]) -> str:
    """The facts as a page for people."""
    here, native = facts["machine"], facts["native"]
    lines = [
        f"closecall {here['closecall']}, torch {here['torch']}, Python {here['python']}, {here['system']}",
        f"CPU       {here['cpu']}, {here['cores']} cores, {facts['threads']} torch threads",
    ]
    if native["built"]:
        marked = [f"[{t}]" if t == native["tier"] else t for t in native["tiers"]]
        why = "forced by CLOSECALL_ISA" if native["forced_by_CLOSECALL_ISA"] else "the best this machine has"
        lines.append(f"native    built ({here['native_build']}); tiers {' '.join(marked)}, {why}")
    else:
        lines.append("native    not built: install a C++ compiler and reinstall closecall")
    if "problem" in native:
        lines.append(f"          problem: {native['problem']}")
    lines += ["", "backends (for CPU float32 tensors)"]
    lines += [f"  {name:10} {'available' if why is None else f'no: {why}'}" for name, why in facts["backends"].items()]
    lines += ["", 'backend="auto" takes']
    lines += [f"  {a['device']:5} {a['dtype']}  ->  {a['name']:10} {a['why']}" for a in facts["auto"]]
    return "\n".join(lines)
