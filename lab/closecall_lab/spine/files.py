"""Files appear under their names when whole: a run that is killed leaves the old file, never half a new one."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def draft(path: Path) -> Iterator[Path]:
    """A path beside `path` to write to. It takes the place of `path` when the block ends well, and is removed if not.

    Directories on the way are made.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield part
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def write(path: Path, content: str | bytes) -> Path:
    """Writes a whole file at once, and returns its path."""
    with draft(path) as part:
        part.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def slug(text: str) -> str:
    """A name that every file system takes."""
    return re.sub(r"[^A-Za-z0-9.]+", "-", text).strip("-.") or "model"


def word_lists(path: Path) -> dict[str, tuple[str, ...]]:
    """Reads lists of words from a text file: `[NAME]` on a line of its own, then the words of that list."""
    lists = re.split(r"^\[(.+)\]$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    return {name: tuple(words.split()) for name, words in zip(lists[::2], lists[1::2], strict=True)}
