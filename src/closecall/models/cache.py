"""One process at a time in a directory, and the error for a model that cannot be had."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


class UnavailableError(OSError):
    """A model, or what it takes to load it, is not there: says what is missing and how to get it."""


@contextmanager
def locked(directory: Path, *, waiting: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Creates the directory and holds its lock, so that what one run cleans up is never what another is writing.

    `waiting` is called if another run has it. The system drops the lock of a run that dies, so it blocks nobody.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = (directory / ".lock").open("w")
    except OSError as error:
        raise UnavailableError(
            f"cannot write to {directory}: {error.strerror or error}. Set CLOSECALL_CACHE to a directory that you own"
        ) from error
    with lock:
        _take(lock, waiting)
        yield


def _take(lock: IO[str], waiting: Callable[[], None]) -> None:
    """Systems and file systems without such locks go without: only simultaneous runs would notice."""
    try:
        import fcntl
    except ImportError:
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        waiting()
        fcntl.flock(lock, fcntl.LOCK_EX)
    except OSError:
        return
