"""What is to be run: models x tasks x contexts x policies x budgets, and which policy a name stands for."""

from __future__ import annotations

import ast
import re
import warnings
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ..integrations.lm_eval import is_lm_eval
from ..policy import OVERRIDES, Policy, parts_of, policy, unknown
from ..rules import TopK

CONTROLS = {
    "random": "as many tiles as the router's, drawn at random",
    "last": "as many tiles as the router's, always the last ones",
    "matched": "uniform top-k that keeps, on each example, as many blocks as the router did",
}
DEFAULT = ("dense", "topk", "quest", "router", "router-on-quest")


@dataclass(frozen=True)
class Spec:
    """A policy as it is asked for, `router-on-quest/matched:q=0.3`: preset, control, overrides. Budgets come later."""

    preset: str
    control: str = ""
    overrides: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def parse(cls, text: str) -> Spec:
        named, _, options = text.strip().partition(":")
        preset, _, control = named.partition("/")
        _, rule = parts_of(preset)
        if control and control not in CONTROLS:
            raise unknown(f"control of {preset!r}", control, CONTROLS)
        if control and rule != "router":
            raise ValueError(f"{text!r}: only a router has controls, {preset} has no tiles to trigger")
        found = {}
        for option in filter(None, options.split(",")):
            key, equals, value = option.partition("=")
            if not equals:
                raise ValueError(f"{text!r}: an override is written key=value, got {option!r}")
            if key not in OVERRIDES:
                raise unknown(f"override in {text!r}", key, OVERRIDES)
            if key == "budget":
                raise ValueError(f"{text!r}: budgets are given for all policies alike, with --budgets")
            if control in ("random", "last") and key == "trigger":
                raise ValueError(f"{text!r}: /{control} is the trigger already")
            found[key] = _literal(value)
        spec = cls(preset, control, tuple(sorted(found.items())))
        spec.policy(33)  # wrong values are found now, not when their turn comes
        return spec

    def __str__(self) -> str:
        options = ",".join(f"{key}={value}" for key, value in self.overrides)
        return self.preset + (f"/{self.control}" if self.control else "") + (f":{options}" if options else "")

    @property
    def scorer(self) -> str | None:
        return dict(self.overrides).get("scorer", parts_of(self.preset)[0])

    @property
    def router(self) -> bool:
        """Whether it is a router, or the control of one."""
        return parts_of(self.preset)[1] == "router"

    @property
    def triggers(self) -> bool:
        """Whether some tiles get more than others."""
        return self.router and self.control != "matched"

    @property
    def has_budget(self) -> bool:
        return self.preset != "dense"

    @property
    def base(self) -> Spec:
        """The router that this is the control of; itself where it is none."""
        return Spec(self.preset, "", self.overrides)

    def policy(self, budget: int, number: int = 0) -> Policy:
        """The policy; for the matched control, that of its router: which policy matches it is known once that ran.

        The random control draws other tiles for each example (`number`): with the same ones for all, it would hang on
        one draw whether the tile with the question is among them.
        """
        given = dict(self.overrides)
        if self.control in ("random", "last"):
            given["trigger"] = self.control
        if self.control == "random":
            given["seed"] = given.get("seed", 0) + number
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they are in the panel's notes
            return policy(self.preset, budget=budget, **given)

    def notes(self, budget: int) -> list[str]:
        """What its policy warns of at this budget."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            policy(self.preset, budget=budget, **dict(self.overrides))
        return [str(w.message) for w in caught]


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def split(text: str) -> list[str]:
    """The comma-separated names of a list, each with its options: `a:x=1,y=2,b` is `a:x=1,y=2` and `b`."""
    found: list[str] = []
    for piece in filter(None, (p.strip() for p in text.split(","))):
        if found and re.match(r"[^:=]+=", piece):
            found[-1] += "," + piece
        else:
            found.append(piece)
    return list(dict.fromkeys(found))


def with_controls(specs: list[Spec]) -> list[Spec]:
    """Every router is followed by its controls."""
    found: list[Spec] = []
    for spec in specs:
        found.append(spec)
        if spec.router and not spec.control:
            given = dict(spec.overrides)
            found += [
                Spec(spec.preset, c, spec.overrides) for c in CONTROLS if c == "matched" or "trigger" not in given
            ]
    return list(dict.fromkeys(found))


@dataclass(frozen=True)
class Panel:
    """All that one `closecall eval` runs. Every policy sees the same examples."""

    models: tuple[str, ...]
    tasks: tuple[str, ...]
    contexts: tuple[int, ...]
    specs: tuple[Spec, ...]
    budgets: tuple[int, ...]
    n: int
    seed: int = 0
    dtype: str | None = None

    def __post_init__(self) -> None:
        for name in ("models", "tasks", "contexts", "specs", "budgets"):
            if not getattr(self, name):
                raise ValueError(f"{name} is empty: name at least one")
        for name, least in (("n", 1), ("seed", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")
        for context in self.contexts:
            if context < 1:
                raise ValueError(f"a context is a number of tokens, at least 1, got {context!r}")
        for spec, budget in self.variants:
            made = spec.policy(budget)
            if isinstance(made.rule, TopK) and made.rule.tile_budget <= made.most_forced:
                raise ValueError(
                    f"{spec} at budget {budget} keeps {made.rule.tile_budget} blocks a tile, not more than the "
                    f"{made.most_forced} it can be forced to keep: use a larger budget"
                )

    @cached_property
    def variants(self) -> list[tuple[Spec, int]]:
        """Every policy at every budget, routers before their matched controls, and dense once, with budget 0."""
        listed = [(spec, budget) for spec in self.specs for budget in (self.budgets if spec.has_budget else (0,))]
        listed += [(spec.base, budget) for spec, budget in listed if spec.control == "matched"]
        return sorted(dict.fromkeys(listed), key=lambda v: v[0].control == "matched")

    @property
    def notes(self) -> list[str]:
        found = (note for spec, budget in self.variants if spec.has_budget for note in spec.notes(budget))
        return list(dict.fromkeys(found))

    @property
    def places(self) -> list[tuple[str, int]]:
        """Every task at every context; those of lm-eval once, at 0: their documents have their own lengths."""
        ours = [(task, context) for context in self.contexts for task in self.tasks if not is_lm_eval(task)]
        return ours + [(task, 0) for task in self.tasks if is_lm_eval(task)]

    def jobs(self) -> list[Job]:
        """Example by example, so that a run stopped anywhere has every cell filled about equally."""
        return [
            Job(task, context, self.seed, number, tuple(self.variants))
            for number in range(self.n)
            for task, context in self.places
        ]


@dataclass(frozen=True)
class Job:
    """One example of one model under all policies. `known` are the runs there are, so that only others are made."""

    task: str
    context: int
    seed: int
    number: int
    variants: tuple[tuple[Spec, int], ...]
    known: dict[str, tuple[float, int]] = field(default_factory=dict, hash=False)
