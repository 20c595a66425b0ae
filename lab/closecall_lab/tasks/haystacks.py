"""What needles are hidden in: repeated noise, prose, more needles, or real text of any Debian machine with Python."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import count
from pathlib import Path

from closecall.registry import unknown

from . import corpora
from .example import JSON
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
KINDS = ("noise", "needles", "prose", *corpora.KINDS)
SENTENCE_END = re.compile(r"(?<=[.!?])\s+")


class Hay:
    """An endless row of sentences or paragraphs, made as they are asked for.

    `joint` stands between them; `mark` in front of a needle, which in source code is a comment. `facts` say where a
    real text comes from.
    """

    def __init__(
        self, source: Iterator[str], *, joint: str = " ", mark: str = "", facts: Mapping[str, JSON] | None = None
    ) -> None:
        self._source = source
        self._made: list[str] = []
        self.joint = joint
        self.mark = mark
        self.facts = facts or {}

    def dressed(self, needle: str) -> str:
        return self.mark + needle

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
    corpus = corpora.corpus(kind) if kind in corpora.KINDS else None
    text = _sentences(kind) if corpus is None else corpus.paragraphs
    kept = [sentence for sentence in text if not any(word in sentence for word in without)]
    if not kept:
        raise ValueError(f"every sentence of the haystack {kind!r} gives an answer away: use a longer text")
    begin = int(start * len(kept))
    pieces = (kept[(begin + i) % len(kept)] for i in count())
    if corpus is None:
        return Hay(pieces)
    return Hay(pieces, joint="\n\n", mark="# " if kind == "code" else "", facts=corpus.facts)


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
