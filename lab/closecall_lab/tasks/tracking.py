"""Variable tracking: a value handed from variable to variable across the text."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import pairwise

from . import haystacks
from .base import TASKS, Generated, check_least
from .example import Example
from .fit import Room
from .hiding import Plan, hide
from .lexicon import Drawer

LETTERS = 5
DIGITS = 6
INTRO = "The text below sets variables, now and then. Keep track of which variable holds which value."


@TASKS.register("variable-tracking")
@dataclass(frozen=True, kw_only=True)
class VariableTracking(Generated):
    """`chains` values, each handed on `hops` times; all the variables that hold the first one are asked for.

    A chain's assignments stand in the order in which they happen, so it can be followed reading forwards.
    """

    hops: int = 4
    chains: int = 1
    haystack: str = "noise"

    def __post_init__(self) -> None:
        check_least(self, hops=1, chains=1)
        haystacks.check(self.haystack)

    def make(self, room: Room, context: int, key: str, chance: random.Random) -> Example:
        drawer = Drawer(chance)
        values = [drawer.number(DIGITS) for _ in range(self.chains)]
        variables = [[drawer.letters(LETTERS) for _ in range(self.hops + 1)] for _ in values]
        needles: list[str] = []
        depths: list[float] = []
        for value, chain in zip(values, variables, strict=True):
            needles += assignments(value, chain)
            depths += sorted(chance.random() for _ in chain)
        gold = range(self.hops + 1)
        say = f"The variables that hold {values[0]} are"
        plan = Plan(
            task=str(self),
            intro=INTRO,
            needles=needles,
            depths=depths,
            gold=gold,
            question=f"Which variables hold the value {values[0]} at the end? Name all {len(gold)} of them.",
            lead=say if room.templated else f"Answer: {say}",
            answers=tuple(variables[0]),
            secrets=[*values, *(name for chain in variables for name in chain)],
            decoy=lambda: assignments(drawer.number(DIGITS), [drawer.letters(LETTERS)])[0],
            max_new_tokens=8 * len(gold),
        )
        return hide(plan, self.haystack, room, context, key)


def assignments(value: str, chain: list[str]) -> list[str]:
    first = f"Variable {chain[0]} is set to {value}."
    return [first, *(f"Variable {b} is set to variable {a}." for a, b in pairwise(chain))]
