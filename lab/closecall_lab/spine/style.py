"""How policies look: a colour for each preset, the same in every picture, that the colour-blind can tell apart."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..eval.panel import Spec
from .plot import INK

# Okabe and Ito's colours; the two routers are the strong ones.
COLOURS = {
    "dense": INK,
    "topk": "#e69f00",
    "quest": "#56b4e9",
    "router": "#d55e00",
    "router-on-quest": "#0072b2",
    "auto": "#cc79a7",
}
OTHERS = ("#7570b3", "#a6761d", "#66a61e", "#e7298a", "#1b9e77")  # of other compositions
BUDGET, SELECTIVITY = "#999999", "#009e73"  # the parts of a router's lift
MARKERS = {"": "o", "random": "^", "last": "v", "matched": "s"}
VARIANTS = ("o", "D", "P", "X", "h", "p")  # a preset with different overrides


@dataclass(frozen=True)
class Look:
    """How one policy is drawn. Controls are hollow and dashed, in their router's colour."""

    label: str
    colour: str
    marker: str
    control: bool

    @property
    def line(self) -> str:
        return "--" if self.control else "-"

    @property
    def fill(self) -> str:
        return "white" if self.control else self.colour


def colour(preset: str) -> str:
    """The same in every picture, also of a policy we have no colour for, which gets one by its name."""
    return COLOURS.get(preset) or OTHERS[sum(map(ord, preset)) % len(OTHERS)]


def _lighter(colour: str, share: float) -> str:
    parts = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(x + (255 - x) * share):02x}" for x in parts)


def looks(specs: Iterable[Spec]) -> dict[Spec, Look]:
    """One look for each policy, told apart by marker and lightness where only overrides differ."""
    listed: Sequence[Spec] = list(dict.fromkeys(specs))
    bases: dict[str, list[Spec]] = {}
    for spec in listed:
        known = bases.setdefault(spec.preset, [])
        if spec.base not in known:
            known.append(spec.base)
    found = {}
    for spec in listed:
        mine = bases[spec.preset]
        place, of = mine.index(spec.base), len(mine)
        share = 0.55 * (of - 1 - place) / (of - 1) if of > 1 else 0.0  # the last listed, the strongest setting, is full
        marker = MARKERS[spec.control] if spec.control or of == 1 else VARIANTS[place % len(VARIANTS)]
        found[spec] = Look(str(spec), _lighter(colour(spec.preset), share), marker, bool(spec.control))
    return found
