"""Memory of this process and machine (Linux only): what a call needed at its peak, and what is free."""

from __future__ import annotations

import ctypes
import gc
import re
from pathlib import Path
from typing import Any

from torch import Tensor

PROC = Path("/proc")


def _read(file: str, field: str) -> int | None:
    line = re.search(rf"^{field}:\s+(\d+) kB$", (PROC / file).read_text(), re.MULTILINE)
    return int(line.group(1)) * 1024 if line else None


def _status(field: str) -> int:
    return _read("self/status", field) or 0


def free() -> int | None:
    """Bytes that can be had without swapping; None where the system does not say."""
    try:
        return _read("meminfo", "MemAvailable")
    except OSError:
        return None


def mark() -> int | None:
    """Resets the peak of resident memory to the present and returns the present; None where the system cannot."""
    gc.collect()
    try:
        # Freed memory that the allocator holds on to would hide what the call needs.
        ctypes.CDLL(None).malloc_trim(0)
        (PROC / "self" / "clear_refs").write_text("5")
    except (AttributeError, OSError, TypeError):
        return None
    return _status("VmRSS")


def extra_since(before: int | None, output: Any) -> int | None:
    """Bytes at the peak since `mark()` returned `before`, less those of the output that the call returned."""
    if before is None:
        return None
    return max(0, _status("VmHWM") - before - (output.nbytes if isinstance(output, Tensor) else 0))
