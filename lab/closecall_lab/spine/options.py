"""How the command line's options are read: lists, sizes and names, with errors that say what would be right."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from closecall.registry import unknown

T = TypeVar("T")


def each(option: str, text: str, read: Callable[[str], T]) -> tuple[T, ...]:
    """The comma-separated values of an option, in order, each once."""
    found = tuple(dict.fromkeys(read(item.strip()) for item in text.split(",") if item.strip()))
    if not found:
        raise ValueError(f"{option} names nothing: {text!r}")
    return found


def count(option: str) -> Callable[[str], int]:
    """Reads whole numbers from 1 up, `k` for 1024."""

    def read(text: str) -> int:
        digits, factor = (text[:-1], 1024) if text[-1:].lower() == "k" else (text, 1)
        if not digits.isdigit() or int(digits) == 0:
            raise ValueError(f"{option} takes whole numbers like 128 or 32k, got {text!r}")
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
