"""Names, numbers and made-up words that needles consist of, drawn without repetition."""

from __future__ import annotations

import random
import string
from collections.abc import Iterable
from pathlib import Path

from ..spine.files import word_lists

WORDS = word_lists(Path(__file__).with_name("lexicon.txt"))
ADJECTIVES, NOUNS = WORDS["adjective"], WORDS["noun"]


class Drawer:
    """Draws from one source of chance and never the same twice."""

    def __init__(self, chance: random.Random, taken: Iterable[str] = ()) -> None:
        self._chance = chance
        self._taken = set(taken)

    def _new(self, drawn: str) -> bool:
        if drawn in self._taken:
            return False
        self._taken.add(drawn)
        return True

    def name(self) -> str:
        """An adjective and a noun; a second adjective once half of those are gone."""
        crowded = 2 * len(self._taken) > len(ADJECTIVES) * len(NOUNS)
        while True:
            drawn = f"{self._chance.choice(ADJECTIVES)}-{self._chance.choice(NOUNS)}"
            if crowded:
                drawn = f"{self._chance.choice(ADJECTIVES)}-{drawn}"
            if self._new(drawn):
                return drawn

    def number(self, digits: int) -> str:
        while True:
            drawn = str(self._chance.randrange(10 ** (digits - 1), 10**digits))
            if self._new(drawn):
                return drawn

    def letters(self, count: int) -> str:
        """Capital letters, as in the name of a variable."""
        while True:
            drawn = "".join(self._chance.choices(string.ascii_uppercase, k=count))
            if self._new(drawn):
                return drawn

    def code(self) -> str:
        """Two capital letters and three digits, as on a filing card."""
        while True:
            letters = "".join(self._chance.choices(string.ascii_uppercase, k=2))
            drawn = f"{letters}{self._chance.randrange(100, 1000)}"
            if self._new(drawn):
                return drawn

    def syllables(self, count: int) -> str:
        """A word that means nothing and can be said."""
        while True:
            pairs = (self._chance.choice("bdfgklmnprstvz") + self._chance.choice("aeiou") for _ in range(count))
            drawn = "".join(pairs)
            if self._new(drawn):
                return drawn
