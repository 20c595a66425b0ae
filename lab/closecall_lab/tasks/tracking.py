"""Variable tracking: a value handed from variable to variable across the text."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import pairwise

from . import haystacks
from .base import TASKS, Generated, check_least
from .example import Example
from .fit import Room
from .hiding import Ask, Hiding, hide
from .lexicon import Drawer

LETTERS = 5
DIGITS = 6
INTRO = "The text below sets variables, now and then. Keep track of which variable holds which value."


@TASKS.register("variable-tracking")
@dataclass(frozen=True, kw_only=True)
class VariableTracking(Generated):
    """`chains` values, each handed on `hops` times; all the variables that hold the first one are asked for.

    A chain's assignments stand in the order in which they happen, so it can be followed reading forwards. With more
    `questions` than one, the value of so many chains' last variables is asked for instead, after one prefill.
    """

    hops: int = 4
    chains: int = 1
    haystack: str = "noise"
    questions: int = 1

    def __post_init__(self) -> None:
        check_least(self, hops=1, chains=1, questions=1)
        if self.questions > 1 and self.questions > self.chains:
            raise ValueError(f"{self.questions} questions need as many chains, and there are {self.chains}: give more")
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
        steps = self.hops + 1
        if self.questions == 1:
            asks = [_all_of(values[0], variables[0])]
        else:
            asks = [
                _value_of(variables[i][-1], values[i], range(steps * i, steps * (i + 1))) for i in range(self.questions)
            ]
        plan = Hiding(
            task=str(self),
            intro=INTRO,
            needles=needles,
            depths=depths,
            asks=asks,
            secrets=[*values, *(name for chain in variables for name in chain)],
            decoy=lambda: assignments(drawer.number(DIGITS), [drawer.letters(LETTERS)])[0],
            max_new_tokens=8 * steps,
            shared=self.questions > 1,
        )
        return hide(plan, self.haystack, room, context, key)


def _all_of(value: str, chain: list[str]) -> Ask:
    question = f"Which variables hold the value {value} at the end? Name all {len(chain)} of them."
    return Ask(question, f"The variables that hold {value} are", tuple(chain), range(len(chain)))


def _value_of(variable: str, value: str, gold: range) -> Ask:
    question = f"Which value does variable {variable} hold at the end? Answer with the number alone."
    return Ask(question, f"Variable {variable} holds the value", (value,), gold)


def assignments(value: str, chain: list[str]) -> list[str]:
    first = f"Variable {chain[0]} is set to {value}."
    return [first, *(f"Variable {b} is set to variable {a}." for a, b in pairwise(chain))]
