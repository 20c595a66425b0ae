"""How policies look: a colour for each preset, the same in every picture, that the colour-blind can tell apart."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, TypeVar

INK, QUIET = "#111827", "#6b7280"

# Okabe and Ito's colours; the two routers are the strong ones.
COLOURS = {
    "dense": INK,
    "topk": "#e69f00",
    "quest": "#56b4e9",
    "router": "#d55e00",
    "router-on-quest": "#0072b2",
    "auto": "#cc79a7",
    "tuned": "#117733",  # policies that we ship tuned to a model
}
OTHERS = ("#7570b3", "#a6761d", "#66a61e", "#e7298a", "#1b9e77")  # of other compositions
BUDGET, SELECTIVITY = "#999999", "#009e73"  # the parts of a router's lift
MARKERS = {"": "o", "random": "^", "last": "v", "matched": "s"}
VARIANTS = ("o", "D", "P", "X", "h", "p")  # a preset with different overrides


class Named(Protocol):
    """What a policy must tell of itself to get a look: `closecall_lab.eval.spec.Spec` does."""

    @property
    def colour(self) -> str: ...
    @property
    def base(self) -> Named: ...
    @property
    def control(self) -> str: ...
    @property
    def title(self) -> str: ...


N = TypeVar("N", bound=Named)


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


def colour(name: str) -> str:
    """The same in every picture, also of a policy we have no colour for, which gets one by its name."""
    return COLOURS.get(name) or OTHERS[sum(map(ord, name)) % len(OTHERS)]


def _lighter(colour: str, share: float) -> str:
    parts = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(x + (255 - x) * share):02x}" for x in parts)


def looks(specs: Iterable[N]) -> dict[N, Look]:
    """One look for each policy, told apart by marker and lightness where only overrides differ."""
    listed = list(dict.fromkeys(specs))
    variants: dict[str, list[Named]] = {}
    for spec in listed:
        alike = variants.setdefault(spec.colour, [])
        if spec.base not in alike:
            alike.append(spec.base)
    styles = {}
    for spec in listed:
        place, among = variants[spec.colour].index(spec.base), len(variants[spec.colour])
        # The last listed, the strongest setting, has the full colour.
        share = 0.55 * (among - 1 - place) / (among - 1) if among > 1 else 0.0
        marker = MARKERS[spec.control] if spec.control or among == 1 else VARIANTS[place % len(VARIANTS)]
        styles[spec] = Look(spec.title, _lighter(colour(spec.colour), share), marker, bool(spec.control))
    return styles
