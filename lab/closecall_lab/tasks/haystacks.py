"""What needles are hidden in: repeated noise, prose, or more needles."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import count
from pathlib import Path

from closecall.registry import unknown

from .prose import TEXT

NOISE = (
    "The road is long.",
    "The lake is still.",
    "Birds sit on the wire.",
    "A door opens and shuts.",
    "The wind comes and goes.",
    "Leaves fall in the yard.",
    "One day follows another.",
    "The kettle is on the stove.",
)
KINDS = ("noise", "needles", "prose")
SENTENCE_END = re.compile(r"(?<=[.!?])\s+")


class Hay:
    """An endless row of sentences, made as they are asked for."""

    def __init__(self, source: Iterator[str]) -> None:
        self._source = source
        self._made: list[str] = []

    def first(self, n: int) -> list[str]:
        while len(self._made) < n:
            self._made.append(next(self._source))
        return self._made[:n]


def check(kind: str) -> None:
    """Refuses a haystack that cannot be had, before any work."""
    if kind.startswith("prose:"):
        _of_file(kind.removeprefix("prose:"))
    elif kind not in KINDS:
        raise unknown("haystack", kind, [*KINDS, "prose:PATH"])


def hay(kind: str, start: float, needle: Callable[[], str], without: Sequence[str]) -> Hay:
    """The haystack of that kind.

    `start`, from 0 to 1, is where in its text it begins; a text that is too short is repeated. `needle` makes another
    distracting needle. Sentences with one of the strings of `without` are left out, for they would give an answer away.
    """
    if kind == "needles":
        return Hay(needle() for _ in count())
    text = _sentences(kind)
    kept = [sentence for sentence in text if not any(word in sentence for word in without)]
    if not kept:
        raise ValueError(f"every sentence of the haystack {kind!r} gives an answer away: use a longer text")
    begin = int(start * len(kept))
    return Hay(kept[(begin + i) % len(kept)] for i in count())


def _sentences(kind: str) -> tuple[str, ...]:
    if kind == "noise":
        return NOISE
    return split(TEXT) if kind == "prose" else _of_file(kind.removeprefix("prose:"))


@lru_cache(maxsize=4)
def split(text: str) -> tuple[str, ...]:
    """Sentences, each on one line."""
    return tuple(" ".join(piece.split()) for piece in SENTENCE_END.split(text) if piece.strip())


def _of_file(path: str) -> tuple[str, ...]:
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"haystack prose:{path} is not UTF-8 text: {error.reason} at byte {error.start}") from None
    except OSError as error:
        raise ValueError(f"haystack prose:{path} cannot be read: {error.strerror}. Name a text file") from None
    sentences = split(text)
    if not sentences:
        raise ValueError(f"haystack prose:{path} is empty: name a file with text in it")
    return sentences
