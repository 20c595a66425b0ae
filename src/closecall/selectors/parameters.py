"""Checks of scorers' parameters."""

from __future__ import annotations


def check_whole(name: str, value: object, least: int, what: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} must be a whole number of {what}, at least {least}, got {value!r}")
