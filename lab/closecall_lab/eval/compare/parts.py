"""Two halves of the examples: one to choose a selector by, one to be looked at once, at the end."""

from __future__ import annotations

from closecall.registry import unknown

# Example numbers that leave this remainder when divided by two.
PARTS = {"choose": 0, "final": 1}


def numbers(part: str, n: int) -> list[int]:
    """The first n example numbers of a part."""
    return [2 * i + PARTS[check_part(part)] for i in range(n)]


def belongs(number: int, part: str) -> bool:
    return number % 2 == PARTS[check_part(part)]


def check_part(part: str) -> str:
    if part not in PARTS:
        raise unknown("split", part, PARTS)
    return part
