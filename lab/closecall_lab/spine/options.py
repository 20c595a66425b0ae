"""How command-line options are read and checked: lists, sizes, names, and where results go."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from closecall.registry import unknown

from .numbers import TYPES

T = TypeVar("T")


def each(option: str, text: str, read: Callable[[str], T]) -> tuple[T, ...]:
    """The comma-separated values of an option, in order, each once."""
    values = tuple(dict.fromkeys(read(item.strip()) for item in text.split(",") if item.strip()))
    if not values:
        raise ValueError(f"{option} names nothing: {text!r}")
    return values


def count(option: str) -> Callable[[str], int]:
    """Reads whole numbers from 1 up, `k` for 1024."""

    def read(text: str) -> int:
        digits, factor = (text[:-1], 1024) if text[-1:].lower() == "k" else (text, 1)
        if not digits.isdigit() or int(digits) == 0:
            raise ValueError(f"{option} takes whole numbers from 1 up, like 128 or 32k, got {text!r}")
        return int(digits) * factor

    return read


def counts(option: str, text: str) -> tuple[int, ...]:
    return each(option, text, count(option))


def one_of(kind: str, known: Iterable[str]) -> Callable[[str], str]:
    """Reads one of the known names."""
    names = tuple(known)

    def read(text: str) -> str:
        if text not in names:
            raise unknown(kind, text, names)
        return text

    return read


def dtypes(option: str, text: str) -> tuple[str, ...]:
    return each(option, text, one_of(option, TYPES))


def threads(option: str, text: str) -> tuple[int, ...]:
    """Thread counts; `all` is what torch uses."""
    import torch

    return each(option, text, lambda item: torch.get_num_threads() if item == "all" else count(option)(item))


def positive(option: str, value: float) -> float:
    if not value > 0:
        raise ValueError(f"{option} must be above 0, got {value}")
    return value


def output_dir(option: str, path: Path) -> Path:
    """Makes the directory and checks that it can be written to, before anything is measured for it."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        wrong = next((p for p in (path, *path.parents) if p.exists() and not p.is_dir()), path)
        raise ValueError(f"{option} {path}: {wrong} is a file; name a directory") from None
    except OSError as error:
        raise ValueError(f"{option} {path} cannot be made: {error.strerror}; name another directory") from None
    if not os.access(path, os.W_OK | os.X_OK):
        raise ValueError(f"{option} {path} cannot be written to; name another directory")
    return path


def output_file(option: str, path: Path) -> Path:
    """Makes the file's directory and checks that the file can be written, before anything is measured for it."""
    if path.is_dir():
        raise ValueError(f"{option} {path} is a directory; name a file in it, like {path / 'result'}")
    output_dir(option, path.parent)
    if path.exists() and not os.access(path, os.W_OK):
        raise ValueError(f"{option} {path} cannot be written to; name another file")
    return path
