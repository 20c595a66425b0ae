"""Where closecall keeps what it fetched, converted or measured on this machine."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """`$CLOSECALL_CACHE`, else `closecall` under `$XDG_CACHE_HOME` or `~/.cache`."""
    if own := os.environ.get("CLOSECALL_CACHE"):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base).expanduser() if base else Path.home() / ".cache") / "closecall"
