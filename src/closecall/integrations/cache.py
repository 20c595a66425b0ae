"""Where fetched models live, one process at a time, and the error for a model that cannot be had."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class UnavailableError(OSError):
    """A model, or what it takes to load it, is not there: says what is missing and how to get it."""


def cache_dir() -> Path:
    """`$CLOSECALL_CACHE`, else `closecall` under `$XDG_CACHE_HOME` or `~/.cache`."""
    if own := os.environ.get("CLOSECALL_CACHE"):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base).expanduser() if base else Path.home() / ".cache") / "closecall"


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Creates the directory and holds its lock, so that what one run cleans up is never what another is writing.

    The system drops the lock when its holder dies, so a killed run blocks nobody.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = (directory / ".lock").open("w")
    except OSError as error:
        raise UnavailableError(
            f"cannot write to {directory}: {error.strerror or error}. Set CLOSECALL_CACHE to a directory you can write to"
        ) from error
    with lock:
        try:
            import fcntl
        except ImportError:  # not on this system: only simultaneous runs would notice
            yield
        else:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
