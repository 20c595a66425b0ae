"""The text that a policy is tuned on, and the text that it is then judged on: pieces of one length, never the same."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..tasks import corpora


@dataclass(frozen=True)
class Piece:
    """So many tokens of one text."""

    name: str
    ids: tuple[int, ...]

    @property
    def digest(self) -> str:
        return hashlib.sha256(",".join(map(str, self.ids)).encode()).hexdigest()[:16]


def texts(path: Path | None, kinds: Sequence[str]) -> Iterator[tuple[str, str]]:
    """The user's files, or, without any, real text of several kinds that is on any machine with Python, in turn."""
    if path is not None:
        yield from corpora.of_files(str(path)).texts
        return
    for together in itertools.zip_longest(*(corpora.corpus(kind).texts for kind in kinds)):
        yield from (text for text in together if text is not None)


def cut(tokenizer: Any, texts: Iterable[tuple[str, str]], context: int, most: int) -> list[Piece]:
    """Up to `most` pieces of `context` tokens from texts that follow each other, each with the model's own start."""
    start = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    size = context - len(start)
    pieces: list[Piece] = []
    buffer: list[int] = []
    names: list[str] = []
    for name, text in texts:
        buffer += tokenizer(text, add_special_tokens=False)["input_ids"]
        names.append(name)
        while len(buffer) >= size and len(pieces) < most:
            label = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
            pieces.append(Piece(label, (*start, *buffer[:size])))
            buffer, names = buffer[size:], [name]
        if len(pieces) == most:
            break
    if len(pieces) < 2:
        total = len(buffer) + sum(len(piece.ids) for piece in pieces)
        raise ValueError(
            f"tuning takes two pieces of {context} tokens, one to fit on and one to judge by, and the text has {total} "
            "tokens: give more text, or a smaller --context"
        )
    return pieces


def halves(pieces: Sequence[Piece]) -> tuple[list[Piece], list[Piece]]:
    """The pieces to fit on and those to judge by, in turn: both have every kind of text."""
    return list(pieces[::2]), list(pieces[1::2])
