"""What is to be run: models x tasks x contexts x policies x budgets, and which policy a name stands for."""

from __future__ import annotations

import functools
import hashlib
import re
import warnings
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, field, fields, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from closecall.checks import is_finite
from closecall.overrides import split as split_overrides
from closecall.overrides import value as read_value
from closecall.overrides import write as write_value
from closecall.policy import FILE, TIMES, TUNED, Policy, accepted, policy, saved_at
from closecall.presets import GIVEN, parts_of
from closecall.registry import Component, unknown
from closecall.rules.base import RULES, Rule
from closecall.rules.router import Router
from closecall.rules.topk import TopK
from closecall.triggers.base import TRIGGERS
from closecall.triggers.quantile import Quantile
from closecall.tuned import shipped

CONTROLS = {
    "random": "as many tiles as the router's, drawn at random",
    "last": "as many tiles as the router's, always the last ones",
    "matched": "uniform top-k that keeps, on each example, as many blocks as the router did",
}
DEFAULT = ("dense", "topk", "quest", "router", "router-on-quest", "auto")
SAVED = "saved"  # where its name says which one it was


@dataclass(frozen=True)
class Spec:
    """A policy as it is asked for, `router-on-quest/matched:q=0.3`: preset, control, overrides. Budgets come later.

    A policy from a file, `file:PATH`, is named by its composition, any unusual options of its scorer and grid, the
    file's name and a digest of its content: `router-on-quest:saved=policy-1a2b3c4d`. So results keep their name
    wherever the file goes, and other content has another name. Read back from a store, there is only the name: it makes
    no policy.
    """

    preset: str
    control: str = ""
    overrides: tuple[tuple[str, Any], ...] = ()
    saved: Policy | None = field(default=None, repr=False, compare=False)  # what was in the file

    @classmethod
    def parse(cls, text: str) -> Spec:
        if text.strip().startswith((FILE, TUNED)):
            return cls._from_file(*saved_at(text.strip()))
        named, _, options = text.strip().partition(":")
        preset, _, control = named.partition("/")
        _, rule = parts_of(preset)
        if control and control not in CONTROLS:
            raise unknown(f"control of {preset!r}", control, CONTROLS)
        if control and rule != "router":
            raise ValueError(f"{text!r}: only a router has controls, {preset} has no tiles to trigger")
        overrides = {
            key: written if key == SAVED else read_value(written, f"{text!r}: {key}")
            for key, written in split_overrides(options, text).items()
        }
        if "budget" in overrides:
            raise ValueError(f"{text!r}: budgets are given for all policies alike, with --budgets")
        if control in ("random", "last") and "trigger" in overrides:
            raise ValueError(f"{text!r}: /{control} is the trigger already")
        spec = cls(preset, control, tuple(sorted(overrides.items())))
        if SAVED not in overrides:
            spec.policy(_some_budget(overrides.get("tile_factor")))  # wrong values show now
        return spec

    @classmethod
    def _from_file(cls, text: str, times: float | None) -> Spec:
        path, control = text, ""
        before, slash, last = text.rpartition("/")
        if slash and not Path(text).exists():
            if last in CONTROLS:
                path, control = before, last
            elif Path(before).is_file():
                raise unknown(f"control of {before!r}", last, CONTROLS)
        made = _read(path)
        overrides = _overrides_of(made, path)
        if times is not None:
            made, overrides = made.times(times), tuple(sorted((*overrides, ("times", times))))
        spec = cls(made.name, "", overrides, made)
        if control and not spec.router:
            raise ValueError(f"{FILE}{text}: only a router has controls, {made.name} has no tiles to trigger")
        if control and control not in spec.controls:
            assert isinstance(made.rule, Router)
            raise ValueError(
                f"{FILE}{text}: /{control} triggers as many tiles as a router that triggers a share q of them, and "
                f"this one's trigger is {made.rule.trigger.name!r}: its control is /matched"
            )
        return replace(spec, control=control)

    def __str__(self) -> str:
        options = ",".join(f"{key}={write_value(value)}" for key, value in self.overrides)
        return self.preset + (f"/{self.control}" if self.control else "") + (f":{options}" if options else "")

    @property
    def family(self) -> Spec:
        """The policy that this is a multiple of, or itself: one line in a picture."""
        return replace(self, overrides=tuple(given for given in self.overrides if given[0] != "times"), saved=None)

    @property
    def title(self) -> str:
        """Its name in pictures and verdicts: as one types it where we ship that very policy."""
        typed = _as_typed().get(str(self.family))
        times = dict(self.overrides).get("times")
        return str(self) if typed is None else typed if times is None else f"{typed}{TIMES}{write_value(times)}"

    @property
    def colour(self) -> str:
        """What it shares a colour with in pictures: its preset, or policies that we ship tuned."""
        return TUNED.removesuffix(":") if self.title.startswith(TUNED) else self.preset

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
        if SAVED not in dict(self.overrides):
            return self.preset != "dense"
        rule = RULES.make(parts_of(self.preset)[1], {}) if self.saved is None else self.saved.rule
        return "budget" in rule.parameters()

    def tile_budget(self, budget: int) -> int | None:
        """Blocks a tile keeps at this budget; None where the rule has no such number."""
        given = dict(self.overrides)
        if SAVED in given and self.saved is None:
            return round(given.get("tile_factor", 2) * budget) if self.has_budget else None
        return self.policy(budget).rule.tile_budget

    @property
    def base(self) -> Spec:
        """The router that this is the control of; itself where it is none."""
        return replace(self, control="")

    @property
    def controls(self) -> tuple[str, ...]:
        """The controls that a router can have. A trigger that takes no share q of all tiles leaves only /matched."""
        if not self.router or self.control:
            return ()
        rule = None if self.saved is None else self.saved.rule
        shares = (
            isinstance(rule.trigger, Quantile) if isinstance(rule, Router) else "trigger" not in dict(self.overrides)
        )
        return tuple(CONTROLS) if shares else ("matched",)

    def policy(self, budget: int, number: int = 0) -> Policy:
        """Makes the policy; for the matched control its router's, because what matches it is known once that ran.

        The random control draws other tiles for each example (`number`): with the same ones for all, it would hang on
        one draw whether the tile with the question is among them.
        """
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they are in the grid's notes
            return self._made(budget, number)

    def _made(self, budget: int, number: int = 0) -> Policy:
        overrides = dict(self.overrides)
        if SAVED in overrides:
            return self._made_from_saved(budget, number)
        if self.control in ("random", "last"):
            overrides["trigger"] = self.control
        if self.control == "random":
            overrides["seed"] = overrides.get("seed", 0) + number
        return policy(self.preset, **accepted(self.preset, overrides | {"budget": budget}) | overrides)

    def _made_from_saved(self, budget: int, number: int) -> Policy:
        if self.saved is None:
            raise ValueError(f"{self} is the name of a policy from a file: give the file itself, as {FILE}PATH")
        rule = _with_budget(self.saved.rule, budget)
        if self.control in ("random", "last"):
            rule = replace(rule, trigger=TRIGGERS.make(self.control, {"seed": number}))  # type: ignore[call-arg]
        return self.saved.replace(rule=rule)

    def notes(self, budget: int) -> list[str]:
        """The warnings of its policy at this budget; none where there is only the name of a policy from a file."""
        if SAVED in dict(self.overrides) and self.saved is None:
            return []
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            self.base._made(budget)
        return [str(w.message) for w in caught]


