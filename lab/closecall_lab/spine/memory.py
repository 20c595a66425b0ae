"""Peak extra memory of a call: what it needed beyond what was there before and the output it returned (Linux only)."""

from __future__ import annotations

import ctypes
import gc
import re
from pathlib import Path
from typing import Any

from torch import Tensor

PROC = Path("/proc/self")


def _status(field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB$", (PROC / "status").read_text(), re.MULTILINE)
    return int(found.group(1)) * 1024 if found else 0


def mark() -> int | None:
    """Resets the peak of resident memory to the present and returns the present; None where the system cannot."""
    gc.collect()
    try:
        # Freed memory that the allocator holds on to would hide what the call needs.
        ctypes.CDLL(None).malloc_trim(0)
        (PROC / "clear_refs").write_text("5")
    except (AttributeError, OSError, TypeError):
        return None
    return _status("VmRSS")


def extra_since(before: int | None, output: Any) -> int | None:
    """Bytes at the peak since `mark()` returned `before`, less those of the output that the call returned."""
    if before is None:
        return None
    return max(0, _status("VmHWM") - before - (output.nbytes if isinstance(output, Tensor) else 0))
