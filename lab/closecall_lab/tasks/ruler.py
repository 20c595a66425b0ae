"""Needle retrieval in the RULER family, in our own words: single, multi-key, multi-value, multi-query."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle

from . import haystacks
from .base import TASKS, Generated, check_least
from .example import Example
from .fit import Room
from .hiding import Ask, Hiding, hide
from .lexicon import Drawer

DIGITS = 7
INTRO = "The text below contains one or more special numbers. Remember them: you will be asked about them afterwards."
INTRO_KINDS = "The text below contains a few facts. Remember them: you will be asked about them afterwards."
KINDS = (
    "dial code", "locker number", "invoice number", "population", "serial number", "account balance", "badge number",
    "postal code", "catalogue number", "licence number", "ticket number", "weight in grams", "reference number",
    "membership number", "height in millimetres", "parcel number",
)  # fmt: skip
ANSWER_TOKENS = 16  # a number of seven digits, a token each in the worst case, and what leads to the next


def needle(key: str, value: str) -> str:
    return f"The special number of {key} is {value}."


@dataclass(frozen=True, kw_only=True)
class Needles(Generated):
    """Keys with numbers are hidden in a haystack, and some are asked for."""

    haystack: str = "noise"

    def __post_init__(self) -> None:
        haystacks.check(self.haystack)

    def counts(self) -> tuple[int, int, int]:
        """How many keys are asked for, how many numbers each has, and how many keys there are besides."""
        return 1, 1, 0

    def apart(self) -> int:
        """How many keys are asked for one after the other, each by a question of its own; 0: all in one question."""
        return 0

    def make(self, room: Room, context: int, key: str, chance: random.Random) -> Example:
        asked, values, others = self.counts()
        drawer = Drawer(chance)
        names = [drawer.name() for _ in range(asked + others)]
        numbers = [[drawer.number(DIGITS) for _ in range(values)] for _ in names]
        pairs = [(name, value) for name, mine in zip(names, numbers, strict=True) for value in mine]
        depths = [chance.random() for _ in pairs]
        gold = range(asked * values)
        answers = tuple(value for _, value in pairs[: len(gold)])
        asks = [_ask([name], (value,), [i]) for i, (name, value) in enumerate(pairs[: self.apart()])]
        plan = Hiding(
            task=str(self),
            intro=INTRO,
            needles=[needle(*pair) for pair in pairs],
            depths=depths,
            asks=asks or [_ask(names[:asked], answers, gold)],
            secrets=[*names, *((value for _, value in pairs) if asks else answers)],
            decoy=lambda: needle(drawer.name(), drawer.number(DIGITS)),
            max_new_tokens=0 if asks else ANSWER_TOKENS * len(gold),
            shared=bool(asks),
        )
        return hide(plan, self.haystack, room, context, key)


def _ask(names: list[str], answers: tuple[str, ...], gold: Sequence[int]) -> Ask:
    what, verb = ("special numbers", "are") if len(gold) > 1 else ("special number", "is")
    wanted = _listed(names)
    return Ask(
        f"What {verb} the {what} of {wanted} in the text?", f"The {what} of {wanted} {verb}", answers=answers, gold=gold
    )


@TASKS.register("niah-single")
@dataclass(frozen=True, kw_only=True)
class Single(Needles):
    """One needle. With more `questions` than one, so many needles of different kinds, each with its own question.

    Their words differ, so that no needle distracts from another; the questions share one prefill.
    """

    questions: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_least(self, questions=1)
        if self.questions > len(KINDS):
            raise ValueError(f"{self.name} knows {len(KINDS)} kinds of needles, too few for {self.questions} questions")

    def make(self, room: Room, context: int, key: str, chance: random.Random) -> Example:
        if self.questions == 1:
            return super().make(room, context, key, chance)
        drawer = Drawer(chance)
        kinds = chance.sample(KINDS, self.questions)
        facts = [(f"The {kind} of {drawer.name()} is", drawer.number(DIGITS)) for kind in kinds]
        spare = cycle(kinds)
        plan = Hiding(
            task=str(self),
            intro=INTRO_KINDS,
            needles=[f"{words} {value}." for words, value in facts],
            depths=[chance.random() for _ in facts],
            asks=[
                Ask(f"According to the text, what {_asked(words)}?", words, (value,), [i])
                for i, (words, value) in enumerate(facts)
            ],
            secrets=[word for words, value in facts for word in (words, value)],
            decoy=lambda: f"The {next(spare)} of {drawer.name()} is {drawer.number(DIGITS)}.",
            max_new_tokens=0,
            shared=True,
        )
        return hide(plan, self.haystack, room, context, key)


def _asked(words: str) -> str:
    """`The dial code of able-acorn is` as it stands in a question."""
    thing = words.removeprefix("The ").removesuffix(" is")
    return f"is the {thing}"


@TASKS.register("niah-multikey")
@dataclass(frozen=True, kw_only=True)
class MultiKey(Needles):
    """`keys` needles with different keys, one of them asked for. The paper has 3, RULER 4.

    With more `questions` than one, so many of the keys are asked for one after the other, after one prefill.
    """

    keys: int = 3
    questions: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_least(self, keys=2, questions=1)
        if self.questions > self.keys:
            raise ValueError(f"{self.questions} questions need as many keys, and there are {self.keys}: give more keys")

    def counts(self) -> tuple[int, int, int]:
        return 1, 1, self.keys - 1

    def apart(self) -> int:
        return self.questions if self.questions > 1 else 0


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
