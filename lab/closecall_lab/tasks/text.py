"""Real text without questions: a model reads it, and policies are told apart by what they predict at every position."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from . import corpora
from .base import TASKS, BaseTask, check_counts, check_least
from .example import Example, Question, Wrap, encode

CHARACTERS = 8  # of text are more than a token, for about every tokenizer: so many are read to fill a context


@TASKS.register("text")
@dataclass(frozen=True, kw_only=True)
class Text(BaseTask):
    """The beginning of a real text, as long as the context. One prefill gives thousands of positions to compare.

    `kind` is one of the corpora that are on any Debian machine with Python; `files` instead names a text file, or a
    directory of them. A short file is followed by the next. `positions` are evaluated, evenly spread (0: all of them).
    """

    kind: str = "code"
    files: str = ""
    positions: int = 2048

    def __post_init__(self) -> None:
        check_least(self, positions=0)
        if self.chat:
            raise ValueError("a text is read as it is, not through a chat template: leave chat out")
        if not self.files and self.kind not in corpora.KINDS:
            corpora.corpus(self.kind)  # says which there are

    def examples(
        self, tokenizer: Any, context: int, n: int, seed: int, *, wrap: Wrap | None = None
    ) -> Iterator[Example]:
        """As many as the texts give, up to n. None shares a file with another."""
        check_counts(context, n, seed)
        if context < 2:
            raise ValueError(
                f"task {str(self)!r} needs a context of at least 2 tokens, one to read and one to predict, "
                f"got {context}: give more"
            )
        corpus = corpora.of_files(self.files) if self.files else corpora.corpus(self.kind)
        listed = list(corpus.texts)
        random.Random(f"{self}/seed{seed}").shuffle(listed)
        rest = iter(listed)
        for i in range(n):
            names, text, tokens = [], "", 0
            while tokens < context:
                file = next(rest, None)
                if file is None:
                    break
                names.append(file[0])
                text = (text + "\n\n\n" if text else "") + file[1][: CHARACTERS * context]
                encoded = encode(tokenizer, text)
                tokens = len(encoded.ids)
            if tokens < context:
                if i == 0:
                    raise ValueError(
                        f"the texts of {str(self)!r} have {tokens} tokens, fewer than the context of {context}: "
                        f"use a shorter context, or more text"
                    )
                return
            end = encoded.offsets[context - 1][1]
            yield Example(
                task=str(self),
                key=f"{self}/{context}/seed{seed}/{i}",
                context=context,
                prompt=text[:end],
                questions=(),
                max_new_tokens=0,
                meta={"files": names, "sha256": corpus.sha256},
            )

    def score(self, example: Example, question: Question, output: str) -> float:
        raise TypeError(f"{self} asks nothing, so there is nothing to score")
