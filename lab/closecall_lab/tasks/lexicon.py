"""Names, numbers and made-up words that needles consist of, drawn without repetition."""

from __future__ import annotations

import random
import string
from collections.abc import Iterable


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


ADJECTIVES = _words(
    """
    able amber ample ancient arid azure bashful bitter blunt bold brave brief bright brisk broad bronze calm candid
    careful cheerful chilly civil clever coastal copper cosmic crimson crisp curious daring dusty eager early earnest
    elder faint fair famous fearless fierce florid fluent formal frosty gentle gilded glad golden grand grateful hardy
    hasty hidden hollow honest humble ivory jolly keen kindly lively lofty lonely loyal lucid lunar mellow merry mild
    misty modest mossy narrow neat nimble noble northern orderly pale patient placid polite prompt proud quaint quick
    quiet rapid rare restless robust rosy rural rustic sandy scarlet secret serene silent silver simple sleepy slender
    smooth sober solar solemn southern spiral stately steady stern sturdy subtle sunny swift tame tender tidy timid
    tranquil urban vast velvet vivid wandering warm wary western windy winter wise witty wooden young zesty
    """
)
NOUNS = _words(
    """
    acorn almond anchor anvil apple apron arrow badger bakery balcony bamboo barrel basin basket beacon beaver bell
    birch blanket bottle bridge bucket butter button cabin camera canal candle canoe carpet castle cedar cellar chapel
    chimney circle clock cloud clover cobbler comet compass cottage cradle crane cricket curtain desert diamond dolphin
    donkey drum eagle elbow ember engine falcon feather fiddle finch flute forest fountain fox galaxy garden gate
    glacier goblet hammer harbor harp hazel hedge helmet heron hill honey horizon island jacket jungle kettle kite
    ladder lagoon lamp lantern lemon library lizard lobster locket magnet mantle maple market meadow mirror mitten
    monument mountain museum napkin needle oasis ocean olive orchard organ otter oven owl paddle palace parcel pebble
    pencil pepper piano pigeon pillow planet plaza pocket pond poplar prairie pumpkin quarry quilt rabbit raft raven
    ribbon river robin rocket saddle sailor scarf shelter shovel sparrow spoon spruce stable statue stream table temple
    thicket thistle ticket tower tractor trumpet tulip tunnel turtle valley violin wagon walnut walrus whistle willow
    window wren yarn zebra
    """
)


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
