"""Parameters as text, `budget=8,aggregate=mass`: on command lines, and in the names that results are stored under.

Values are whole numbers, decimal numbers, `true`, `false`, `none`, words, and lists of these, `a;b`. Nothing else is.
"""

from __future__ import annotations

import re
from typing import Any

_WHOLE = re.compile(r"[+-]?[0-9]+")
_DECIMAL = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
_WORD = re.compile(r"[A-Za-z0-9_.+-]+")
_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_CONSTANTS = {"true": True, "false": False, "none": None}


def split(text: str, whole: str | None = None) -> dict[str, str]:
    """Splits `key=value,key=value` into keys and values as text. Errors quote `whole`, the text around it."""
    place = repr(text if whole is None else whole)
    pieces: dict[str, str] = {}
    for piece in filter(None, (p.strip() for p in text.split(","))):
        key, equals, value = (part.strip() for part in piece.partition("="))
        if not equals or not _KEY.fullmatch(key):
            raise ValueError(f"{place}: an override is written key=value, got {piece!r}")
        if not value:
            raise ValueError(f"{place}: {piece!r} has no value: write {key}=VALUE")
        if key in pieces:
            raise ValueError(f"{place}: {key} is set twice, to {pieces[key]!r} and to {value!r}: leave one")
        pieces[key] = value
    return pieces


def value(text: str, place: str | None = None) -> Any:
    """Reads one value: a number, `true`, `false`, `none`, a word, or a list `a;b` as a tuple."""
    if ";" in text:
        return tuple(value(part.strip(), place) for part in text.split(";") if part.strip())
    if _WHOLE.fullmatch(text):
        return int(text)
    if _DECIMAL.fullmatch(text):
        return float(text)
    if text.lower() in _CONSTANTS:
        return _CONSTANTS[text.lower()]
    if not _WORD.fullmatch(text):
        where = f"{place}: " if place else ""
        raise ValueError(f"{where}{text!r} is neither a number, true, false, none, a word, nor a list a;b")
    return text


def read(text: str, whole: str | None = None) -> dict[str, Any]:
    """Reads `key=value,key=value`."""
    place = repr(text if whole is None else whole)
    return {key: value(written, f"{place}: {key}") for key, written in split(text, whole).items()}


def write(value: Any) -> str:
    """Writes a value so that `read` returns it."""
    return ";".join(map(write, value)) + (";" if len(value) == 1 else "") if isinstance(value, tuple) else str(value)
