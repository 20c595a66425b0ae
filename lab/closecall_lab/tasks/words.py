"""Counting words: which are the common ones of a list, which are the frequent ones of a coded text.

No single place holds the answer, so the gold span is the whole list: its hit rate is the share of it that is kept.
"""

from __future__ import annotations

import math
import random
from abc import abstractmethod
from collections import Counter
from dataclasses import dataclass
from functools import cache

from .base import TASKS, Generated, check_least
from .example import Example, Question
from .fit import Room, most
from .lexicon import Drawer

SYLLABLES = 3
FIRST_SHARE = 6 / math.pi**2  # so that the shares of all ranks add up to 1


@dataclass(frozen=True, kw_only=True)
class Counting(Generated):
    """A list of words that grows until the context is full; the most frequent ones are asked for."""

    @property
    @abstractmethod
    def top(self) -> int:
        """How many words are asked for."""

    @abstractmethod
    def listed(self, n: int, drawn: Drawn) -> list[str]:
        """The words of a list with `n` to spend, unshuffled, the answers among them. It grows with `n`."""

    @abstractmethod
    def joined(self, words: list[str]) -> str: ...

    @abstractmethod
    def asks(self) -> tuple[str, str, str]:
        """What comes before the list, the question after it, and the first words of the answer."""

    def make(self, room: Room, context: int, key: str, chance: random.Random) -> Example:
        drawn = Drawn(chance)
        intro, question, say = self.asks()
        lead = say if room.templated else f"Answer: {say}"
        tokens = 8 * self.top

        def written(n: int) -> tuple[str, int, int, list[str]]:
            words = self.listed(n, drawn)
            shuffled = list(words)
            random.Random(f"{key}/order").shuffle(shuffled)
            body = self.joined(shuffled)
            prompt, begin = room.prompt(f"{intro}\n\n{body}\n\n{question}", lead)
            return prompt, begin + len(intro) + 2, len(body), words

        @cache
        def size(n: int) -> int:
            return room.count(written(n)[0])

        target, least = context - tokens, size(0)
        if least > target:
            raise ValueError(
                f"task {str(self)!r} needs a context of at least {least + tokens} tokens, got {context}: "
                f"give more, or ask for fewer words or repeats"
            )
        n = most(size, target)
        prompt, begin, length, words = written(n)
        ranked = Counter(words).most_common()
        answers = tuple(word for word, _ in ranked[: self.top])
        return Example(
            task=str(self),
            key=key,
            context=context,
            prompt=prompt,
            questions=(Question(answers, ((begin, begin + length),)),),
            max_new_tokens=tokens,
            meta={
                "prompt_tokens": size(n),
                "words": len(words),
                "counts": [c for _, c in ranked[: self.top]],
            },
            templated=room.templated,
        )


class Drawn:
    """Made-up words in the order they were drawn, as many as are asked for."""

    def __init__(self, chance: random.Random) -> None:
        self._drawer = Drawer(chance)
        self._words: list[str] = []

    def __getitem__(self, i: int) -> str:
        while len(self._words) <= i:
            # The pool of short words is large but finite: a list past it takes longer ones.
            self._words.append(self._drawer.syllables(SYLLABLES + len(self._words) // 100_000))
        return self._words[i]


@TASKS.register("common-words")
@dataclass(frozen=True, kw_only=True)
class CommonWords(Counting):
    """A numbered list where `common` words stand `repeats` times each, and all others `others` times."""

    common: int = 10
    repeats: int = 30
    others: int = 3

    def __post_init__(self) -> None:
        check_least(self, common=1, others=1, repeats=self.others + 1)

    @property
    def top(self) -> int:
        return self.common

    def listed(self, n: int, drawn: Drawn) -> list[str]:
        often = [drawn[i] for i in range(self.common) for _ in range(self.repeats)]
        return often + [drawn[self.common + i // self.others] for i in range(n)]

    def joined(self, words: list[str]) -> str:
        return " ".join(f"{i}. {word}" for i, word in enumerate(words, 1))

    def asks(self) -> tuple[str, str, str]:
        return (
            "Below is a numbered list of words. A few words stand in it far more often than the others.",
            f"Which {self.common} words are the most common ones in the list?",
            "The most common words are",
        )


@TASKS.register("frequent-words")
@dataclass(frozen=True, kw_only=True)
class FrequentWords(Counting):
    """A coded text whose words get rarer by rank, as 1 over its square; the `frequent` first ones are asked for."""

    frequent: int = 3

    def __post_init__(self) -> None:
        check_least(self, frequent=1)

    @property
    def top(self) -> int:
        return self.frequent

    def listed(self, n: int, drawn: Drawn) -> list[str]:
        # Every rank gets its share of n as far as it goes, the last ranks one word each. A few more of the ranks asked
        # for, descending, tell these apart from each other and from the rest at any n.
        words = [drawn[r] for r in range(self.frequent) for _ in range(1 + self.frequent - r)]
        left, rank = n, 0
        while left > 0:
            take = min(left, max(1, int(FIRST_SHARE * n / (rank + 1) ** 2)))
            words += [drawn[rank]] * take
            left, rank = left - take, rank + 1
        return words

    def joined(self, words: list[str]) -> str:
        return " ".join(words)

    def asks(self) -> tuple[str, str, str]:
        return (
            "Below is a text in a code that nobody can read. Pay attention to how often each word of it comes up.",
            f"Which {self.frequent} words come up most often in the coded text?",
            "The most frequent words are",
        )
