"""The pointer-chase haystack of the paper's Appendix B: entries that send the reader on, shuffled into filler.

Only the first entry can be found by what the question says; each further one is known when the one before is read. The
gold spans are the chain's entries in hop order, so a hit rate per hop can be told.
"""

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

DIGITS = 5
INTRO = "The text below contains entries of a register. Some entries point to another entry, some record a value."
ENTRY_TOKENS = 16  # an entry's code or a value, and the words around it


@TASKS.register("pointer-chase")
@dataclass(frozen=True, kw_only=True)
class PointerChase(Generated):
    """A chain of `hops` pointers and a value, among the entries of `distractors` chains of the same length.

    `aloud` lets the model write down every entry on its way. Each hop is then an easy look-up of its own, but all
    except the first happen while the answer is generated, after the prefill that a policy makes sparse. With more
    `questions` than one, so many of the chains are asked for one after the other, after one prefill.
    """

    hops: int = 3
    distractors: int = 4
    haystack: str = "noise"
    aloud: bool = False
    questions: int = 1

    def __post_init__(self) -> None:
        check_least(self, hops=1, distractors=0, questions=1)
        if self.questions > self.distractors + 1:
            raise ValueError(
                f"{self.questions} questions need as many chains, and there are {self.distractors + 1}: "
                f"give more distractors"
            )
        if self.questions > 1 and self.aloud:
            raise ValueError("aloud is for one generated answer: drop it, or ask one question")
        haystacks.check(self.haystack)

    def make(self, room: Room, context: int, key: str, chance: random.Random) -> Example:
        drawer = Drawer(chance)
        chains = [[drawer.code() for _ in range(self.hops + 1)] for _ in range(self.distractors + 1)]
        values = [drawer.number(DIGITS) for _ in chains]
        needles = [entry for chain, value in zip(chains, values, strict=True) for entry in entries(chain, value)]
        steps = self.hops + 1
        asks = [self._ask(chains[i][0], values[i], range(steps * i, steps * (i + 1))) for i in range(self.questions)]
        spare: list[str] = []

        def decoy() -> str:
            if not spare:  # a further chain, whole, in a random order
                spare.extend(entries([drawer.code() for _ in range(self.hops + 1)], drawer.number(DIGITS)))
                chance.shuffle(spare)
            return spare.pop()

        plan = Hiding(
            task=str(self),
            intro=INTRO,
            needles=needles,
            depths=[chance.random() for _ in needles],
            asks=asks,
            secrets=[*values, *(code for chain in chains for code in chain)],
            decoy=decoy,
            max_new_tokens=ENTRY_TOKENS * (steps if self.aloud else 1),
            shared=self.questions > 1,
        )
        return hide(plan, self.haystack, room, context, key)

    def _ask(self, first: str, value: str, gold: range) -> Ask:
        how = "Write down every entry on the way, then the value." if self.aloud else "Answer with the value alone."
        question = f"Start at entry {first} and follow the pointers. Which value does the chain end at? {how}"
        lead = f"Entry {first} points to" if self.aloud else f"Starting at entry {first}, the chain ends at the value"
        return Ask(question, lead, (value,), gold)


def entries(chain: list[str], value: str) -> list[str]:
    """One entry per code: pointers to the next, and the value in the last."""
    pointers = [f"Entry {a}: continue at entry {b}." for a, b in pairwise(chain)]
    return [*pointers, f"Entry {chain[-1]}: the recorded value is {value}."]
