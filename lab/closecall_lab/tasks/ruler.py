"""Needle retrieval in the RULER family, in our own words: single, multi-key, multi-value, multi-query."""

from __future__ import annotations

import random
from dataclasses import dataclass

from . import haystacks
from .base import TASKS, Generated, check_least
from .example import Example
from .fit import Room
from .hiding import Plan, hide
from .lexicon import Drawer

DIGITS = 7
INTRO = "The text below contains one or more special numbers. Remember them: you will be asked about them afterwards."
ANSWER_TOKENS = 16  # a number of seven digits, a token each in the worst case, and what leads to the next


def needle(key: str, value: str) -> str:
    return f"The special number of {key} is {value}."


@dataclass(frozen=True, kw_only=True)
class Needles(Generated):
    """`asked` keys with `values` numbers each are asked for, among `others` that are not."""

    haystack: str = "noise"

    def __post_init__(self) -> None:
        haystacks.check(self.haystack)

    def counts(self) -> tuple[int, int, int]:
        """How many keys are asked for, how many numbers each has, and how many keys there are besides."""
        return 1, 1, 0

    def make(self, room: Room, context: int, key: str, chance: random.Random) -> Example:
        asked, values, others = self.counts()
        drawer = Drawer(chance)
        names = [drawer.name() for _ in range(asked + others)]
        numbers = [[drawer.number(DIGITS) for _ in range(values)] for _ in names]
        pairs = [(name, value) for name, mine in zip(names, numbers, strict=True) for value in mine]
        depths = [chance.random() for _ in pairs]
        gold = range(asked * values)
        answers = tuple(value for _, value in pairs[: len(gold)])
        wanted = _listed(names[:asked])
        what, verb = ("special numbers", "are") if len(gold) > 1 else ("special number", "is")
        say = f"The {what} of {wanted} {verb}"
        plan = Plan(
            task=str(self),
            intro=INTRO,
            needles=[needle(*pair) for pair in pairs],
            depths=depths,
            gold=gold,
            question=f"What {verb} the {what} of {wanted} in the text?",
            lead=say if room.templated else f"Answer: {say}",
            answers=answers,
            secrets=[*names, *answers],
            decoy=lambda: needle(drawer.name(), drawer.number(DIGITS)),
            max_new_tokens=ANSWER_TOKENS * len(gold),
        )
        return hide(plan, self.haystack, room, context, key)


@TASKS.register("niah-single")
@dataclass(frozen=True, kw_only=True)
class Single(Needles):
    """One needle."""


@TASKS.register("niah-multikey")
@dataclass(frozen=True, kw_only=True)
class MultiKey(Needles):
    """`keys` needles with different keys, one of them asked for. The paper has 3, RULER 4."""

    keys: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        check_least(self, keys=2)

    def counts(self) -> tuple[int, int, int]:
        return 1, 1, self.keys - 1


@TASKS.register("niah-multivalue")
@dataclass(frozen=True, kw_only=True)
class MultiValue(Needles):
    """One key with `values` numbers in different places, all of them asked for."""

    values: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        check_least(self, values=2)

    def counts(self) -> tuple[int, int, int]:
        return 1, self.values, 0


@TASKS.register("niah-multiquery")
@dataclass(frozen=True, kw_only=True)
class MultiQuery(Needles):
    """`queries` keys, all asked for in one question."""

    queries: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        check_least(self, queries=2)

    def counts(self) -> tuple[int, int, int]:
        return self.queries, 1, 0


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
