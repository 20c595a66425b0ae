"""Checks of scorers' parameters."""

from __future__ import annotations


def check_whole(name: str, value: object, least: int, what: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} must be a whole number of {what}, at least {least}, got {value!r}")


def check_shrink(c: object) -> None:
    if not isinstance(c, (int, float)) or isinstance(c, bool) or not 0 <= c <= 1:
        raise ValueError(f"c must be in [0, 1], from the block's mean to its whole box, got {c!r}")
