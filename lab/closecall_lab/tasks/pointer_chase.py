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
from .hiding import Plan, hide
from .lexicon import Drawer

DIGITS = 5
INTRO = "The text below contains entries of a register. Some entries point to another entry, some record a value."
ENTRY_TOKENS = 16  # an entry's code or a value, and the words around it


@TASKS.register("pointer-chase")
@dataclass(frozen=True, kw_only=True)
class PointerChase(Generated):
    """A chain of `hops` pointers and a value, among the entries of `distractors` chains of the same length.

    `aloud` lets the model write down every entry on its way. Each hop is then an easy look-up of its own, but all
    except the first happen while the answer is generated, after the prefill that a policy makes sparse.
    """

    hops: int = 3
    distractors: int = 4
    haystack: str = "noise"
    aloud: bool = False

    def __post_init__(self) -> None:
        check_least(self, hops=1, distractors=0)
        haystacks.check(self.haystack)

    def make(self, room: Room, context: int, key: str, chance: random.Random) -> Example:
        drawer = Drawer(chance)
        chains = [[drawer.code() for _ in range(self.hops + 1)] for _ in range(self.distractors + 1)]
        values = [drawer.number(DIGITS) for _ in chains]
        needles = [entry for chain, value in zip(chains, values, strict=True) for entry in entries(chain, value)]
        first, gold = chains[0][0], range(self.hops + 1)
        if self.aloud:
            how = "Write down every entry on the way, then the value."
            say, room_for_answer = f"Entry {first} points to", ENTRY_TOKENS * (self.hops + 1)
        else:
            how = "Answer with the value alone."
            say, room_for_answer = f"Starting at entry {first}, the chain ends at the value", ENTRY_TOKENS
        spare: list[str] = []

        def decoy() -> str:
            if not spare:  # a further chain, whole, in a random order
                spare.extend(entries([drawer.code() for _ in range(self.hops + 1)], drawer.number(DIGITS)))
                chance.shuffle(spare)
            return spare.pop()

        plan = Plan(
            task=str(self),
            intro=INTRO,
            needles=needles,
            depths=[chance.random() for _ in needles],
            gold=gold,
            question=f"Start at entry {first} and follow the pointers. Which value does the chain end at? {how}",
            lead=say if room.templated else f"Answer: {say}",
            answers=(values[0],),
            secrets=[*values, *(code for chain in chains for code in chain)],
            decoy=decoy,
            max_new_tokens=room_for_answer,
        )
        return hide(plan, self.haystack, room, context, key)


def entries(chain: list[str], value: str) -> list[str]:
    """One entry per code: pointers to the next, and the value in the last."""
    pointers = [f"Entry {a}: continue at entry {b}." for a, b in pairwise(chain)]
    return [*pointers, f"Entry {chain[-1]}: the recorded value is {value}."]
