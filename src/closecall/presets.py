"""Presets: short names for compositions of a scorer and a rule, and what each has beside the paper's defaults."""

from __future__ import annotations

import difflib
from typing import Any

from .registry import unknown
from .rules.base import RULES
from .scorers.base import SCORERS

# Every preset is a composition: the scorer's name (dense needs none) and the rule's.
PRESETS: dict[str, tuple[str | None, str]] = {
    "dense": (None, "dense"),
    "topk": ("mean", "topk"),
    "quest": ("quest", "topk"),
    "router": ("mean", "router"),
    "router-on-quest": ("quest", "router"),
    "auto": ("outliers", "last-tile"),
}

# What a preset has beside the paper's defaults. `auto` is the selector that won our own comparison at equal budget
# (docs/results.md): one key of a block as it is, half of the others' box, in each row a softmax over blocks. Uniform
# top-k, but for the last tile, where most prompts have their question: that reads everything, and the others pay about
# one block each. From a tile budget of 6 on, what they give at most (0.3 of their unforced blocks) is enough for that.
GIVEN: dict[str, dict[str, Any]] = {"auto": {"m": 1, "c": 0.5, "aggregate": "softmax", "factor": "dense", "give": 0.3}}

# What comes with a preset's pool where nobody says otherwise: four outlying rows of a tile, and the last 1K rows of a
# prompt as they are. With them pool=16 lost no answers on the probes that means alone lose (docs/selectors.md).
WITH_POOL: dict[str, dict[str, int]] = {"auto": {"outlying": 4, "unpooled": 16}}


def composed(scorer: str | None, rule: str) -> str:
    """The name of a composition with default parameters: a preset's name, or RULE-on-SCORER."""
    plain = (n for n, parts in PRESETS.items() if parts == (scorer, rule) and n not in GIVEN)
    return next(plain, f"{rule}-on-{scorer}")


def parts_of(name: str) -> tuple[str | None, str]:
    """The names of the scorer (None: it needs none) and the rule of a preset, or of any `RULE-on-SCORER`."""
    if name in PRESETS:
        return PRESETS[name]
    rule, on, scorer = name.partition("-on-")
    if not on:
        raise unknown("policy", name, PRESETS)
    if rule not in RULES.names() or scorer not in SCORERS.names():
        every = [*PRESETS, *(f"{r}-on-{s}" for r in RULES.names() for s in SCORERS.names())]
        near = difflib.get_close_matches(name, every, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(
            f"unknown policy {name!r}: {hint}known: {', '.join(sorted(PRESETS))}, and RULE-on-SCORER of the rules "
            f"{', '.join(RULES.names())} and the scorers {', '.join(SCORERS.names())}"
        )
    return scorer, rule