def title(name: str) -> str:
    """The title of the policy that has this name in a store."""
    return Spec.parse(name).title


@functools.cache
def _as_typed() -> dict[str, str]:
    """The policies that we tuned to models, by the names they have in a store."""
    return {str(Spec.parse(TUNED + model)): TUNED + model for model in shipped()}


def _read(path: str) -> Policy:
    """The policy that `Policy.save` wrote."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the budget in the file: the grid's is what counts
            return Policy.load(path)
    except FileNotFoundError as error:
        raise ValueError(str(error)) from error


def _overrides_of(made: Policy, path: str) -> tuple[tuple[str, Any], ...]:
    """The overrides that name a saved policy: its file and digest, and what its scorer and grid have of their own."""

    known = GIVEN.get(made.name, {})

    def unusual() -> Iterator[tuple[str, Any]]:
        for part in (made, made.scorer) if made.scorer is not None else (made,):
            for f in fields(part):
                value = getattr(part, f.name)
                usual = known.get(f.name, f.default)
                if isinstance(value, (int, float, str)) and usual is not MISSING and value != usual:
                    yield f.name, value
        factor = made.rule.tile_factor
        if factor not in (None, TopK.tile_factor):
            yield "tile_factor", factor

    name = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(path).stem)
    digest = hashlib.sha256(made.to_json().encode()).hexdigest()[:8]
    return tuple(sorted((dict(unusual()) | {SAVED: f"{name}-{digest}"}).items()))


def _with_budget(rule: Rule, budget: int) -> Rule:
    """The rule with this budget, also in the rules it is made of. A rule without a budget stays as it is."""

    def changed(part: Component) -> Any:
        changes: dict[str, Any] = {"budget": budget} if any(f.name == "budget" for f in fields(part)) else {}
        for f in fields(part):
            value = getattr(part, f.name)
            if isinstance(value, Component):
                changes[f.name] = changed(value)
        return replace(part, **changes)

    made: Rule = changed(rule)
    return made


def _some_budget(tile_factor: Any) -> int:
    """Returns a budget that this factor makes a whole number of blocks: budgets proper come later."""
    usable = is_finite(tile_factor)
    return 33 * (Fraction(str(tile_factor)).limit_denominator(1000).denominator if usable else 1)


def split(text: str) -> list[str]:
    """The comma-separated names of a list, each with its options: `a:x=1,y=2,b` is `a:x=1,y=2` and `b`."""
    names: list[str] = []
    for piece in filter(None, (p.strip() for p in text.split(","))):
        if names and re.match(r"[^:=]+=", piece):
            names[-1] += "," + piece
        else:
            names.append(piece)
    return list(dict.fromkeys(names))


def with_controls(specs: list[Spec]) -> list[Spec]:
    """Puts every router's controls behind it."""
    listed: list[Spec] = []
    for spec in specs:
        listed.append(spec)
        listed += [replace(spec, control=c) for c in spec.controls]
    return list(dict.fromkeys(listed))
