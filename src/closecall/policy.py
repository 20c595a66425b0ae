"""Policies: a scorer composed with a rule, as immutable values with names, JSON and a readable `str`."""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

if TYPE_CHECKING:
    from .rules import Rule
    from .scorers import Scorer

JSON_VERSION = 1


def unknown(kind: str, given: object, known: Iterable[str]) -> ValueError:
    """The error for a name nobody registered: says the near match, then all there is."""
    names = sorted(known)
    near = difflib.get_close_matches(str(given), names, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return ValueError(f"unknown {kind} {given!r}: {hint}known: {', '.join(names)}")


@dataclass(frozen=True)
class Component:
    """A named, immutable part of a policy. Its dataclass fields are its parameters."""

    name: ClassVar[str]

    def to_dict(self) -> dict[str, Any]:
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {"name": self.name} | {
            key: value.to_dict() if isinstance(value, Component) else value for key, value in fields.items()
        }


C = TypeVar("C", bound=Component)


class Registry(Generic[C]):
    """Classes by name. `@SCORERS.register("mine")` above a frozen dataclass is all that a new scorer needs."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._classes: dict[str, type[C]] = {}

    def register(self, name: str) -> Callable[[type[C]], type[C]]:
        def add(cls: type[C]) -> type[C]:
            if name in self._classes:
                raise ValueError(f"{self.kind} {name!r} is registered already: choose another name")
            cls.name = name
            self._classes[name] = cls
            return cls

        return add

    def names(self) -> list[str]:
        return sorted(self._classes)

    def __getitem__(self, name: str) -> type[C]:
        if name not in self._classes:
            raise unknown(self.kind, name, self._classes)
        return self._classes[name]

    def make(self, name: str, params: dict[str, Any]) -> C:
        """An instance from those of `params` that its class takes."""
        cls = self[name]
        return cls(**{f.name: params[f.name] for f in dataclasses.fields(cls) if f.name in params})

    def from_dict(self, data: dict[str, Any]) -> C:
        if not isinstance(data, dict) or "name" not in data:
            raise ValueError(f"a {self.kind} is written as an object with its name and parameters, got {data!r}")
        params = dict(data)
        cls = self[params.pop("name")]
        known = {f.name for f in dataclasses.fields(cls)}
        for key in params:
            if key not in known:
                raise unknown(f"parameter of {self.kind} {cls.name!r}", key, known)
        return cls(**params)


SCORERS: Registry[Scorer] = Registry("scorer")
RULES: Registry[Rule] = Registry("rule")

# Every preset is a composition: the scorer's name (dense needs none) and the rule's.
PRESETS: dict[str, tuple[str | None, str]] = {
    "dense": (None, "dense"),
    "topk": ("mean", "topk"),
    "quest": ("quest", "topk"),
    "router": ("mean", "router"),
    "router-on-quest": ("quest", "router"),
    "auto": ("auto", "router"),
}

OVERRIDES = (
    "budget", "tile_factor", "q", "rho", "block", "tile", "sinks", "trigger", "aggregate", "threshold", "seed",
)  # fmt: skip


@dataclass(frozen=True)
class Policy:
    """Which blocks a tile of queries may read: a scorer, a rule, and the grid both live on."""

    scorer: Scorer | None
    rule: Rule
    block: int = 64
    tile: int = 64
    sinks: int = 1
    aggregate: str = "max"

    def __post_init__(self) -> None:
        from .scorers import AGGREGATES  # the spine: scorers import this module

        for field, least in (("block", 1), ("tile", 1), ("sinks", 0)):
            value = getattr(self, field)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{field} must be a whole number of at least {least}, got {value!r}")
        if self.aggregate not in AGGREGATES:
            raise unknown("aggregate", self.aggregate, AGGREGATES)
        if self.scorer is None and self.rule.needs_scores:
            raise ValueError(f"rule {self.rule.name!r} needs a scorer: one of {', '.join(SCORERS.names())}")
        self.rule.check(self)

    @property
    def name(self) -> str:
        """The preset this is a variant of, or rule-on-scorer."""
        parts = (self.scorer.name if self.scorer else None, self.rule.name)
        return next((n for n, p in PRESETS.items() if p == parts), f"{parts[1]}-on-{parts[0]}")

    @property
    def most_forced(self) -> int:
        """The most blocks any tile can be forced to keep: the sinks, and its own blocks when off the block grid."""
        return self.sinks + (self.tile + self.block - 2) // self.block + 1

    def replace(self, **fields: Any) -> Policy:
        return dataclasses.replace(self, **fields)

    def to_json(self) -> str:
        data = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        parts = {k: v.to_dict() if isinstance(v, Component) else v for k, v in data.items()}
        return json.dumps({"closecall_policy": JSON_VERSION} | parts)

    @classmethod
    def from_json(cls, text: str) -> Policy:
        data = json.loads(text)
        version = data.pop("closecall_policy", None) if isinstance(data, dict) else None
        if version != JSON_VERSION:
            raise ValueError(f"not a policy of JSON version {JSON_VERSION}: closecall_policy is {version!r}")
        scorer, rule = data.pop("scorer", None), data.pop("rule", None)
        known = {f.name for f in dataclasses.fields(cls)} - {"scorer", "rule"}
        for key in data:
            if key not in known:
                raise unknown("policy field", key, known)
        return cls(scorer=SCORERS.from_dict(scorer) if scorer else None, rule=RULES.from_dict(rule), **data)

    def __str__(self) -> str:
        if self.scorer is None:
            return f"{self.name}: {self.rule.describe()}"
        return (
            f"{self.name}: {self.scorer.describe()}, {self.aggregate} over {self.tile}-row tiles; "
            f"{self.rule.describe()}; blocks of {self.block} keys, {self.sinks} sink"
        )


def policy(name: str, **overrides: Any) -> Policy:
    """A preset with overrides.

    Presets: `dense`, `topk`, `quest`, `router`, `router-on-quest`, and `auto`, which `attach` fits to the model.
    Overrides and the paper's defaults: `budget=33, tile_factor=2, q=0.4, rho=2, block=64, tile=64, sinks=1,
    trigger="quantile", aggregate="max"`; `threshold=` goes with `trigger="absolute"`, `seed=` with `trigger="random"`.
    Every preset takes every override, so that one sweep can run over all of them; a preset uses those its parts have
    (`dense` has no budget).

    >>> print(policy("router-on-quest", budget=33).rule.tile_budget)
    66
    """
    if name not in PRESETS:
        raise unknown("policy", name, PRESETS)
    for key in overrides:
        if key not in OVERRIDES:
            raise unknown("policy override", key, OVERRIDES)
    scorer_name, rule_name = PRESETS[name]
    grid = {f.name: overrides[f.name] for f in dataclasses.fields(Policy) if f.name in overrides}
    if scorer_name is None:
        grid = {key: grid[key] for key in ("block", "tile") if key in grid}
    return Policy(
        scorer=SCORERS.make(scorer_name, overrides) if scorer_name else None,
        rule=RULES[rule_name].from_overrides(overrides),
        **grid,
    )


def as_policy(value: Policy | str) -> Policy:
    """A policy, or the preset of that name."""
    if isinstance(value, Policy):
        return value
    if isinstance(value, str):
        return policy(value)
    raise TypeError(f"policy must be a closecall.Policy or a preset's name, got {type(value).__name__}")
